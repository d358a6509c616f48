"""The scheduler half of one child, behind a guard: it may raise, go down, and come back as a new object.

All calls come from EngineCore's thread; only `mark_down`, `detach` and `offer` are the supervisor's. The lock
makes sure that no hook of the old object runs while the supervisor shuts it down.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from raykv.config import MAX_RETRY_S, ChildConfig, RunMode
from raykv.connector import vllm_compat
from raykv.core.chain import Move, Place, after
from raykv.core.faults import FaultWindow
from raykv.messages import ChildEvent, EventKind
from raykv.types import Incarnation, Rank, RequestId, StepId

logger = logging.getLogger("raykv")
T = TypeVar("T")
NEVER = StepId(-1)
AT_ITS_DEATH = StepId(1 << 62)
"""The step that a child is said to have planned which hears of no step any more: only its death completes it."""


class ChildState(enum.Enum):
    """Whether a child takes part."""

    UP = "up"
    DOWN = "down"  # its hosts are dead or must be; waiting for a rebuild
    PAUSED = "paused"  # inline, over its fault limit, until `paused_until`


class SchedulerChild:
    """One child as the scheduler half sees it."""

    def __init__(
        self,
        config: ChildConfig,
        connector: KVConnectorBase_V1 | None,
        num_ranks: int,
        raw: Mapping[str, Any] | None = None,
        life: Incarnation | None = None,
    ) -> None:
        """`raw`: its JSON, with its name. `life`: of a child that is added to a running engine, whose connector comes
        with the first offer; its hosts' first incarnation."""
        self.config = config
        self.raw = dict(raw or {})
        self.life = life or Incarnation(0)
        self.place = Place.UP if connector is not None else Place.STARTING
        self.index = config.index
        self.name = str(config.name)
        self.hosted = config.options.run is RunMode.ACTOR
        self.saves = config.saves
        self.state = ChildState.UP if connector is not None else ChildState.DOWN
        # Of hosts that are still to come: an older one, so that they are taken for the next.
        added = self.hosted and connector is None
        self.incarnations = (Incarnation(self.life - 1) if added else Incarnation(0),) * num_ranks
        self.planned = NEVER
        self.done = dict.fromkeys((Rank(r) for r in range(num_ranks)), NEVER)
        self.known: set[RequestId] = set()
        self.strangers: set[RequestId] = set()
        self.bereft: set[RequestId] = set()
        """Requests that the child knew when it went down: it may read them until its hosts' death is confirmed."""
        self.muted: set[RequestId] = set()
        """Those of the known requests that it is asked for nothing new of, and whose steps it does not see."""
        self.ready: set[Rank] = set()
        """Of a child that starts: the ranks whose worker half is there."""
        self.ended_ranks: set[Rank] = set()
        """Of a child that is taken out: the ranks on which nothing of it is left."""
        self.start_error = ""
        self._dead: set[Rank] = set()
        self._closed = False
        self._last_planned = NEVER
        self.must_retire = False
        self.faulted = False
        self._lock = threading.RLock()
        self._paused_until = 0.0
        self._offered: tuple[KVConnectorBase_V1, tuple[Incarnation, ...]] | None = None
        options = config.options
        self._faults = FaultWindow(options.max_faults, options.fault_window_s, options.retry_s, MAX_RETRY_S)
        self._idle_rule = vllm_compat.idle_rule(config) if self.hosted else None
        self._idle_metadata: dict[str, Any] | None = None
        self._idle_turn_at = 0.0
        self._connector: KVConnectorBase_V1 | None = None
        self._own_hooks: frozenset[str] = frozenset()
        self._install(connector)

    def _install(self, connector: KVConnectorBase_V1 | None) -> None:
        self._connector, self._own_hooks = connector, vllm_compat.own_hooks(connector)

    # -- calling --------------------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        if self.state is ChildState.PAUSED and time.monotonic() >= self._paused_until:
            self.state = ChildState.UP
        return self.state is ChildState.UP

    def call(self, hook: str, call: Callable[[KVConnectorBase_V1], T], default: T, *, also_paused: bool = False) -> T:
        """What the child's hook returns; `default` if it is not up or raises, which counts as a fault."""
        with self._lock:
            paused = also_paused and self.state is ChildState.PAUSED
            if not (self.up or paused) or self._connector is None:
                return default
            try:
                return call(self._connector)
            except Exception as error:
                self._fault(hook, error)
                return default

    def does(self, hook: str) -> bool:
        """Whether the child has a hook of its own here, of those in `vllm_compat.EMPTY_HOOKS`. The base class's does
        nothing, so that whoever asks in each step need not call it."""
        return hook in self._own_hooks

    def _fault(self, hook: str, error: Exception) -> None:
        self.faulted = True
        verdict = self._faults.fault(time.monotonic())
        logger.warning("child %s raised in %s (scheduler half): %s", self.name, hook, error, exc_info=not verdict.off)
        if verdict.off:
            logger.warning("child %s is switched off after repeated faults", self.name)
            if self.hosted:
                self.must_retire = True
                self.mark_down()
            else:
                self.state = ChildState.PAUSED
                self._paused_until = time.monotonic() + verdict.pause_s

    def arrived(self, request: RequestId) -> bool:
        """A request of the engine's; whether the child hears of it. It never does of one that came while it was off."""
        with self._lock:  # else it could go down in between and come back "knowing" the request
            (self.known if self.up and self.place.asked else self.strangers).add(request)
            return request in self.known

    def ended(self, requests: Set[RequestId]) -> None:
        """The step that tells of these requests' end was planned."""
        with self._lock:
            self.known -= requests
            self.muted -= requests
            self.strangers -= requests
            self.bereft -= requests

    def serves(self, request: RequestId) -> bool:
        """Whether the child may be asked for this request."""
        return self.place.asked and self.up and request in self.known and request not in self.muted

    def view(self, output: Any) -> Any:
        """A step's SchedulerOutput as the child sees it: without the requests that it is not to know, and of those that
        it keeps its word for only the end."""
        if not (self.strangers or self.muted):
            return output
        if not self.muted:
            return vllm_compat.filtered_output(output, self.known.__contains__)
        seen = vllm_compat.filtered_output(output, lambda r: r in self.known and r not in self.muted)
        return replace(seen, finished_req_ids={r for r in output.finished_req_ids if r in self.known})

    def is_idle(self, meta: Any) -> bool:
        """Whether this metadata asks nothing of the worker half, for classes where that can be told."""
        if self._idle_rule is None:
            return False
        try:
            if self._idle_metadata is None:
                self._idle_metadata = vllm_compat.said_by_default(meta)
            return self._idle_rule.asks_nothing(meta, self._idle_metadata)
        except TypeError:  # another version's class, of another shape
            self._idle_rule = None
            return False

    def has_turn(self, now: float) -> bool:
        """Whether the worker half is to have its turn although nothing is asked of it. Ask in a step without a plan
        for it only."""
        if self._idle_rule is None or now < self._idle_turn_at:
            return False
        self._idle_turn_at = now + self._idle_rule.turn_every_s
        return True

    # -- going down and coming back -------------------------------------------------------------------------

    def mark_down(self) -> None:
        """Its hosts are gone, or will be: it is asked nothing until it has been rebuilt."""
        with self._lock:
            if self.state is not ChildState.DOWN:
                self.state = ChildState.DOWN
                self.strangers |= self.known
                self.bereft |= self.known
                self.known.clear()
                self.muted.clear()

    def host_died(self, rank: Rank, incarnation: Incarnation) -> None:
        """Confirmed, and reported by the worker of that rank."""
        if incarnation == self.incarnations[rank] and (self.hosted or self.place is Place.ENDING):
            self._dead.add(rank)
            self.mark_down()

    def may_still_read(self, request: RequestId) -> bool:
        """For a request whose end the child is not asked about any more."""
        return request in self.bereft and len(self._dead) < len(self.done)

    def deaths(self) -> list[ChildEvent]:
        """Those of the current incarnations, for what was opened after they were reported."""
        return [ChildEvent(EventKind.DOWN, self.index, rank, self.incarnations[rank]) for rank in sorted(self._dead)]

    def distrust(self) -> None:
        """It raised where it plans a step or says what it still reads. What it meant may come out of a later plan, when
        its blocks have other owners, so this object is asked for none: a hosted child is rebuilt, an inline one off."""
        logger.warning(
            "child %s is in doubt: %s",
            self.name,
            "both its halves start again" if self.hosted else "it is off until the engine starts again",
        )
        if self.hosted:
            self.must_retire = True
            self.mark_down()
        else:
            self.state = ChildState.PAUSED
            self._paused_until = float("inf")

    def detach(self) -> KVConnectorBase_V1 | None:
        """Take the old object out, to be shut down."""
        with self._lock:
            connector = self._connector
            self._install(None)
            return connector

    def offer(self, connector: KVConnectorBase_V1, incarnations: tuple[Incarnation, ...]) -> None:
        """A rebuilt object and the hosts it belongs to; EngineCore's thread takes it with `accept`."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._offered = (connector, incarnations)
        if closed:  # it was taken out meanwhile
            connector.shutdown()

    def accept(self) -> tuple[Incarnation, ...] | None:
        """Install what was offered; returns the incarnations that it replaces, None if there was nothing."""
        if self._offered is None:
            return None
        with self._lock:
            connector, incarnations = self._offered
            self._install(connector)
            self._offered = None
            old, self.incarnations = self.incarnations, incarnations
            self.state = ChildState.UP
            self.must_retire = False
            self.bereft.clear()
            self._dead.clear()
            if self.place is Place.STARTING:
                self.place = after(self.place, Move.READY)
            # The old incarnations are dead on every rank, so their steps are over.
            for rank in self.done:
                self.done[rank] = max(self.done[rank], self.planned)
            return old

    @property
    def has_offer(self) -> bool:
        return self._offered is not None

    @property
    def may_accept(self) -> bool:
        """Whether what was offered may be installed: before all ranks have a new child, its plans would be lost."""
        if self._offered is None:
            return False
        return len(self.ready) == len(self.done) if self.place is Place.STARTING else self.place.stays

    # -- its place in the chain -----------------------------------------------------------------------------

    def mute(self) -> None:
        """From here on it is asked for nothing new, and does not see the steps of the requests that it knows."""
        with self._lock:
            self.muted |= self.known

    def stop_planning(self) -> None:
        """No host hears of a step any more, not even that a request lost its blocks: all that closes from here on waits
        for the hosts' death."""
        if self.planned != AT_ITS_DEATH:
            self._last_planned, self.planned = self.planned, AT_ITS_DEATH

    @property
    def steps_over(self) -> bool:
        """Whether every step that was planned for it before `stop_planning` is completed on every rank."""
        return self.planned == AT_ITS_DEATH and self.completed >= self._last_planned

    def end(self) -> None:
        """Its worker halves are being ended: what it knows, it may still read until that is confirmed."""
        self.must_retire = False
        self.mark_down()

    def rank_ended(self, rank: Rank) -> None:
        """On this rank nothing of it is left."""
        self.ended_ranks.add(rank)
        self.done[rank] = max(self.done[rank], self.planned)

    @property
    def all_ended(self) -> bool:
        return len(self.ended_ranks) == len(self.done)

    @property
    def completed(self) -> StepId:
        return min(self.done.values())

    def shutdown(self) -> None:
        """Shut the current object down, and one that was offered and not taken."""
        with self._lock:
            self._closed = True
            offered, self._offered = self._offered, None
        for connector in (self.detach(), offered[0] if offered else None):
            if connector is not None:
                connector.shutdown()
