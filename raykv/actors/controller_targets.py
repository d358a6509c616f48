"""What the Controller wants where: from the spec, the nodes and what runs to targets for `core.reconcile`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from raykv.actors.controller_world import FoundEngine, NodeRecord
from raykv.actors.engine_server import OVER
from raykv.actors.node_facts import NodeFacts
from raykv.cluster_messages import EngineOrder
from raykv.config.cluster_spec import ClusterSpec, EngineSpec
from raykv.config.engine_order import order_for
from raykv.core.placement import Node, place, place_all
from raykv.core.reconcile import Instance, StoreAt, Target, Wanted

SETTLE_S = 15.0
"""Resources come free a moment after an engine has ended: no place for so long means that there is none."""
LINGER_S = 300.0
"""A store on a node that has lost its engine is kept for this long."""

Found = Mapping[Instance, FoundEngine]
Facts = Mapping[str, NodeFacts]


class Targets:
    """The spec in force, with what must be remembered from one look to the next. One caller at a time."""

    def __init__(self) -> None:
        self.spec: ClusterSpec | None = None
        self.engines: dict[str, EngineSpec] = {}
        self.orders: dict[str, EngineOrder] = {}
        self._taken: dict[str, Mapping[str, float]] = {}  # by digest, of older specs too
        self._homeless: dict[str, float] = {}
        self._unwanted: dict[StoreAt, float] = {}

    def use(self, spec: ClusterSpec | None) -> None:
        """From now on this is wanted; None: nothing."""
        pairs = spec.replicas if spec is not None else ()
        self.spec = spec
        self.engines = {engine.replica(index): engine for engine, index in pairs}
        self.orders = {engine.replica(index): order_for(spec, engine, index) for engine, index in pairs if spec}
        self._taken |= {
            order.digest: self.engines[replica].selector.resources for replica, order in self.orders.items()
        }
        self._homeless.clear()

    def check(
        self, spec: ClusterSpec, nodes: Sequence[NodeRecord], facts: Facts, found: Found, draining: frozenset[str]
    ) -> None:
        """Raise PlacementError if a spec that is not in force yet has no place."""
        new = Targets()
        new.use(spec)
        new._taken = {**self._taken, **new._taken}
        kept, preferred = new._running(found, draining, ())
        place_all(spec, new._nodes(nodes, facts, found, draining), kept, preferred)

    def wanted(
        self,
        nodes: Sequence[NodeRecord],
        facts: Facts,
        found: Found,
        draining: frozenset[str],
        starting: Sequence[Instance],
        now: float,
    ) -> tuple[Wanted, Mapping[str, str]]:
        """What is wanted where, and why a replica has no place."""
        if self.spec is None:
            return Wanted(), {}
        kept, preferred = self._running(found, draining, starting)
        plan = place(self.spec, self._nodes(nodes, facts, found, draining), kept, preferred)
        targets = {}
        at_once = self._port_moves(found)
        for replica, engine in self.engines.items():
            node = plan.engines.get(replica)
            if node is not None:
                self._homeless.pop(replica, None)
            else:
                # What runs stays, unless its node is drained and there is no other for it.
                settled = now - self._homeless.setdefault(replica, now) >= SETTLE_S
                there = sorted(one.node for one in found if one.replica == replica)
                node = next((one for one in there if not (settled and one in draining)), None)
            group = "" if at_once else str(engine.role)
            targets[replica] = Target(node, self.orders[replica].digest, engine.store, group)
        used = {(target.store, target.node) for target in targets.values() if target.store and target.node}
        return Wanted(targets, plan.stores | frozenset(used)), plan.unplaced

    def lingering(self, unwanted: frozenset[StoreAt], draining: frozenset[str], now: float) -> frozenset[StoreAt]:
        """Stores that stay for a while though no engine is there: one may come back, and others may read from them."""
        for at in self._unwanted.keys() - unwanted:
            del self._unwanted[at]
        staying = set()
        for at in unwanted:
            since = self._unwanted.setdefault(at, now)
            named = self.spec is not None and self.spec.store(at[0]) is not None
            if named and at[1] not in draining and now - since < LINGER_S:
                staying.add(at)
        return frozenset(staying)

    def _port_moves(self, found: Found) -> bool:
        """Whether an engine is to listen where another one does that has to be changed: then none can be the first."""
        ports = {order.port: replica for replica, order in self.orders.items() if order.port is not None}
        for instance, engine in found.items():
            port = urlsplit(engine.report.url).port if engine.report is not None else None
            order = self.orders.get(instance.replica)
            old = order is not None and order.digest != engine.digest
            if old and port is not None and ports.get(port, instance.replica) != instance.replica:
                return True
        return False

    def _nodes(self, nodes: Sequence[NodeRecord], facts: Facts, found: Found, draining: frozenset[str]) -> list[Node]:
        """The nodes for placement: what engines of ours have taken there is free for them."""
        free = {node.id: dict(node.free) for node in nodes}
        total = {node.id: node.total for node in nodes}
        for instance, engine in found.items():
            if instance.node in free and engine.report is not None:
                here = free[instance.node]
                for name, amount in self._taken.get(engine.digest, {}).items():
                    here[name] = min(here.get(name, 0) + amount, total[instance.node].get(name, 0))
        return [
            Node(
                id=node.id,
                host=node.host,
                labels=node.labels,
                total=node.total,
                free=free[node.id],
                memory=facts[node.id].memory if node.id in facts else None,
                disks=facts[node.id].disks if node.id in facts else {},
                model=facts[node.id].model if node.id in facts else None,
                usable=node.id not in draining,
                known=node.id in facts,
            )
            for node in nodes
        ]

    def _running(
        self, found: Found, draining: frozenset[str], starting: Sequence[Instance]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Where replicas run as they are wanted, and where they run otherwise: there is room when that has ended."""
        kept: dict[str, str] = {}
        preferred: dict[str, str] = {}
        for instance, engine in sorted(found.items(), key=lambda item: (item[0].node in draining, item[0])):
            order = self.orders.get(instance.replica)
            if order is None:
                continue
            over = engine.report is not None and engine.report.state in OVER
            if engine.digest == order.digest and not over:
                kept.setdefault(instance.replica, instance.node)
            else:
                preferred.setdefault(instance.replica, instance.node)
        for instance in starting:
            if instance.node not in draining:
                kept.setdefault(instance.replica, instance.node)
        return kept, preferred
