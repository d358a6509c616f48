"""A look at all of it: nodes from Ray, engines from their desks, stores from themselves. All are asked at once."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from raykv.api.asking import ask, at_all
from raykv.api.desks import Desk
from raykv.api.objects import Engine, Listing, Node, Snapshot, Store, split_actor
from raykv.api.reach import Caller, NodeFact, World
from raykv.api.words import show_seconds
from raykv.engine_messages import EngineView

OLD_S = 15.0
"""An engine tells its desk about every second; without a word for so long it is stuck or gone."""


def look(world: World, timeout: float) -> Snapshot:
    """Blocks for about `timeout` at most; what does not answer in it has a `problem`."""
    facts = world.nodes()
    engines = look_at_engines(world, timeout, facts)
    stores = look_at_stores(world, timeout, facts)
    return Snapshot(time.time(), world.address, world.namespace, nodes_of(facts, engines, stores), engines, stores)


def nodes_of(facts: list[NodeFact], engines: Listing[Engine], stores: Listing[Store]) -> Listing[Node]:
    """The nodes, with what runs on each."""
    on: dict[str, list[str]] = defaultdict(list)
    for engine in engines:
        on[engine.node].append(engine.id)
    held: dict[str, list[str]] = defaultdict(list)
    for store in stores:
        held[store.node].append(store.actor)
    return Listing(Node.of(fact, tuple(on[fact.id]), tuple(held[fact.id])) for fact in facts)


def look_at_engines(world: World, timeout: float, facts: list[NodeFact]) -> Listing[Engine]:
    """Those that have told their desks something, by id; of a desk that does not answer nothing is known."""
    return engines_at(world.desks(), timeout, {fact.id: fact.host for fact in facts})


def engines_at(desks: Mapping[str, Caller], timeout: float, hosts: Mapping[str, str]) -> Listing[Engine]:
    """The engines of these desks; `hosts` by node id."""
    views, _ = at_all(lambda name: Desk(desks[name]).view(timeout), desks)
    found = [_engine(name, view, hosts) for name, view in views.items() if view is not None]
    return Listing(sorted(found, key=lambda engine: engine.id))


def _engine(desk: str, view: EngineView, hosts: Mapping[str, str]) -> Engine:
    if not view.host:
        view = replace(view, host=hosts.get(view.node, ""))
    age = time.time() - view.seen if view.seen else 0.0
    problem = f"no word from it for {show_seconds(age)}" if age > OLD_S else ""
    return Engine.of(desk, view, problem)


def look_at_stores(world: World, timeout: float, facts: list[NodeFact]) -> Listing[Store]:
    """All that Ray has names of, silent ones too."""
    callers = world.stores()

    def one(actor: str) -> Store:
        node = _node_of(actor, facts)
        host = node.host if node is not None else ""
        node_id = node.id if node is not None else split_actor(actor)[1]
        status = ask(callers[actor], "status", timeout=timeout)
        view = ask(callers[actor], "view", timeout=timeout)
        return Store.of(actor, node_id, host, status, view)

    seen, errors = at_all(one, dict(callers))
    for actor, problem in errors.items():
        node = _node_of(actor, facts)
        place = (node.id, node.host) if node is not None else (split_actor(actor)[1], "")
        seen[actor] = Store.silent(actor, *place, problem=problem)
    return Listing(sorted(seen.values(), key=lambda store: store.actor))


def _node_of(actor: str, facts: list[NodeFact]) -> NodeFact | None:
    _, start = split_actor(actor)
    return next((fact for fact in facts if start and fact.id.startswith(start)), None)
