"""What the Controller sees of the cluster and can do there. `nodes.RayWorld` has it over Ray; tests have a fake."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from raykv.actors.node_facts import NodeFacts
from raykv.cluster_messages import EngineOrder, EngineReport
from raykv.core.reconcile import Instance, StoreAt
from raykv.errors import ClusterError, RayKVError
from raykv.store_messages import StoreSpec

VERSION = 1


class WorldError(RayKVError):
    """Something on a node could not be done; it is tried again."""


class StoreBusy(WorldError):
    """A store that is not wanted any more is still used."""


@dataclass(frozen=True)
class NodeRecord:
    """A living node, as Ray knows it. `free`: its resources that nobody uses."""

    id: str
    host: str
    address: str
    labels: Mapping[str, str]
    total: Mapping[str, float]
    free: Mapping[str, float]


def node_named(nodes: Sequence[NodeRecord], name: str) -> NodeRecord:
    """The node that a person means: by the first letters of its id, its host or its address. Raises ClusterError."""
    matching = [one for one in nodes if one.id.startswith(name) or name in (one.host, one.address)]
    if len(matching) != 1:
        known = ", ".join(f"{one.id[:8]} ({one.host})" for one in nodes)
        problem = "means several nodes" if matching else "is not a node of this cluster"
        raise ClusterError(f"{name!r} {problem}. Name one by the first letters of its id: {known}.")
    return matching[0]


@dataclass(frozen=True)
class FoundEngine:
    """An engine's actor. `report` None: it has not answered."""

    actor: str
    digest: str
    report: EngineReport | None


@dataclass(frozen=True)
class Record:
    """What outlives the Controller: the spec's JSON (empty: nothing is wanted), the nodes that are drained, and the
    names of all stores that were ever wanted and not ended yet: no others are touched."""

    spec: str = ""
    draining: frozenset[str] = frozenset()
    stores: frozenset[str] = field(default_factory=frozenset)

    def to_bytes(self) -> bytes:
        """JSON with a version."""
        content = {"version": VERSION, "spec": self.spec}
        return json.dumps({**content, "draining": sorted(self.draining), "stores": sorted(self.stores)}).encode()

    @classmethod
    def from_bytes(cls, raw: bytes | None) -> Record:
        """Empty for None. Raises WorldError for what another version has written."""
        if not raw:
            return cls()
        try:
            read = json.loads(raw)
            if read["version"] != VERSION:
                raise WorldError(f"The Controller's record has version {read['version']}, this RayKV has {VERSION}.")
            return cls(read["spec"], frozenset(read["draining"]), frozenset(read["stores"]))
        except (ValueError, KeyError, TypeError) as error:
            raise WorldError(f"The Controller's record can't be read: {error}") from error


class World(Protocol):
    """Every method may be called from any thread. What does something blocks until it is done, or raises RayKVError."""

    def problem(self) -> str:
        """Why nothing can be seen or done now; empty if it can."""

    def nodes(self) -> list[NodeRecord]:
        """The living nodes."""

    def probe(self, nodes: Collection[str], folders: Sequence[str], model: str | None) -> Mapping[str, NodeFacts]:
        """Facts of these nodes, of those that answer in time."""

    def engines(self, nodes: Collection[str]) -> Mapping[Instance, FoundEngine]:
        """All engines on these nodes."""

    def stores(self, nodes: Collection[str]) -> frozenset[StoreAt]:
        """All stores on these nodes."""

    def start_engine(self, instance: Instance, order: EngineOrder, resources: Mapping[str, float]) -> None:
        """Returns when it is taken; how it goes is seen by `engines`."""

    def stop_engine(self, instance: Instance, empty: bool) -> None:
        """When it returns `engines` does not see it any more. `empty`: its requests may end first."""

    def start_store(self, spec: StoreSpec, node: str) -> None:
        """When it returns `stores` sees it."""

    def drain_store(self, at: StoreAt, leaves: bool) -> None:
        """Move its blocks away, then end it. Raises StoreBusy if it is used and its node does not leave."""

    def end_store(self, at: StoreAt) -> None:
        """End it."""

    def load(self) -> Record:
        """What was saved last."""

    def save(self, record: Record) -> None:
        """Durably, as far as the cluster's head is."""
