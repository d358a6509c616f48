"""An engine's end of its desk: fetches what operators want of the engine, and tells what there is to tell.

One daemon thread in EngineCore's process. EngineCore's own thread does nothing for it but what `core.stories` says.
The thread starts the desk; if that dies, or Ray's head is away, it tries again for as long as the engine lives, and
then tells the new desk all it knows. Whatever fails here, the engine goes on; without Ray there is no desk.

At most one `fetch` and one `push` are under way. An errand is fetched again and again until a push has said that it is
known, so none is lost between the two; orders and questions have numbers, so twice is as good as once.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from raykv.actors.store_call import Done
from raykv.connector.engine_report import EngineReport
from raykv.connector.engine_view import Chain, EngineSight
from raykv.core.stories import Stories, StoryRing
from raykv.engine_messages import EngineView, Errands, Hashed, HashOrder, OrderState, Progress, Story
from raykv.errors import HostError, RayKVError

logger = logging.getLogger("raykv")

PUSH_S = 0.5
"""Views and stories are told at most so often, and a view that has not changed every QUIET_S."""
QUIET_S = 2.0
BUSY_S = 0.1
"""How often the states of orders are looked at while some are open."""
FETCH_S = 20.0
LATE_S = 20.0
"""A call that is so much over its time is lost: the desk hangs, or its node is gone."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 10.0
MAX_STORIES, MAX_NBYTES = 200, 1 << 20
"""Of stories in one push."""
STORY_NBYTES = 600
"""About what a story takes beside its hashes."""


class Desk(Protocol):
    """What of `desk_handle.DeskHandle` is used here."""

    def submit(self, method: str, *args: Any, done: Done) -> None:
        """Does not wait; `done` runs in another thread."""

    def end(self) -> None:
        """End it, if that can be said at once."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A desk, and Ray's id of this process's node."""

    desk: Desk
    node: str


@dataclass(frozen=True, slots=True)
class _Ended:
    """A call has ended. `life`: of which desk, counted from 1."""

    life: int
    method: str
    result: Any
    error: HostError | None


