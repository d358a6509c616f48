"""Where engines and stores go: (what is wanted, the nodes, what runs already) → assignments, or why not.

An engine goes to a node that has its labels, has its resources free, and has its store: a store's host tier must fit
into the node's memory, its disk tier onto the disk, and a store that is wanted on some nodes only is on these. So a
decode engine is never put where its tiers can't be. Engines that run stay where they are, whatever would be better.

Resources are whole amounts of a node, so this is bin packing. A search with the better nodes first, that takes the
engines with the fewest choices first and gives up after MAX_STEPS, finds a way in practice at once where there is one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from raykv.config.cluster_spec import ClusterSpec, EngineSpec, Placement, StoreWanted
from raykv.errors import ConfigError
from raykv.store_messages import Medium

MAX_STEPS = 2_000
EPSILON = 1e-6
"""Ray counts in steps of 1e-4: less than that is no resource."""


class PlacementError(ConfigError):
    """The cluster's nodes can't hold what the spec wants."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster at one moment. Amounts are in bytes, or as Ray counts resources.

    `free` is what is free for engines, those of RayKV's that run there not counted as a use. `memory` and `disks`
    (by folder) are what stores may take, their own present share included. None or absent: not known, so not checked.
    `model` None: not looked for.
    """

    id: str
    host: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    total: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)
    memory: int | None = None
    disks: Mapping[str, int] = field(default_factory=dict)
    model: bool | None = None
    usable: bool = True
    """False: it is being drained, so nothing is put there and nothing stays."""
    known: bool = True
    """False: it was not asked yet, so nothing new is put there."""

    @property
    def called(self) -> str:
        return f"{self.host or 'node'} ({self.id[:8]})"


@dataclass(frozen=True)
class Plan:
    """`engines`: node by replica. `stores`: (store, node). `unplaced`: why, by replica."""

    engines: Mapping[str, str]
    stores: frozenset[tuple[str, str]]
    unplaced: Mapping[str, str]


def place(
    spec: ClusterSpec,
    nodes: Sequence[Node],
    kept: Mapping[str, str] | None = None,
    preferred: Mapping[str, str] | None = None,
) -> Plan:
    """Assign every replica that can be. `kept`: where replicas run; these stay, if the node is there and usable.
    `preferred`: where one goes if it fits, whatever would be better."""
    return _Placer(spec, nodes, kept or {}, preferred or {}).plan()


def place_all(
    spec: ClusterSpec,
    nodes: Sequence[Node],
    kept: Mapping[str, str] | None = None,
    preferred: Mapping[str, str] | None = None,
) -> Plan:
    """The same; raises PlacementError with the first reason if one of them finds no place."""
    check_stores(spec, nodes)
    plan = place(spec, nodes, kept, preferred)
    for replica, why in plan.unplaced.items():
        raise PlacementError(f"Engine {replica} finds no node: {why}")
    return plan


def check_stores(spec: ClusterSpec, nodes: Sequence[Node]) -> None:
    """Raise PlacementError for a store that is to be on certain nodes and fits none, or not all of them."""
    for store in spec.stores:
        if store.selector is None:
            continue
        matching = [n for n in nodes if n.usable and not store.selector.why_not(n.labels, n.total)]
        if not matching:
            why = _reasons((node, store.selector.why_not(node.labels, node.total)) for node in nodes)
            raise PlacementError(f"Store {store.name} finds no node: {why}")
        for node in matching:
            why = _no_room([store], node)
            if why:
                raise PlacementError(f"Store {store.name} is wanted on {node.called}, but {why}")


class _Placer:
    """One search."""

    def __init__(
        self, spec: ClusterSpec, nodes: Sequence[Node], kept: Mapping[str, str], preferred: Mapping[str, str]
    ) -> None:
        self.spec, self.preferred = spec, preferred
        self.nodes = {node.id: node for node in nodes if node.usable}
        self.free = {node.id: dict(node.free) for node in nodes if node.usable}
        self.stores = {id: self._selected(node) for id, node in self.nodes.items()}
        self.count: Counter[tuple[str, str]] = Counter()  # engines by (entry, node)
        self.engines: dict[str, str] = {}
        self.todo: list[tuple[str, EngineSpec]] = []
        self.steps = 0
        for engine, index in spec.replicas:
            replica = engine.replica(index)
            node = kept.get(replica)
            if node in self.nodes:
                self._put(replica, engine, node)
            else:
                self.todo.append((replica, engine))

    def _selected(self, node: Node) -> list[str]:
        """The stores that are on this node also without an engine, as far as they fit."""
        wanted = [s for s in self.spec.stores if s.selector and not s.selector.why_not(node.labels, node.total)]
        return [] if _no_room(wanted, node) else [store.name for store in wanted]

    def plan(self) -> Plan:
        unplaced: dict[str, str] = {}
        # Who has a place that it likes comes first: nobody who runs has to move for one that does not.
        self.todo.sort(
            key=lambda item: (
                item[0] not in self.preferred,
                len(self._choices(*item)),
                -sum(item[1].selector.resources.values()),
            )
        )
        # Who can't be placed even alone must not keep the others from being placed.
        alone = [item for item in self.todo if not self._choices(*item)]
        rest = [item for item in self.todo if self._choices(*item)]
        if not self._search(rest):
            for replica, engine in rest:  # not all fit: as many as fit, in this order
                choices = self._choices(replica, engine)
                if choices:
                    self._put(replica, engine, choices[0])
                else:
                    alone.append((replica, engine))
        for replica, engine in alone:
            unplaced[replica] = self._why_not(engine)
        stores = frozenset((store, node) for node, names in self.stores.items() for store in names)
        return Plan(dict(self.engines), stores, unplaced)

    def _search(self, todo: Sequence[tuple[str, EngineSpec]]) -> bool:
        """Depth first; True with all of them put, or False with none."""
        if not todo:
            return True
        (replica, engine), rest = todo[0], todo[1:]
        for node in self._choices(replica, engine):
            self.steps += 1
            if self.steps > MAX_STEPS:
                return False
            added = self._put(replica, engine, node)
            if self._search(rest):
                return True
            self._take(replica, engine, node, added)
        return False

    def _choices(self, replica: str, engine: EngineSpec) -> list[str]:
        """Nodes where it can go now, the best first."""
        fitting = [id for id, node in self.nodes.items() if not self._why_not_here(engine, node)]
        mine = {id: self.count[engine.name, id] for id in fitting}
        all_of = {id: sum(n for (_, node), n in self.count.items() if node == id) for id in fitting}
        sign = -1 if engine.placement is Placement.PACK else 1
        liked = self.preferred.get(replica)
        return sorted(fitting, key=lambda id: (id != liked, sign * mine[id], sign * all_of[id], id))

    def _why_not_here(self, engine: EngineSpec, node: Node) -> str:
        why = engine.selector.why_not(node.labels, node.total)
        if why:
            return why
        if not node.known:
            return "its memory and disks are not known yet"
        for name, amount in engine.selector.resources.items():
            if self.free[node.id].get(name, 0) < amount - EPSILON:
                return f"{self.free[node.id].get(name, 0):g} of its {node.total.get(name, 0):g} {name} are free"
        if node.model is False:
            return f"the model {self.spec.model} does not exist on it"
        return self._why_no_store(engine, node)

    def _why_no_store(self, engine: EngineSpec, node: Node) -> str:
        store = self.spec.store(engine.store)
        if store is None or store.name in self.stores[node.id]:
            return ""
        if store.selector is not None:
            return store.selector.why_not(node.labels, node.total) or f"its store {store.name} does not fit there"
        others = [self.spec.store(name) for name in self.stores[node.id]]
        return _no_room([store, *(other for other in others if other is not None)], node)

    def _why_not(self, engine: EngineSpec) -> str:
        return _reasons((node, self._why_not_here(engine, node)) for node in self.nodes.values())

    def _put(self, replica: str, engine: EngineSpec, node: str) -> bool:
        """True if its store came to the node with it."""
        self.engines[replica] = node
        self.count[engine.name, node] += 1
        for name, amount in engine.selector.resources.items():
            self.free[node][name] = self.free[node].get(name, 0) - amount
        if engine.store is not None and engine.store not in self.stores[node]:
            self.stores[node].append(engine.store)
            return True
        return False

    def _take(self, replica: str, engine: EngineSpec, node: str, with_store: bool) -> None:
        """Undo `_put`."""
        del self.engines[replica]
        self.count[engine.name, node] -= 1
        for name, amount in engine.selector.resources.items():
            self.free[node][name] += amount
        if with_store and engine.store is not None:
            self.stores[node].remove(engine.store)


def _no_room(stores: Sequence[StoreWanted], node: Node) -> str:
    """Why these stores don't fit on the node together; empty if they do."""
    wanted = sum(store.nbytes(Medium.HOST) for store in stores)
    if node.memory is not None and wanted > node.memory:
        return (
            f"the host tier of {_names(stores)} has {gib(wanted)} and {node.called} has {gib(node.memory)} of memory "
            "for it"
        )
    folders: Counter[str] = Counter()
    for store in stores:
        for tier in store.spec.tiers:
            if tier.medium is Medium.DISK and tier.path is not None:
                folders[tier.path] += tier.capacity
    for path, nbytes in folders.items():
        if path in node.disks and nbytes > node.disks[path]:
            return (
                f"the disk tier of {_names(stores)} has {gib(nbytes)} and {node.called} has {gib(node.disks[path])} "
                f"for it at {path}"
            )
    return ""


def _names(stores: Iterable[StoreWanted]) -> str:
    return " and ".join(f"store {store.name}" for store in stores)


def _reasons(found: Iterable[tuple[Node, str]]) -> str:
    """What is wrong with each node, the same reasons together."""
    reasons: dict[str, list[str]] = {}
    for node, why in found:
        reasons.setdefault(why, []).append(node.called)
    if not reasons:
        return "the cluster has no node that takes engines."
    parts = []
    for why, called in reasons.items():
        shown = ", ".join(itertools.islice(called, 3)) + (f" and {len(called) - 3} more" if len(called) > 3 else "")
        parts.append(f"{shown}: {why}")
    return "; ".join(parts) + "."


def gib(nbytes: int) -> str:
    """Bytes for people."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
