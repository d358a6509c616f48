"""Changes of a running engine's chain of children: checked here as far as can be, then ordered at its desk."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from raykv.api import finding
from raykv.api.desks import POLL_MAX_S, POLL_S, Desk
from raykv.api.errors import NotDoneError, OperationError
from raykv.api.objects import Engine
from raykv.api.results import Outcome, Part, Progress, Tell
from raykv.api.words import count, show_seconds
from raykv.config import parse
from raykv.config.reader import show
from raykv.engine_messages import ChainOrder, ChildOp, OrderState
from raykv.engine_messages import Progress as State
from raykv.errors import ConfigError, HostError

CALL_S = 10.0

DONE = {
    ChildOp.ADD: "added to",
    ChildOp.REMOVE: "removed from",
    ChildOp.PAUSE: "paused in",
    ChildOp.RESUME: "resumed in",
    ChildOp.RESTART: "restarted in",
}


def add_order(
    number: str, engine: Engine, config: Mapping[str, Any] | str, before: str, again: bool = False
) -> ChainOrder:
    """The order to add a child. Raises ConfigError for a config that an engine would refuse at its start.

    `again`: it may be the repeat of one that was carried out, so the engine says whether it fits; so below.
    """
    raw = _config(config)
    name = _name_of(raw)
    if not again and engine.child(name) is not None:
        raise ConfigError(
            f"Engine {engine.id} has a child {show(name)} already. Give the new one another name "
            "(kv_connector_extra_config.raykv.name)."
        )
    if before and not again:
        finding.child(engine, before)
    return ChainOrder(number, ChildOp.ADD, child=name, config=json.dumps(raw), before=before)


def child_order(number: str, engine: Engine, op: ChildOp, child: str, again: bool = False) -> ChainOrder:
    """The order to remove, pause, resume or restart one that is there."""
    if not again:
        finding.child(engine, child)
    return ChainOrder(number, op, child=child)


def reorder_order(number: str, engine: Engine, names: tuple[str, ...], again: bool = False) -> ChainOrder:
    """The order to ask children in this order. All of them are named, each once."""
    if again:
        return ChainOrder(number, ChildOp.REORDER, names=names)
    for name in names:
        finding.child(engine, name)
    have = [child.name for child in engine.children]
    twice = sorted({name for name in names if names.count(name) > 1})
    missing = [name for name in have if name not in names]
    if twice or missing:
        problem = f"{', '.join(twice)} more than once" if twice else f"without {', '.join(missing)}"
        raise OperationError(
            f"The new order names {problem}. Name each child of engine {engine.id} once: {', '.join(have)}."
        )
    return ChainOrder(number, ChildOp.REORDER, names=names)


def _config(config: Mapping[str, Any] | str) -> dict[str, Any]:
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError as error:
            raise ConfigError(f"The child's config is no JSON: {error}. It is an entry of `connectors`.") from error
    if not isinstance(config, Mapping):
        example = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
        raise ConfigError(f"The child's config is {show(config)}. It must be an object such as {example}.")
    return dict(config)


def _name_of(raw: Mapping[str, Any]) -> str:
    """Its name, by the same rules as at an engine's start."""
    top = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": [raw]}}
    return str(parse(top).children[0].name)


def carry_out(desk: Desk, engine: Engine, order: ChainOrder, wait_s: float, tell: Tell | None) -> Outcome:
    """Leave the order and follow it. Raises OperationError where it was refused, NotDoneError where it failed.

    A lost answer is asked for again under the same number, so the order is carried out once.
    """
    deadline, pause, told = time.monotonic() + wait_s, POLL_S, ""
    what = f"{order.op} {order.child}".strip()
    state = OrderState(order.number, State.WAITING, "not heard of yet")
    lost: HostError | None = None
    while True:
        try:
            state, lost = desk.order(order, min(CALL_S, max(2.0, deadline - time.monotonic()))), None
        except HostError as error:  # the desk is being restarted, or is busy
            lost = error
        if tell is not None and state.detail + state.progress != told:
            told = state.detail + state.progress
            tell(Progress(what, engine.id, detail=state.detail or str(state.progress), ended=state.progress.final))
        if state.progress.final or time.monotonic() + pause > deadline:
            break
        time.sleep(pause)
        pause = min(pause * 1.5, POLL_MAX_S)
    if lost is not None:
        raise NotDoneError(
            f"Engine {engine.id} does not answer ({lost}). Whether {what} was done is not known: "
            f"look with `raykv child list`, or give the order again with number={order.number!r}."
        )
    if state.progress is State.REFUSED:
        raise OperationError(state.detail or f"Engine {engine.id} refused to {what}.")
    if state.progress is State.FAILED:
        raise NotDoneError(state.detail or f"Engine {engine.id} could not {what}.")
    return _outcome(what, engine, order, state, wait_s)


def _outcome(what: str, engine: Engine, order: ChainOrder, state: OrderState, wait_s: float) -> Outcome:
    if not state.progress.final:
        said = f"{what} at engine {engine.id} has not ended after {show_seconds(wait_s)} and goes on" + (
            f": {state.detail}" if state.detail else "."
        )
        return Outcome(what, said, order.number, (Part(engine.id, state.detail, running=True),))
    chain = chain_after(engine, order)
    if order.op is ChildOp.REORDER:
        said = f"Engine {engine.id} asks its {count(len(chain), 'child').replace('childs', 'children')} in the order "
        said += f"{', '.join(chain)}."
    else:
        said = f"{order.child} was {DONE[order.op]} engine {engine.id}."
    if state.detail:
        said += f" {state.detail[:1].upper()}{state.detail[1:]}"
    return Outcome(what, said, order.number, (Part(engine.id, state.detail),), chain)


def chain_after(engine: Engine, order: ChainOrder) -> tuple[str, ...]:
    """The engine's children, once the order is carried out."""
    names = [child.name for child in engine.children]
    if order.op is ChildOp.REORDER:
        return order.names
    if order.op is ChildOp.REMOVE:
        return tuple(name for name in names if name != order.child)
    if order.op is ChildOp.ADD and order.child not in names:
        names.insert(names.index(order.before) if order.before else len(names), order.child)
    return tuple(names)
