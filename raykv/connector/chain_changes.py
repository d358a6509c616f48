"""Orders that change the chain of a running engine, carried out between two steps.

Operators leave orders from any thread; EngineCore's thread begins them when a step has been planned, so that what the
step promised still holds, and ends what is settled before the next is planned. Workers hear of a change by that step's
metadata. What takes long (the look at a new class, a new scheduler half, the end of an old one) runs in threads of its
own, and the engine keeps stepping until every order has ended.

    add      checked -> workers start their halves -> a scheduler half around them -> up
    remove   asked for nothing -> what it owes is settled -> its worker halves are ended -> its scheduler half, too
    restart  asked for nothing -> its loads and sends end, or its limit is over -> its hosts are replaced

`core.chain` has the table. A child that can't be started is ended in the same way as one that is removed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from raykv.config import ChildConfig
from raykv.config.reader import did_you_mean, show
from raykv.connector.background import Task, in_background
from raykv.connector.chain_moves import Builder, ChainMoves, Change, Engine, said
from raykv.connector.chain_orders import OrderBook
from raykv.connector.scheduler_child import ChildState, SchedulerChild
from raykv.core.chain import Move, Place, after, may
from raykv.engine_messages import ChainOrder, ChildOp, ChildView, OrderState, Progress
from raykv.errors import ConfigError
from raykv.messages import ChildIndex
from raykv.types import Incarnation

logger = logging.getLogger("raykv")

MARGIN_S = 60.0
"""Beyond a child's own limits, until an order counts as failed: what is tried for ever is not waited for for ever."""


class Door(Protocol):
    """`chain_door.ChainDoor`."""

    def check(
        self, order: ChainOrder, chain: Sequence[SchedulerChild], index: ChildIndex
    ) -> tuple[ChildConfig, dict[str, Any]]: ...


@dataclass(eq=False)
class _Open:
    """An order that was begun. `limit`: when it counts as failed."""

    order: ChainOrder
    child: SchedulerChild
    limit: float
    old: tuple[Incarnation, ...] = ()
    retire_at: float = 0.0
    retired: bool = False