class DeskLink:
    """One engine's. `start` and `close` come from EngineCore's thread; `close` waits `timeout` at most."""

    def __init__(
        self,
        open_desk: Callable[[], Opened],
        sight: EngineSight,
        chain: Chain,
        hashes: Callable[[HashOrder], Hashed],
        needs_ray: bool = True,
        report: EngineReport | None = None,
    ) -> None:
        """`open_desk` blocks, and raises RayKVError. `needs_ray` False: an engine that does without Ray, so that no
        desk is sought again once none was found. `report` hears of stories and views."""
        self._open_desk, self._sight, self._chain, self._hashes = open_desk, sight, chain, hashes
        self._needs_ray, self._report = needs_ray, report
        self._inbox: queue.SimpleQueue[_Ended | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raykv-desk-link", daemon=True)
        # The thread's own from here on.
        self._opened: Opened | None = None
        self._life = 0
        self._calls: dict[str, float] = {}  # under way, until when
        self._pause = FIRST_PAUSE_S
        self._complained = False
        self._ring = StoryRing(self._stories.last)
        self._untold: deque[Story] = deque(maxlen=max(1, self._stories.last))
        self._hashed: list[Hashed] = []
        self._live: list[tuple[str, Story | None]] = []
        self._refused: list[OrderState] = []
        self._states: dict[str, OrderState] = {}
        self._view: EngineView | None = None
        self._push_at = self._view_at = 0.0

    @property
    def _stories(self) -> Stories:
        return self._sight.stories

    def start(self) -> None:
        """Begin; does not wait."""
        if not self._thread.is_alive() and not self._closed.is_set():
            self._thread.start()

    def close(self, timeout: float = 2.0) -> None:
        """End the desk and the thread, or leave them to the end of the process. Idempotent."""
        self._closed.set()
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    # -- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                if self._opened is None and not self._connect():
                    return
                if self._opened is not None:
                    self._turn(self._opened)
            except Exception as error:
                self._lost(error)
        if self._opened is not None:
            self._opened.desk.end()

    def _connect(self) -> bool:
        """Start the desk, or wait a little for the next try. False: none is wanted any more."""
        try:
            opened = self._open_desk()
        except Exception as error:
            if not self._needs_ray and not self._life:
                logger.info("this engine has no desk for operators: %s", error)
                self._stories.keep_none()
                return False
            if not self._complained:
                logger.warning("engine %s has no desk, so operators can't reach it: %s", self._sight.engine, error)
                self._complained = True
            if not isinstance(error, RayKVError):
                logger.debug("opening the desk", exc_info=True)
            self._rest()
            return True
        self._opened, self._life = opened, self._life + 1
        self._calls.clear()
        self._pause, self._complained = FIRST_PAUSE_S, False
        # All that a new desk does not know.
        self._untold = deque(reversed(self._ring.latest(len(self._ring))), maxlen=self._untold.maxlen)
        self._states.clear()
        self._hashed, self._live, self._view = [], [], None
        self._push_at = self._view_at = 0.0
        return True

    def _lost(self, error: Exception) -> None:
        """The desk is gone, or this thread has a defect: begin anew after a pause."""
        if self._closed.is_set():
            return
        known = isinstance(error, RayKVError)
        logger.warning("engine %s lost its desk: %s", self._sight.engine, error, exc_info=not known)
        if self._opened is not None:
            self._opened.desk.end()
        self._opened = None
        self._rest()

    def _rest(self) -> None:
        self._gather()  # into the ring, which is bounded in bytes
        self._closed.wait(self._pause)
        self._pause = min(LAST_PAUSE_S, 2 * self._pause)

    def _turn(self, opened: Opened) -> None:
        now = time.monotonic()
        overdue = [method for method, limit in self._calls.items() if limit <= now]
        if overdue:
            raise HostError(f"it did not answer {overdue[0]} in time")
        if "push" not in self._calls and now >= self._push_at:
            self._push(opened, now)
        if "fetch" not in self._calls and "push" not in self._calls and not self._unsaid:
            self._submit(opened, "fetch", FETCH_S, limit=now + FETCH_S + LATE_S)
        try:
            ended = self._inbox.get(timeout=max(0.001, min([self._push_at, *self._calls.values()]) - time.monotonic()))
        except queue.Empty:
            return
        if ended is None or ended.life != self._life:
            return
        self._calls.pop(ended.method, None)
        if ended.error is not None:
            raise ended.error
        if ended.method == "fetch":
            self._do(ended.result)

    def _submit(self, opened: Opened, method: str, *args: Any, limit: float) -> None:
        self._calls[method] = limit
        life = self._life

        def done(result: Any, error: HostError | None) -> None:
            self._inbox.put(_Ended(life, method, result, error))

        opened.desk.submit(method, *args, done=done)

    # -- errands ----------------------------------------------------------------------------------------------

    def _do(self, errands: Errands) -> None:
        for order in errands.orders:
            try:
                self._chain.order(order)
            except Exception as error:  # a defect
                logger.exception("engine %s could not take order %s", self._sight.engine, order.number)
                detail = f"The engine could not take it: {type(error).__name__}: {error}. Its log says more."
                self._refused.append(OrderState(order.number, Progress.REFUSED, detail, time.time()))
        self._hashed += [self._hashes(order) for order in errands.hashes]
        self._live += [(request, self._stories.of_running(request)) for request in errands.stories]
        self._push_at = 0.0

    # -- telling ----------------------------------------------------------------------------------------------

    @property
    def _unsaid(self) -> bool:
        """Whether the desk must hear something before it is asked for errands: it would give the same ones again."""
        return bool(self._hashed or self._live)

    def _push(self, opened: Opened, now: float) -> None:
        refused, self._refused = self._refused, []
        known = (*self._chain.states(), *refused)
        states = [state for state in known if self._states.get(state.number) != state]
        self._gather()
        stories = self._next_stories()
        if any(state.progress.final for state in states):
            self._view_at = 0.0  # who hears that an order is done sees the chain as it has become
        view = self._new_view(opened, now)
        busy = any(not state.progress.final for state in (*self._states.values(), *states))
        self._push_at = now + (BUSY_S if busy else PUSH_S)
        if not (view or stories or states or self._hashed or self._live):
            return
        hashed, self._hashed = self._hashed, []
        live, self._live = self._live, []
        self._submit(opened, "push", view, stories, states, hashed, live, limit=now + LATE_S)
        self._states = {state.number: state for state in (*self._states.values(), *states)}
        while len(self._states) > 2 * MAX_STORIES:
            del self._states[next(iter(self._states))]

    def _gather(self) -> None:
        for story in self._stories.take(MAX_STORIES if self._opened is not None else self._stories.last):
            self._ring.add(story)
            if self._opened is not None:
                self._untold.append(story)
            if self._report is not None:
                self._report.story(story)

    def _next_stories(self) -> list[Story]:
        """The oldest that are not told, as many as fit."""
        taken: list[Story] = []
        nbytes = 0
        while self._untold and len(taken) < MAX_STORIES and (not taken or nbytes < MAX_NBYTES):
            taken.append(self._untold.popleft())
            nbytes += len(taken[-1].hashes) + STORY_NBYTES
        return taken

    def _new_view(self, opened: Opened, now: float) -> EngineView | None:
        """The view, if there is something new in it or it was told long ago."""
        if now < self._view_at:
            return None
        view = self._sight.view(opened.node)
        if self._report is not None:
            self._report.view(view, now)
        if (
            self._view is not None
            and now < self._view_at + QUIET_S - PUSH_S
            and view == replace(self._view, seen=view.seen)
        ):
            return None
        self._view, self._view_at = view, now + PUSH_S
        return view
