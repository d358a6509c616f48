"""What has changed between two looks, as events; and how fast things go, as rates. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from raykv.api.objects import Engine, Snapshot, Store, Tier
from raykv.api.shown import Shown
from raykv.api.words import count, show_seconds
from raykv.engine_messages import EngineEvent

SETTLED = ("up", "paused")


@dataclass(frozen=True, repr=False)
class Event(Shown):
    """Something has changed. `kind`: cluster, node, engine, child, order, store, tier, operation, pin.

    `what`: came, went, restarted, silent, back, or the new state. `said`: the sentence for people.
    """

    at: float
    kind: str
    what: str
    name: str
    where: str = ""
    said: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Event {self.said}>"

    def __rich__(self) -> str:
        from raykv.api.shown import escape

        return escape(self.said)


def changes(before: Snapshot, after: Snapshot) -> Iterator[Event]:
    """In a fixed order: nodes, engines, children, stores, tiers, operations, pins."""
    at = after.at
    old_nodes = {node.id: node for node in before.nodes}
    new_nodes = {node.id: node for node in after.nodes}
    for kind, old, new in _pairs(old_nodes, new_nodes):
        if kind == "same" and old.state == new.state:
            continue
        node, what = new or old, kind if kind != "same" else new.state
        yield Event(at, "node", what, node.short, node.host, f"Node {node.short} ({node.host}) {_verb(what)}.")
    yield from _engines(before, after)
    yield from _stores(before, after)


def order_event(one: EngineEvent, engine: Engine) -> Event:
    """An order at a desk, from its own stream."""
    detail = f": {one.detail}" if one.detail else ""
    said = f"Order {one.name} at engine {engine.id} is {one.state}{detail}".rstrip(".") + "."
    return Event(one.at, "order", one.state, one.name, engine.id, said)


def _engines(before: Snapshot, after: Snapshot) -> Iterator[Event]:
    at = after.at
    old_engines = {engine.id: engine for engine in before.engines}
    new_engines = {engine.id: engine for engine in after.engines}
    for kind, old, new in _pairs(old_engines, new_engines):
        engine = new or old
        where = engine.host or engine.node
        if kind != "same":
            yield Event(at, "engine", kind, engine.id, where, f"Engine {engine.id} on {where} {_verb(kind)}.")
            continue
        if (old.pid, old.started) != (new.pid, new.started):
            yield Event(at, "engine", "restarted", new.id, where, f"Engine {new.id} on {where} was restarted.")
        elif bool(old.problem) != bool(new.problem):
            what = "silent" if new.problem else "back"
            yield Event(at, "engine", what, new.id, where, f"Engine {new.id}: {new.problem or 'it is heard of again'}.")
        yield from _children(at, old, new)


def _children(at: float, old: Engine, new: Engine) -> Iterator[Event]:
    before, after = {child.name: child for child in old.children}, {child.name: child for child in new.children}
    for kind, was, now in _pairs(before, after):
        child = now or was
        said = ""
        what = kind
        if kind == "same" and was.state != now.state:
            what, said = now.state, f"Child {now.name} of engine {new.id} is {now.state} (was {was.state})."
        elif kind == "same" and was.incarnation != now.incarnation:
            what = "restarted"
            said = f"Child {now.name} of engine {new.id} was restarted (incarnation {now.incarnation})."
        elif kind != "same":
            said = f"Child {child.name} of engine {new.id} {_verb(kind)}."
        if said:
            yield Event(at, "child", what, child.name, new.id, said)
    orders = ([child.name for child in old.children], [child.name for child in new.children])
    if orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]):
        said = f"Engine {new.id} asks its children in another order: {', '.join(orders[1])}."
        yield Event(at, "engine", "reordered", new.id, new.host, said)


def _stores(before: Snapshot, after: Snapshot) -> Iterator[Event]:
    at = after.at
    old_stores = {store.actor: store for store in before.stores}
    new_stores = {store.actor: store for store in after.stores}
    for kind, old, new in _pairs(old_stores, new_stores):
        store = new or old
        if kind != "same":
            yield Event(at, "store", kind, store.at, store.host, f"Store {store.at} {_verb(kind)}.")
            if new is None:
                continue
        elif bool(old.problem) != bool(new.problem):
            what = "silent" if new.problem else "back"
            yield Event(at, "store", what, new.at, new.host, f"Store {new.at}: {new.problem or 'it answers again'}.")
            if new.problem:
                continue
        elif old.life and old.life != new.life:
            yield Event(at, "store", "restarted", new.at, new.host, f"Store {new.at} was restarted (pid {new.pid}).")
        elif bool(old.drain) != bool(new.drain):
            what = "draining" if new.drain else "undrained"
            said = f"is drained: {new.drain}" if new.drain else "takes saves again"
            yield Event(at, "store", what, new.at, new.host, f"Store {new.at} {said}.")
        if old is None or not old.problem:
            yield from _inside(at, old, new)


def _inside(at: float, old: Store | None, new: Store) -> Iterator[Event]:
    old_tiers = {tier.medium: tier for tier in old.tiers} if old else {}
    for kind, was, now in _pairs(old_tiers, {tier.medium: tier for tier in new.tiers}):
        yield from _tier(at, kind, was, now, new)
    known = {state.number: state for state in old.operations} if old else {}
    for state in new.operations:
        was_state = known.get(state.number)
        if was_state == state:
            continue
        what = "progress" if state.running else "failed" if state.error else "ended"
        if was_state is None and state.running:
            what = "began"
        figures = f"{state.done:,} of {count(state.total, 'block')}"
        text = {"began": "began", "progress": figures}.get(what, state.error or state.result or figures)
        if old is not None or state.running:
            said = f"{str(state.kind).capitalize()} at {new.at}: {text}"
            yield Event(at, "operation", what, state.number, new.at, said.rstrip(".") + ".")
    pins = {pin.number: pin for pin in old.pins} if old else {}
    for kind, was_pin, pin in _pairs(pins, {pin.number: pin for pin in new.pins}):
        if kind != "same":
            one = pin or was_pin
            said = f"Pin {one.number} at {new.at}: {count(one.blocks, 'block')}"
            said += f" for {show_seconds(max(0.0, one.expires - at))}." if kind == "came" else " are free again."
            yield Event(at, "pin", kind, one.number, new.at, said)


def _tier(at: float, kind: str, was: Tier | None, now: Tier | None, store: Store) -> Iterator[Event]:
    if now is None:
        assert was is not None
        yield Event(at, "tier", "went", was.medium, store.at, f"Tier {was.medium} of {store.at} was taken out.")
    elif was is None:
        if kind == "came" and store.tiers:
            yield Event(at, "tier", "came", now.medium, store.at, f"Tier {now.medium} of {store.at} serves.")
    elif bool(was.off) != bool(now.off):
        said = f"is off: {now.off}" if now.off else "serves again"
        what = "off" if now.off else "on"
        yield Event(at, "tier", what, now.medium, store.at, f"Tier {now.medium} of {store.at} {said}.")
    elif was.draining != now.draining:
        what, said = ("draining", "is draining") if now.draining else ("undrained", "takes new blocks again")
        yield Event(at, "tier", what, now.medium, store.at, f"Tier {now.medium} of {store.at} {said}.")
    elif was.capacity != now.capacity:
        said = f"Tier {now.medium} of {store.at} has another size."
        yield Event(at, "tier", "resized", now.medium, store.at, said, more={"capacity": now.capacity})


def _verb(kind: str) -> str:
    return {"came": "is there", "went": "is gone"}.get(kind, f"is {kind}")


def _pairs(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name, one in new.items():
        yield ("same" if name in old else "came"), old.get(name), one
    for name, one in old.items():
        if name not in new:
            yield "went", one, None


# -- rates ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TierRate(Shown):
    """A tier between two looks: blocks found in it and evicted from it, per second."""

    hits: float = 0.0
    evicted: float = 0.0
    growth: float = 0.0


@dataclass(frozen=True)
class StoreRate(Shown):
    """A store between two looks: blocks per second saved, loaded, looked up in vain; look-ups per second."""

    saved: float = 0.0
    loaded: float = 0.0
    missed: float = 0.0
    look_ups: float = 0.0
    tiers: Mapping[str, TierRate] = field(default_factory=dict)


@dataclass(frozen=True)
class Rates(Shown):
    """Between two looks, `seconds` apart: by engine tokens per second by source, and by store."""

    seconds: float
    tokens: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    stores: Mapping[str, StoreRate] = field(default_factory=dict)


def rates(before: Snapshot, after: Snapshot) -> Rates:
    """What was restarted meanwhile counts from zero; nothing is ever negative."""
    elapsed = max(1e-3, after.at - before.at)

    def per_s(old: float, new: float, same: bool) -> float:
        return max(0.0, new - (old if same else 0.0)) / elapsed

    tokens = {}
    for engine in after.engines:
        old = next((one for one in before.engines if one.id == engine.id), None)
        if old is None:
            continue
        same = (old.pid, old.started) == (engine.pid, engine.started)
        tokens[engine.id] = {
            source: per_s(old.tokens.get(source, 0), number, same) for source, number in engine.tokens.items()
        }
    stores = {}
    for store in after.stores:
        was = next((one for one in before.stores if one.actor == store.actor), None)
        if was is None or store.problem:
            continue
        same = was.life == store.life
        figures = {
            key: per_s(was.figures.get(f"{key}_blocks", 0), store.figures.get(f"{key}_blocks", 0), same)
            for key in ("saved", "loaded", "missed")
        }
        look_ups = per_s(was.figures.get("look_ups", 0), store.figures.get("look_ups", 0), same)
        tiers = {}
        for tier in store.tiers:
            earlier = was.tier(tier.medium)
            hits, evicted, used = (earlier.hits, earlier.evicted, earlier.used) if earlier else (0, 0, 0)
            growth = (tier.used - used) / elapsed if same else 0.0
            tiers[tier.medium] = TierRate(per_s(hits, tier.hits, same), per_s(evicted, tier.evicted, same), growth)
        stores[store.actor] = StoreRate(**figures, look_ups=look_ups, tiers=tiers)
    return Rates(elapsed, tokens, stores)