class ChainChanges:
    """One engine's. `order`, `states`, `views`: any thread; the rest: EngineCore's, and nothing waits."""

    def __init__(
        self,
        engine: Engine,
        num_ranks: int,
        views: Callable[[], tuple[ChildView, ...]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._num_ranks, self._views, self._clock = engine, num_ranks, views, clock
        self._book = OrderBook()
        self._door: Door | None = None
        self._moves = ChainMoves(engine, num_ranks)
        self._checking: Task[tuple[ChildConfig, dict[str, Any]]] | None = None
        self._open: list[_Open] = []
        self.has_plan, self.started, self.accepted = self._moves.has_plan, self._moves.started, self._moves.accepted

    def use(self, door: Door, builder: Builder) -> None:
        """Before the first order."""
        self._door, self._moves.builder = door, builder

    def wake_by(self, wake: Callable[[], None] | None) -> None:
        """How an idle engine is woken for an order; None: it isn't, orders wait for its next step."""
        self._book.wake = wake

    # -- any thread -----------------------------------------------------------------------------------------

    def order(self, order: ChainOrder) -> None:
        """Have this carried out; `states` says how far it is. A number that is known is not taken again."""
        self._book.add(order)

    def states(self) -> list[OrderState]:
        """All orders that have not ended, and the last ones that have; oldest first."""
        return self._book.states()

    def views(self) -> tuple[ChildView, ...]:
        """The children, first asked first: where each stands now, and its counters of some steps ago."""
        return self._views()

    # -- a step ---------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether the engine must keep stepping for an order, or for a child that is on its way."""
        return bool(self._book.waiting or self._open or self._moves.busy)

    def before_plans(self) -> None:
        """A step is about to be planned: children of which all is settled have no plan in it."""
        if not self.busy:
            return
        self._moves.go_on()
        for one in list(self._open):
            self._look(one)

    def after_plans(self) -> tuple[Change, ...]:
        """The step was planned: what was ordered begins now. Returns what the workers are to change."""
        while self._book.waiting and self._begin(self._book.waiting[0]):
            self._book.waiting.popleft()
        return self._moves.take_changes()

    # -- orders that were begun -----------------------------------------------------------------------------

    def _look(self, one: _Open) -> None:
        """Whether the order has come to its end."""
        late = self._clock() > one.limit
        {ChildOp.ADD: self._look_at_add, ChildOp.REMOVE: self._look_at_remove, ChildOp.RESTART: self._look_at_restart}[
            one.order.op
        ](one, late)

    def _close(self, one: _Open, progress: Progress, detail: str) -> None:
        self._open.remove(one)
        self._book.set(one.order.number, progress, detail)

    def _look_at_add(self, one: _Open, late: bool) -> None:
        child = one.child
        if child.place in (Place.STARTING, Place.ENDING):
            if late and child.place is Place.STARTING:
                limit = child.config.options.startup_timeout_s
                child.start_error = child.start_error or f"it was not there after startup_timeout_s={limit:g} and more"
            elif late:
                self._close(one, Progress.FAILED, f"{_why_failed(child)} What it left is still being cleared away.")
        elif child.place is Place.GONE:
            self._close(one, Progress.FAILED, _why_failed(child))
        else:
            self._close(one, Progress.DONE, "It takes part for the requests that come from now on.")

    def _look_at_remove(self, one: _Open, late: bool) -> None:
        child = one.child
        if child.place is Place.GONE:
            self._close(one, Progress.DONE, "Nothing of it is left in this engine.")
        elif late and child.hosted:
            detail = "Its hosts have not come to their end in time. It is asked for nothing, and goes when they have."
            self._close(one, Progress.FAILED, detail)
        elif late:
            detail = (
                "It has not let go of its blocks, and it runs in vLLM's own workers, which can't be ended for that. It "
                "is asked for nothing, and goes when it has; else start the engine again without it."
            )
            self._close(one, Progress.FAILED, detail)

    def _look_at_restart(self, one: _Open, late: bool) -> None:
        child = one.child
        if not child.place.stays:
            self._close(one, Progress.FAILED, "It was removed meanwhile.")
            return
        if not one.retired:
            if child.state is ChildState.DOWN or not self._engine.owes(child) or self._clock() > one.retire_at:
                one.retired = True
                child.must_retire = True
                child.mark_down()
            return
        back = child.state is ChildState.UP and child.incarnations != one.old
        if not back and not late:
            return
        others = [o for o in self._open if o is not one and o.order.op is ChildOp.RESTART and o.child is child]
        if not others and may(child.place, Move.BACK):
            child.place = after(child.place, Move.BACK)
        if back:
            self._close(one, Progress.DONE, "It takes part again, with new hosts.")
        else:
            self._close(one, Progress.FAILED, "Its new hosts are not there yet; they go on being tried.")

    # -- orders that begin ----------------------------------------------------------------------------------

    def _begin(self, order: ChainOrder) -> bool:
        """False: the order is still being checked, and those behind it wait."""
        try:
            if order.op is ChildOp.ADD:
                return self._begin_add(order)
            if order.op is ChildOp.REORDER:
                self._reorder(order)
            else:
                self._change(order, self._named(order.child))
        except ConfigError as error:
            self._checking = None
            self._book.set(order.number, Progress.REFUSED, str(error))
        except Exception as error:  # a defect, which must not end the engine
            logger.exception("order %s: %s %s", order.number, order.op, order.child)
            self._checking = None
            self._book.set(order.number, Progress.FAILED, f"RayKV itself failed: {said(error)}")
        return True

    def _named(self, name: str) -> SchedulerChild:
        child = self._engine.children.find(name)
        if child is None:
            have = [one.name for one in self._engine.children]
            raise ConfigError(f"This engine has no child {show(name)}. {did_you_mean(name, have)}")
        return child

    def _begin_add(self, order: ChainOrder) -> bool:
        if order.before:
            self._named(order.before)
        door, builder = self._door, self._moves.builder
        if door is None or builder is None:
            raise ConfigError("This engine can't take in children while it runs.")
        if self._checking is None:
            chain, index = tuple(self._engine.children), self._engine.children.next_index
            self._book.set(order.number, Progress.RUNNING, "Its config is being checked.")
            self._checking = in_background("raykv-check", lambda: door.check(order, chain, index))
        if not self._checking.done:
            return False
        checking, self._checking = self._checking, None
        if isinstance(checking.error, ConfigError):
            raise checking.error
        if checking.error is not None:
            raise ConfigError(f"The child's config can't be used. {said(checking.error)}")
        self._add(order, *checking.result())
        builder.watch()
        return True

    def _add(self, order: ChainOrder, config: ChildConfig, raw: Mapping[str, Any]) -> None:
        children = self._engine.children
        life = Incarnation(1 + max((max(c.life, *c.incarnations) for c in children.ever()), default=0))
        child = SchedulerChild(config, None, self._num_ranks, raw, life)
        child.strangers.update(self._engine.requests())
        children.add(child, children.find(order.before) if order.before else None)
        self._engine.chain_changed()
        self._moves.start(child)
        self._open.append(_Open(order, child, self._clock() + 2 * config.options.startup_timeout_s + MARGIN_S))
        self._book.set(order.number, Progress.RUNNING, "It is being started.")

    def _reorder(self, order: ChainOrder) -> None:
        children = self._engine.children
        for name in order.names:
            self._named(name)
        missing = [child.name for child in children if child.place.stays and child.name not in order.names]
        twice = sorted({name for name in order.names if order.names.count(name) > 1})
        if missing or twice:
            problem = f"leaves out {', '.join(missing)}" if missing else f"names {', '.join(twice)} more than once"
            have = ", ".join(child.name for child in children if child.place.stays)
            raise ConfigError(f"The new order {problem}. Name each child once: {have}.")
        children.reorder(order.names)
        self._book.set(order.number, Progress.DONE, f"Asked in this order: {', '.join(c.name for c in children)}.")

    def _change(self, order: ChainOrder, child: SchedulerChild) -> None:
        move = {ChildOp.PAUSE: Move.PAUSE, ChildOp.RESUME: Move.RESUME}.get(order.op)
        if move is not None:
            self._switch(order, child, move)
        elif order.op is ChildOp.REMOVE:
            self._remove(order, child)
        else:
            self._restart(order, child)

    def _switch(self, order: ChainOrder, child: SchedulerChild, move: Move) -> None:
        already = Place.OFF if move is Move.PAUSE else Place.UP
        if child.place is already:
            self._book.set(order.number, Progress.DONE, "So it was already.")
            return
        self._must(child, move)
        child.place = after(child.place, move)
        if move is Move.PAUSE:
            child.mute()
            detail = "It is asked for nothing new and saves nothing; what it has begun ends as usual."
        else:
            detail = "It takes part for the requests that come from now on."
        self._book.set(order.number, Progress.DONE, detail)

    def _remove(self, order: ChainOrder, child: SchedulerChild) -> None:
        options = child.config.options
        limit = self._clock() + options.promise_timeout_s + options.load_timeout_s + MARGIN_S
        if child.place.stays:
            self._moves.leave(child)
        self._open.append(_Open(order, child, limit))
        self._book.set(order.number, Progress.RUNNING, "It is asked for nothing new; what it owes is waited for.")

    def _restart(self, order: ChainOrder, child: SchedulerChild) -> None:
        if not child.hosted:
            raise ConfigError(
                f"Child {child.name} runs in vLLM's own workers (run: inline), so it has no hosts to restart. Remove "
                "it and add it again, or start the engine again."
            )
        if child.place is not Place.RESTARTING:
            self._must(child, Move.RESTART)
            child.place = after(child.place, Move.RESTART)
        options = child.config.options
        retire_at = self._clock() + options.load_timeout_s
        limit = retire_at + options.startup_timeout_s + MARGIN_S
        self._open.append(_Open(order, child, limit, child.incarnations, retire_at))
        self._book.set(
            order.number, Progress.RUNNING, "Its loads and sends are waited for, then its hosts are replaced."
        )

    def _must(self, child: SchedulerChild, move: Move) -> None:
        if may(child.place, move):
            return
        now = {Place.STARTING: "is still being started", Place.RESTARTING: "is being restarted"}.get(
            child.place, "is being removed"
        )
        fix = "Wait until that has ended." if child.place.stays else "Add it again when that has ended."
        raise ConfigError(f"Child {child.name} {now}, so it can't be told to {move.value}. {fix}")


def _why_failed(child: SchedulerChild) -> str:
    """One sentence, or what the child itself said."""
    said = child.start_error or "it was removed"
    return f"Child {child.name} could not be added: {said}{'' if said.endswith('.') else '.'}"
