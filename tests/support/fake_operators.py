"""A cluster without Ray for tests of the operators' API: desks and stores that hold state and refuse as real ones do.

Calls are pickled both ways, and what an actor raises comes back as HostRaised, as over Ray. A store or a desk can be
made silent (no answer in time) or dead.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from raykv.admin_messages import (
    NO_TENANT,
    Absence,
    BlockPlace,
    Done,
    ModelView,
    Operation,
    OperationKind,
    OperationState,
    PinView,
    Selection,
    StoreView,
    TenantView,
)
from raykv.api.reach import Caller, NodeFact, Tell
from raykv.engine_messages import (
    ChainOrder,
    ChildOp,
    ChildView,
    EngineEvent,
    EngineView,
    Hashed,
    HashOrder,
    OrderState,
    Progress,
    Story,
)
from raykv.errors import HostDied, HostRaised, HostTimeout, StoreError
from raykv.store_messages import HASH_NBYTES, Medium, StoreStatus, TierSpec, TierStatus
from raykv.types import EngineId, StoreLife

BLOCK = 16
SLOT = 4096
NODES = ("a1" * 14, "b2" * 14)
HOSTS = ("left", "right")
PRINT = "f0" * 16
OTHER_PRINT = "0f" * 16


def hashes_of(tokens: tuple[int, ...], salt: str = "", block: int = BLOCK) -> list[bytes]:
    """Chained, one for each full block, as vLLM's are."""
    found, last = [], salt.encode()
    for start in range(0, len(tokens) - len(tokens) % block, block):
        last = hashlib.sha256(last + repr(tokens[start : start + block]).encode()).digest()
        found.append(last)
    return found


class FakeCaller:
    """Calls an object as Ray would."""

    def __init__(self, name: str, target: Any) -> None:
        self.name, self.target = name, target
        self.silent = self.dead = False
        self.calls: list[str] = []
        self.lose: dict[str, int] = {}
        """By method: the answers of so many calls are lost, after they were carried out."""
        self._lock = threading.Lock()

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        assert timeout > 0
        if self.dead:
            raise HostDied(f"{self.name} is gone")
        if self.silent:
            raise HostTimeout(f"{self.name} did not answer within {timeout:g} s")
        with self._lock:
            self.calls.append(method)
            try:
                result = getattr(self.target, method)(*pickle.loads(pickle.dumps(args)))
            except Exception as error:
                raise HostRaised(self.name, type(error).__name__, str(error), "traceback") from error
            if self.lose.get(method, 0) > 0:
                self.lose[method] -= 1
                raise HostDied(f"{self.name} is gone: its answer is lost")
        return pickle.loads(pickle.dumps(result))


