"""The cluster's nodes, and engines and stores on them, as the Controller sees and commands them over Ray.

Part of RayKV's edge to Ray. How an engine's actor is started, found and ended is in `engine_actors`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray._private.state import available_resources_per_node

from raykv.actors import cluster, named_actor, store_handle
from raykv.actors.controller_world import FoundEngine, NodeRecord, Record, StoreBusy, WorldError
from raykv.actors.engine_actors import EngineActors, kill
from raykv.actors.node_facts import NodeFacts, probe
from raykv.cluster_messages import CONTROLLER, EngineOrder
from raykv.core.reconcile import Instance, StoreAt
from raykv.errors import HostError, HostRaised, HostTimeout
from raykv.store_messages import DrainReport, StoreSpec
from raykv.types import NODE_CHARS

logger = logging.getLogger("raykv")

PROBE_S = 60.0
ANSWER_S = 2.0
"""Seconds between two looks at whether a drain has ended, or is still wanted."""
DRAIN_S = 600.0
KV_NAMESPACE = b"raykv"


class RayWorld:
    """Implements `controller_world.World`. Any thread."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._engines = EngineActors(namespace)

    # -- seeing ---------------------------------------------------------------------------------------------

    def problem(self) -> str:
        """Why nothing can be done now; empty if it can. Bounded, unlike Ray's own calls without a head."""
        return "" if cluster.head_reachable() else "Ray's head is away: `raykv restart-head`."

    def nodes(self) -> list[NodeRecord]:
        """The living nodes."""
        free = available_resources_per_node()
        return [
            NodeRecord(
                id=node["NodeID"],
                host=node["NodeManagerHostname"],
                address=node["NodeManagerAddress"],
                labels=dict(node.get("Labels", {})),
                total=dict(node.get("Resources", {})),
                free=dict(free.get(node["NodeID"], {})),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def probe(self, nodes: Collection[str], folders: Sequence[str], model: str | None) -> Mapping[str, NodeFacts]:
        """Facts of these nodes; those that do not answer in PROBE_S are left out."""
        task = ray.remote(num_cpus=0, max_retries=0)(probe)
        refs = {node: task.options(**named_actor.on_node(node)).remote(list(folders), model) for node in nodes}
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=PROBE_S) if refs else None
        facts = {}
        for node, ref in refs.items():
            with contextlib.suppress(Exception):
                facts[node] = ray.get(ref, timeout=0)
        return facts

    def engines(self, nodes: Collection[str]) -> Mapping[Instance, FoundEngine]:
        """The engines on these nodes. One that does not answer in time has no report."""
        return self._engines.found(nodes)

    def stores(self, nodes: Collection[str]) -> frozenset[StoreAt]:
        """The stores on these nodes, by name and node."""
        full = {node[:NODE_CHARS]: node for node in nodes}
        found = set()
        for name in store_handle.stores(self._namespace):
            store, _, node = name.removeprefix(store_handle.PREFIX).rpartition("-")
            if node in full:
                found.add((store, full[node]))
        return frozenset(found)

    # -- doing: each blocks until it is done, and raises RayKVError if it is not --------------------------------

    def start_engine(self, instance: Instance, order: EngineOrder, resources: Mapping[str, float]) -> None:
        """Have Ray start the engine's actor. Returns when Ray has taken it; its state is seen by `engines`."""
        node = next((n for n in self.nodes() if n.id == instance.node), None)
        if node is None:
            raise WorldError(f"Node {instance.node[:8]} is gone.")
        self._engines.start(instance, order, resources, node.address)

    def stop_engine(self, instance: Instance, empty: bool) -> None:
        """End an engine and its actor, and wait until the actor's name is free."""
        self._engines.stop(instance, empty)

    def start_store(self, spec: StoreSpec, node: str) -> None:
        """Start a node's store, or find it."""
        store_handle.open_store(spec, node, namespace=self._namespace)

    def drain_store(self, at: StoreAt, leaves: bool) -> None:
        """Move its blocks to where others find them, then end it. `leaves`: its node goes, so it must end now; else
        raises StoreBusy if engines of somebody else's use it. If the node is to stay after all, so does the store."""
        name = store_handle.store_name(*at)
        actor = named_actor.find(name, self._namespace)
        if actor is None:
            return
        handle = store_handle.StoreHandle(name, actor)
        with contextlib.suppress(HostError):
            if not leaves and handle.call("status", timeout=10.0).engines:
                raise StoreBusy(f"Engines still use the store {at[0]}.")
        deadline = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline:
            try:
                report = self._drained(handle, at, leaves, deadline)
            except HostRaised as error:  # a store of another RayKV, or a defect
                logger.warning("the store %s can't be drained: %s", name, error)
                break
            except HostError as error:  # killed: Ray starts it again, and it finds its blocks
                logger.warning("the store %s did not end its drain, which goes on: %s", name, error)
                time.sleep(ANSWER_S)
                continue
            if report is None:
                return
            logger.info("the store %s: %s", name, report)
            break
        self.end_store(at)

    def _drained(
        self, handle: store_handle.StoreHandle, at: StoreAt, leaves: bool, deadline: float
    ) -> DrainReport | None:
        """How its drain ended; None: its node stays, so the drain was undone. Raises HostError."""
        done: queue.SimpleQueue[tuple[Any, HostError | None]] = queue.SimpleQueue()
        limit = max(1.0, deadline - time.monotonic())
        handle.submit("drain", limit, self._takers(at), done=lambda result, error: done.put((result, error)))
        while time.monotonic() < deadline + ANSWER_S:
            with contextlib.suppress(queue.Empty):
                report, error = done.get(timeout=ANSWER_S)
                if error is not None:
                    raise error
                return None if self._stays(at, leaves) and self._undrained(handle) else report
            if self._stays(at, leaves) and self._undrained(handle):
                return None
        raise HostTimeout(f"{handle.name} is still being drained")

    def _takers(self, at: StoreAt) -> list[str]:
        """The actors of the stores of that name on nodes that stay."""
        nodes = {node.id for node in self.nodes()} - self.load().draining - {at[1]}
        return [store_handle.store_name(*other) for other in sorted(self.stores(nodes)) if other[0] == at[0]]

    def _stays(self, at: StoreAt, leaves: bool) -> bool:
        return leaves and at[1] not in self.load().draining

    def _undrained(self, handle: store_handle.StoreHandle) -> bool:
        """It takes saves again."""
        handle.call("undrain", timeout=10.0)
        return True

    def end_store(self, at: StoreAt) -> None:
        """End it at once; its disk tier stays."""
        name = store_handle.store_name(*at)
        actor = named_actor.find(name, self._namespace)
        if actor is None:
            return
        with contextlib.suppress(HostError):
            store_handle.StoreHandle(name, actor).call("shutdown", True, timeout=store_handle.SHUTDOWN_S)
        kill(actor, f"store {name}", name, self._namespace)

    # -- remembering ----------------------------------------------------------------------------------------

    def load(self) -> Record:
        """What was saved; empty if nothing was."""
        from ray.experimental.internal_kv import _internal_kv_get

        return Record.from_bytes(_internal_kv_get(self._key(), namespace=KV_NAMESPACE))

    def save(self, record: Record) -> None:
        """Into the GCS, with which it survives a restart of the head."""
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(self._key(), record.to_bytes(), overwrite=True, namespace=KV_NAMESPACE)

    def _key(self) -> bytes:
        return f"{CONTROLLER}:{self._namespace}".encode()


def running_tiers(store: str, namespace: str = "raykv") -> list[dict[str, Any]] | None:
    """The tiers of a store of this node, as a TierConnector's config lists them; None if it does not run."""
    name = store_handle.store_name(store, ray.get_runtime_context().get_node_id())
    actor = named_actor.find(name, namespace)
    if actor is None:
        return None
    spec = store_handle.StoreHandle(name, actor).call("info", timeout=ANSWER_S * 5)["spec"]
    tiers = [{"medium": medium, "capacity": size, "path": path} for medium, size, path in spec["tiers"]]
    tiers = [{key: value for key, value in tier.items() if value is not None} for tier in tiers]
    if spec.get("peer"):
        tiers.insert(sum(tier["medium"] != "fs" for tier in tiers), {"medium": "peer"})
    return tiers
