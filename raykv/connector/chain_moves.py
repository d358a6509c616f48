"""The children of a running engine that start, leave or are being ended: from step to step, towards their end.

EngineCore's thread, and nothing waits: what takes long (a new scheduler half, the end of an old one) runs in threads of
its own and is looked at again in the next step. `core.chain` has the table; workers hear of a change by a step's
metadata.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from raykv.connector.background import Task, in_background
from raykv.connector.metadata import ChainAdd, ChainEnd, ChildStart
from raykv.connector.roster import Roster
from raykv.connector.scheduler_child import SchedulerChild
from raykv.core.chain import Move, Place, after
from raykv.errors import ConfigError
from raykv.messages import ChildIndex
from raykv.types import Incarnation, Rank, RequestId

logger = logging.getLogger("raykv")

Change = ChainAdd | ChainEnd


class Builder(Protocol):
    """What of `start_up.Recovery` is used here."""

    def watch(self) -> None: ...

    def build(self, child: SchedulerChild, handshakes: Mapping[Rank, Any]) -> Any: ...


class Engine(Protocol):
    """What of the scheduler half is used here."""

    children: Roster

    def owes(self, child: SchedulerChild) -> bool:
        """Whether a load, a send or a plan of the child is open."""

    def keeps_blocks(self, child: SchedulerChild) -> bool:
        """Whether blocks are kept, or a send is open, until the child's death."""

    def requests(self) -> Iterable[RequestId]:
        """Those that live."""

    def chain_changed(self) -> None:
        """The chain has other children than before."""

    def child_left(self, child: SchedulerChild) -> None:
        """The child is gone."""


@dataclass(eq=False)
class _Start:
    """A child that starts: what its ranks gave, and its scheduler half in the making."""

    handshakes: dict[Rank, Any] = field(default_factory=dict)
    building: Task[Any] | None = None


class ChainMoves:
    """One engine's. Before it is used for a child that is added, `builder` is set."""

    def __init__(self, engine: Engine, num_ranks: int) -> None:
        self._engine, self._num_ranks = engine, num_ranks
        self.builder: Builder | None = None
        self._moving: list[SchedulerChild] = []
        """Those that start, leave or are being ended, also when nobody waits for it any more."""
        self._starts: dict[ChildIndex, _Start] = {}
        self._closing: dict[ChildIndex, Task[None]] = {}
        self._changes: deque[Change] = deque()

    @property
    def busy(self) -> bool:
        """Whether a child is on its way."""
        return bool(self._moving or self._changes)

    def take_changes(self) -> tuple[Change, ...]:
        """What the workers are to do, with the step that is being planned."""
        if not self._changes:
            return ()
        changes = tuple(self._changes)
        self._changes.clear()
        return changes

    # -- beginning ------------------------------------------------------------------------------------------

    def start(self, child: SchedulerChild) -> None:
        """A child of the roster that is STARTING: every rank makes its worker half."""
        self._starts[child.index] = _Start()
        self._moving.append(child)
        self._changes.append(ChainAdd(child.index, child.config, child.life))

    def leave(self, child: SchedulerChild) -> None:
        """From here on it is asked for nothing, and goes when all is settled. One that starts has nothing to settle."""
        if child.place is Place.STARTING:
            child.start_error = child.start_error or "it was removed while it was being started"
            self._end(child, Move.REMOVE)
            return
        child.place = after(child.place, Move.REMOVE)
        child.mute()
        self._moving.append(child)

    def has_plan(self, child: SchedulerChild, owes: Callable[[], bool]) -> bool:
        """Whether this step is planned for the child. The hosts of one that leaves are left alone as soon as nothing is
        owed: so they come to an end. An inline one goes on, since only its plans tell it what blocks are lost."""
        if child.place is Place.LEAVING and child.hosted and not owes():
            child.stop_planning()
            return False
        return child.place.planned

    def go_on(self) -> None:
        """A step is about to be planned: children of which all is settled have no plan in it."""
        for child in self._moving.copy():
            if child.place is Place.STARTING:
                self._go_on_starting(child)
            elif child.place is Place.LEAVING:
                self._go_on_leaving(child)
            elif child.place is Place.ENDING:
                self._go_on_ending(child)

    # -- reports --------------------------------------------------------------------------------------------

    def started(self, index: ChildIndex, rank: Rank, start: ChildStart) -> None:
        """A rank has made its worker half of a new child, or could not."""
        child = self._engine.children[index]
        if start.error:
            child.start_error = child.start_error or f"rank {rank}: {start.error}"
            return
        child.ready.add(rank)
        if index in self._starts and start.handshake is not None:
            self._starts[index].handshakes[rank] = start.handshake

    # -- children on their way ------------------------------------------------------------------------------

    def _go_on_starting(self, child: SchedulerChild) -> None:
        start = self._starts[child.index]
        if start.building is not None and start.building.done:
            if start.building.error is not None:
                child.start_error = said(start.building.error)
            else:
                child.offer(start.building.result(), (Incarnation(0),) * self._num_ranks)
            start.building = None
        elif not child.hosted and start.building is None and not child.has_offer and self._all_ready(child):
            builder, handshakes = self.builder, dict(start.handshakes)
            assert builder is not None
            start.building = in_background(f"raykv-add-{child.name}", lambda: builder.build(child, handshakes))
        if child.start_error:
            self._end(child, Move.FAIL)

    def _all_ready(self, child: SchedulerChild) -> bool:
        return len(child.ready) == self._num_ranks

    def accepted(self, child: SchedulerChild) -> None:
        """The scheduler half of a child is there: of a new one, or of one that was lost."""
        if self._starts.pop(child.index, None) is not None:
            self._moving.remove(child)

    def _go_on_leaving(self, child: SchedulerChild) -> None:
        if not self._engine.owes(child) and (not child.hosted or child.steps_over):
            self._end(child, Move.SETTLED)

    def _end(self, child: SchedulerChild, move: Move) -> None:
        """From here on it is called no more, and every rank ends its worker half."""
        child.place = after(child.place, move)
        child.end()
        if child.hosted:
            child.stop_planning()
        self._starts.pop(child.index, None)
        self._changes.append(ChainEnd(child.index, child.incarnations))

    def _go_on_ending(self, child: SchedulerChild) -> None:
        closing = self._closing.get(child.index)
        if closing is not None:
            if not closing.done or self._engine.keeps_blocks(child):
                return
            if closing.error is not None:
                logger.warning("child %s: its scheduler half raised in shutdown: %s", child.name, closing.error)
            del self._closing[child.index]
            child.place = after(child.place, Move.ENDED)
            self._moving.remove(child)
            self._engine.child_left(child)
            logger.info("child %s was taken out of the chain", child.name)
        elif child.all_ended and not self._engine.keeps_blocks(child):
            self._closing[child.index] = in_background(f"raykv-end-{child.name}", child.shutdown)


def said(error: BaseException) -> str:
    """What an error says, for people."""
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