class FakeStore:
    """Blocks by (fingerprint, hash): the media they are in, and their tenant's tag. One part each."""

    def __init__(self, name: str = "default", media: Mapping[Medium, int] | None = None) -> None:
        self.name = name
        self.life = StoreLife(f"life-of-{name}")
        self.tiers: dict[Medium, TierSpec] = {
            medium: TierSpec(medium, slots * SLOT, None if medium is Medium.HOST else "/folder")
            for medium, slots in (media or {Medium.HOST: 64, Medium.DISK: 256}).items()
        }
        self.off: dict[Medium, str] = {}
        self.draining: set[Medium] = set()
        self.blocks: dict[tuple[str, bytes], tuple[set[Medium], str]] = {}
        self.gone: dict[tuple[str, bytes], Absence] = {}
        self.pinned: dict[str, tuple[set[tuple[str, bytes]], float, str]] = {}
        self.quotas: dict[str, int | None] = {}
        self.models: dict[str, ModelView] = {PRINT: ModelView(PRINT, "tiny", "", 0, 0, ("engine-a",))}
        self.ops: dict[str, tuple[Operation, OperationState]] = {}
        self.steps = 2
        """An operation ends when it has been looked at so often."""
        self.drained: str = ""
        self.figures = dict.fromkeys(
            ("leases", "look_ups", "hit_blocks", "missed_blocks", "saved_blocks", "skipped_blocks", "loaded_blocks"), 0
        )

    def put(self, hashes: list[bytes], *media: Medium, tenant: str = NO_TENANT.hex(), fingerprint: str = PRINT) -> None:
        for one in hashes:
            held, _ = self.blocks.get((fingerprint, one), (set(), tenant))
            self.blocks[fingerprint, one] = (held | set(media), tenant)

    # -- what a NodeStore answers -----------------------------------------------------------------------------

    def status(self) -> StoreStatus:
        return StoreStatus(
            self.life, self.name, 7, tuple(map(self._tier, self.tiers)), (EngineId("engine-a"),), **self.figures,
            drain=self.drained,
        )  # fmt: skip

    def _tier(self, medium: Medium) -> TierStatus:
        spec = self.tiers[medium]
        used = sum(medium in media for media, _ in self.blocks.values())
        off = self.off.get(medium, "")
        return TierStatus(
            medium, spec.path, SLOT, spec.capacity // SLOT, used, 0, 0, 3, 11, 0, off, medium in self.draining
        )

    def view(self) -> StoreView:
        by_tenant: dict[str, int] = {}
        for _, tenant in self.blocks.values():
            by_tenant[tenant] = by_tenant.get(tenant, 0) + 1
        tenants = tuple(
            TenantView(tag, by_tenant.get(tag, 0), by_tenant.get(tag, 0) * SLOT, self.quotas.get(tag))
            for tag in sorted({*by_tenant, *self.quotas})
        )
        pins = tuple(PinView(n, len(keys), len(keys) * SLOT, at, note) for n, (keys, at, note) in self.pinned.items())
        return StoreView(
            self.life, self.name, tuple(self.models.values()), tenants, pins, tuple(s for _, s in self.ops.values())
        )

    def where(self, fingerprints: tuple[str, ...], hashes: bytes) -> tuple[BlockPlace, ...]:
        found = []
        for one in split(hashes):
            media, _ = self.blocks.get((fingerprints[0], one), (set(), ""))
            ordered = tuple(medium for medium in Medium if medium in media)
            expires = max((at for keys, at, _ in self.pinned.values() if (fingerprints[0], one) in keys), default=0.0)
            found.append(BlockPlace(ordered, int(bool(ordered)), 1, SLOT * len(ordered), expires))
        return tuple(found)

    def why(self, fingerprints: tuple[str, ...], hashes: bytes, then: float = 0.0) -> tuple[Absence | None, ...]:
        keys = [(fingerprints[0], one) for one in split(hashes)]
        return tuple(None if key in self.blocks else self.gone.get(key, Absence("never stored")) for key in keys)

    def pin(self, number: str, selection: Selection, seconds: float, note: str) -> Done:
        if seconds <= 0:
            raise StoreError(f"seconds is {seconds}. It must be above 0.")
        keys = self._selected(selection)
        if number in self.pinned or not keys:
            held = len(self.pinned[number][0]) if number in self.pinned else 0
            return Done(held, held * SLOT, f"{held} blocks were pinned already.")
        self.pinned[number] = (keys, time.time() + seconds, note)
        return Done(len(keys), len(keys) * SLOT, f"{len(keys)} blocks are pinned for {seconds:g} s.")

    def unpin(self, number: str) -> Done:
        keys, _, _ = self.pinned.pop(number, (set(), 0.0, ""))
        return Done(len(keys), len(keys) * SLOT, f"{len(keys)} blocks are free again.")

    def forget(self, selection: Selection) -> Done:
        pinned = {key for keys, _, _ in self.pinned.values() for key in keys}
        keys = self._selected(selection) - pinned
        for key in keys:
            media, tenant = self.blocks[key]
            left = media - {selection.medium} if selection.medium else set()
            if left:
                self.blocks[key] = (left, tenant)
            else:
                del self.blocks[key]
                self.gone[key] = Absence("cleared", time.time())
        return Done(len(keys), len(keys) * SLOT, f"{len(keys)} blocks were forgotten.")

    def set_quota(self, tenant: str, nbytes: int | None) -> Done:
        if tenant == NO_TENANT.hex():
            raise StoreError("Blocks without a tenant have no quota.")
        if nbytes is None:
            self.quotas.pop(tenant, None)
        else:
            self.quotas[tenant] = nbytes
        return Done(0, nbytes or 0, "The quota is set.")

    def begin(self, operation: Operation) -> OperationState:
        known = self.ops.get(operation.number)
        if known is not None:
            if known[0].kind is not operation.kind:
                raise StoreError(f"Operation {operation.number} is another one.")
            return self.operation(operation.number)
        self._check(operation)
        total = len(self._selected(operation.selection)) if operation.selection else len(self.blocks)
        if operation.kind in (OperationKind.DRAIN_TIER, OperationKind.REMOVE_TIER) and operation.tier:
            self.draining.add(operation.tier.medium)
        state = OperationState(operation.number, operation.kind, 0, max(total, self.steps), True, time.time())
        self.ops[operation.number] = (operation, state)
        return state

    def _check(self, operation: Operation) -> None:
        tier = operation.tier
        if tier is None:
            return
        there = tier.medium in self.tiers
        if operation.kind is OperationKind.ADD_TIER and there and tier.medium not in self.draining:
            raise StoreError(f"The store {self.name} has a tier {tier.medium} already.")
        if operation.kind is not OperationKind.ADD_TIER and not there:
            raise StoreError(f"The store {self.name} has no tier {tier.medium}.")
        if tier.medium in self.draining and operation.kind in (OperationKind.RESIZE_TIER, OperationKind.PREFETCH):
            raise StoreError(f"The tier {tier.medium} is draining: wait until that has ended.")
        if operation.kind is OperationKind.REMOVE_TIER and len(self.tiers) == 1:
            raise StoreError(f"{tier.medium} is the only tier: add another one first.")

    def operation(self, number: str) -> OperationState:
        if number not in self.ops:
            raise StoreError(f"The store knows no operation {number!r}.")
        operation, state = self.ops[number]
        if state.running:
            step = max(1, state.total // max(1, self.steps))
            done = min(state.total, state.done + step)
            state = replace(state, done=done)
            if done == state.total:
                state = replace(state, running=False, ended=time.time(), result=f"{operation.kind} is done.")
                self._carry_out(operation)
            self.ops[number] = (operation, state)
        return state

    def operations(self) -> tuple[OperationState, ...]:
        return tuple(state for _, state in self.ops.values())

    def _carry_out(self, operation: Operation) -> None:
        tier, kind = operation.tier, operation.kind
        if kind is OperationKind.PREFETCH and tier and operation.selection:
            for key in self._selected(operation.selection):
                self.blocks[key][0].add(tier.medium)
        elif kind is OperationKind.ADD_TIER and tier:
            self.tiers[tier.medium] = tier
            self.draining.discard(tier.medium)
        elif kind is OperationKind.RESIZE_TIER and tier:
            self.tiers[tier.medium] = replace(self.tiers[tier.medium], capacity=tier.capacity)
        elif kind is OperationKind.REMOVE_TIER and tier:
            self.draining.discard(tier.medium)
            self.tiers.pop(tier.medium, None)

    def _selected(self, selection: Selection) -> set[tuple[str, bytes]]:
        hashes = set(split(selection.hashes))
        return {
            key
            for key, (media, tenant) in self.blocks.items()
            if (not selection.fingerprints or key[0] in selection.fingerprints)
            and (not hashes or key[1] in hashes)
            and (not selection.tenant or tenant == selection.tenant)
            and (selection.medium is None or selection.medium in media)
        }

    def drain(self, timeout: float, targets: list[str]) -> Any:
        self.drained = "0 blocks moved"
        from raykv.store_messages import DrainReport

        return DrainReport(self.life)

    def undrain(self) -> None:
        self.drained = ""

    def check_integrity(self) -> None:
        assert self.tiers, "a store has a tier"
        assert self.draining <= set(self.tiers)
        for media, tenant in self.blocks.values():
            assert media and len(bytes.fromhex(tenant)) == 8
        for keys, expires, _ in self.pinned.values():
            assert expires > 0 and keys <= set(self.blocks)
        assert all(limit is None or limit >= 0 for limit in self.quotas.values())
        assert all(spec.capacity >= SLOT for spec in self.tiers.values())


def split(hashes: bytes) -> list[bytes]:
    assert len(hashes) % HASH_NBYTES == 0
    return [hashes[at : at + HASH_NBYTES] for at in range(0, len(hashes), HASH_NBYTES)]


def a_child(name: str, connector: str = "ExampleConnector", state: str = "up") -> ChildView:
    run = "inline" if connector == "TierConnector" else "actor"
    return ChildView(name, connector, run, state, True, True, 1, (11,), {"tokens_loaded": 32}, "{}")


class FakeDesk:
    """An engine's desk with an engine behind it that carries orders out when it is asked `steps` times."""

    def __init__(self, engine: str, node: int = 0, model: str = "tiny", store: str = "") -> None:
        self.children = [a_child("nixl", "NixlConnector"), a_child("tiers", "TierConnector"), a_child("files")]
        self.seen_s = 0.0
        self.steps = 1
        self.orders: dict[str, tuple[ChainOrder, OrderState, int]] = {}
        self.applied: list[str] = []
        self.kept: dict[str, Story] = {}
        self.refuse = ""
        self.fail = ""
        self.hash_error = ""
        self.base = EngineView(
            EngineId(engine), model, (f"{model}-chat",), "both", 100 + node, NODES[node], HOSTS[node], 1000.0, BLOCK,
            4096, 1, "first", (), store=store, fingerprints=(PRINT,) if store else (), prefill_rate=1000.0,
            tokens={"gpu": 16, "host": 64, "computed": 20}, running=2,
        )  # fmt: skip

    def view(self) -> EngineView:
        return replace(self.base, children=tuple(self.children), seen=time.time() - self.seen_s)

    def order(self, order: ChainOrder) -> OrderState:
        if order.number not in self.orders:
            self.orders[order.number] = (order, OrderState(order.number, Progress.WAITING, "not fetched yet"), 0)
        known, state, asked = self.orders[order.number]
        if not state.progress.final:
            asked += 1
            state = OrderState(order.number, Progress.RUNNING, "jobs are settled")
            if asked > self.steps:
                state = self._carry_out(known)
        self.orders[order.number] = (known, state, asked)
        return state

    def _carry_out(self, order: ChainOrder) -> OrderState:
        names = [child.name for child in self.children]
        if self.refuse:
            return OrderState(order.number, Progress.REFUSED, self.refuse)
        if self.fail:
            return OrderState(order.number, Progress.FAILED, self.fail)
        if order.op is not ChildOp.REORDER and order.op is not ChildOp.ADD and order.child not in names:
            return OrderState(order.number, Progress.REFUSED, f"There is no child {order.child}.")
        self.applied.append(order.number)
        if order.op is ChildOp.ADD:
            at = names.index(order.before) if order.before else len(names)
            self.children.insert(at, a_child(order.child))
        elif order.op is ChildOp.REMOVE:
            self.children = [child for child in self.children if child.name != order.child]
        elif order.op is ChildOp.REORDER:
            self.children = [next(c for c in self.children if c.name == name) for name in order.names]
        else:
            state = "paused" if order.op is ChildOp.PAUSE else "up"
            more = int(order.op is ChildOp.RESTART)
            self.children = [
                replace(child, state=state, incarnation=child.incarnation + more)
                if child.name == order.child
                else child
                for child in self.children
            ]
        return OrderState(order.number, Progress.DONE, "")

    def hash(self, order: HashOrder) -> Hashed:
        if self.hash_error:
            return Hashed(order.number, error=self.hash_error)
        return Hashed(order.number, b"".join(hashes_of(order.token_ids, order.cache_salt)))

    def story(self, request: str) -> Story | None:
        return next((story for name, story in self.kept.items() if name.startswith(request)), None)

    def requests(self) -> tuple[str, ...]:
        return tuple(self.kept)

    def watch(self, after: int, timeout_s: float) -> tuple[EngineEvent, ...]:
        events = [
            EngineEvent(number, 1.0, "order", order.number, str(state.progress), state.detail)
            for number, (order, state, _) in enumerate(self.orders.values())
        ]
        return tuple(event for event in events if event.number > after)

    def check_integrity(self) -> None:
        names = [child.name for child in self.children]
        assert len(names) == len(set(names))
        assert len(self.applied) == len(set(self.applied)), "an order was carried out twice"


class FakeWorld:
    """Two nodes, an engine with a store on each, by default of one model."""

    address, namespace = "10.0.0.1:6379", "raykv"

    def __init__(self) -> None:
        self.facts = [
            NodeFact(node, host, f"10.0.0.{number}", "alive", 8, 1)
            for number, (node, host) in enumerate(zip(NODES, HOSTS, strict=True), 1)
        ]
        self.store_callers: dict[str, Caller] = {}
        self.desk_callers: dict[str, Caller] = {}
        self.closed = 0
        self.problem: Callable[[], None] = lambda: None
        for number, node in enumerate(NODES):
            self.add_store(FakeStore(), node)
            actor = f"raykv-store-default-{node[:12]}"
            self.add_desk(FakeDesk(f"engine-{'ab'[number]}", number, store=actor))

    def add_store(self, store: Any, node: str) -> FakeCaller:
        name = f"raykv-store-{store.name}-{node[:12]}"
        self.store_callers[name] = caller = FakeCaller(name, store)
        return caller

    def add_desk(self, desk: FakeDesk) -> FakeCaller:
        name = f"raykv-desk-{desk.base.engine}"
        self.desk_callers[name] = caller = FakeCaller(name, desk)
        return caller

    def nodes(self) -> list[NodeFact]:
        self.problem()
        return list(self.facts)

    def desks(self) -> Mapping[str, Caller]:
        return dict(self.desk_callers)

    def stores(self) -> Mapping[str, Caller]:
        return dict(self.store_callers)

    def drain(self, node: str, timeout: float, tell: Tell) -> str:
        tell("engine e", "leaving")
        self.facts = [replace(fact, state="drained") if fact.id == node else fact for fact in self.facts]
        return f"Node {node[:12]} is empty: it can be removed."

    def undrain(self, node: str, timeout: float) -> str:
        self.facts = [replace(fact, state="alive") if fact.id == node else fact for fact in self.facts]
        return f"Node {node[:12]} takes engines and stores again."

    def close(self) -> None:
        self.closed += 1

    def check_integrity(self) -> None:
        for caller in (*self.store_callers.values(), *self.desk_callers.values()):
            caller.target.check_integrity()  # type: ignore[attr-defined]
