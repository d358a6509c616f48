"""The desk beside an engine: operators leave orders and questions there, the engine's thread fetches them.

The engine has no door of its own for operators: what it must do is done between two steps, by its own thread. So this
actor holds what is to be fetched, and what the engine told last. It knows nothing that the engine can't tell it again:
killed, it is started anew, and the engine tells all of it once more. An order that was not fetched by then is lost; its
operator repeats it under its number.

Everything is bounded, and every wait has a limit. It ends with its engine.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from raykv.actors.host_base import OWNER_VARIABLE, HostBase
from raykv.core.stories import DEFAULT_LAST, StoryRing
from raykv.engine_messages import (
    ChainOrder,
    EngineEvent,
    EngineView,
    Errands,
    Hashed,
    HashOrder,
    OrderState,
    Progress,
    Story,
)
from raykv.errors import IntegrityError, RayKVError
from raykv.types import EngineId

MAX_ORDERS = 1000
MAX_QUESTIONS = 100
MAX_EVENTS = 1000
MAX_FETCHED = 20
"""Of each kind in one `fetch`: the engine does them one after the other."""
ANSWER_S = 5.0
"""How long a question for hashes or for a running request waits for the engine."""
MAX_WAIT_S = 30.0
NOT_FETCHED = "The engine has not fetched it yet."


class EngineDesk(HostBase):
    """One engine's desk. Any thread, many at once; `fetch`, `watch`, `hash` and `story` may wait."""

    def __init__(self, engine: EngineId, last_stories: int = DEFAULT_LAST) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._view: EngineView | None = None
        self._orders: OrderedDict[str, tuple[ChainOrder | None, OrderState]] = OrderedDict()
        self._to_fetch: dict[str, ChainOrder] = {}
        self._to_hash: dict[str, HashOrder] = {}
        self._hashed: OrderedDict[str, Hashed] = OrderedDict()
        self._to_tell: dict[str, int] = {}
        self._told: dict[str, Story | None] = {}
        self._stories = StoryRing(last_stories)
        self._events: deque[EngineEvent] = deque(maxlen=MAX_EVENTS)
        # A desk that is started again goes on above the numbers of the one before.
        self._last_event = time.time_ns() // 1000

    def __repr__(self) -> str:
        return f"EngineDesk({self._engine})"

    # -- operators --------------------------------------------------------------------------------------------

    def view(self) -> EngineView | None:
        """What the engine told last; None: nothing yet."""
        return self._view

    def order(self, order: ChainOrder) -> OrderState:
        """Leave an order. A repeat under the same number is answered by the state of the first. Raises RayKVError."""
        if not isinstance(order, ChainOrder) or not order.number:
            raise RayKVError(f"{order!r:.100} is no order with a number. Give a ChainOrder with a unique number.")
        with self._changed:
            known = self._orders.get(order.number)
            if known is not None:
                if known[0] is not None and known[0] != order:
                    raise RayKVError(f"The number {order.number!r} is that of another order. Give each its own.")
                return known[1]
            self._make_room()
            state = OrderState(order.number, Progress.WAITING, NOT_FETCHED, time.time())
            self._orders[order.number] = (order, state)
            self._to_fetch[order.number] = order
            self._tell("order", order.number, state.progress, state.detail)
            return state

    def _make_room(self) -> None:
        if len(self._orders) >= MAX_ORDERS:
            old = next((number for number, (_, state) in self._orders.items() if state.progress.final), None)
            if old is None:
                raise RayKVError(
                    f"{MAX_ORDERS} orders wait at engine {self._engine} already. Wait until some are done."
                )
            del self._orders[old]

    def order_state(self, number: str) -> OrderState | None:
        """How far an order is; None: it is not known, or no more."""
        with self._changed:
            known = self._orders.get(number)
        return known[1] if known is not None else None

    def orders(self) -> tuple[OrderState, ...]:
        """All that are known, oldest first."""
        with self._changed:
            return tuple(state for _, state in self._orders.values())

    def hash(self, order: HashOrder) -> Hashed | None:
        """The engine's hashes of a prompt. Waits ANSWER_S at most; None: ask again, under the same number."""
        with self._changed:
            if order.number not in self._hashed:
                if len(self._to_hash) >= MAX_QUESTIONS:
                    raise RayKVError(
                        f"{MAX_QUESTIONS} prompts wait for engine {self._engine} already. Try again later."
                    )
                self._to_hash[order.number] = order
                self._changed.notify_all()
            self._wait(lambda: order.number in self._hashed, ANSWER_S)
            return self._hashed.get(order.number)

    def story(self, request: str) -> Story | None:
        """Of one request, by vLLM's id or its client's, also while it runs. None: not known any more, or never.

        Raises RayKVError if several fit. Waits ANSWER_S at most for an engine that must be asked.
        """
        with self._changed:
            found = self._stories.find(request)
            if found is not None or not request:
                return found
            if len(self._to_tell) >= MAX_QUESTIONS:
                return None
            self._to_tell[request] = self._to_tell.get(request, 0) + 1
            self._changed.notify_all()
            self._wait(lambda: request in self._told or self._stories.find(request) is not None, ANSWER_S)
            self._to_tell[request] -= 1
            told = self._told.get(request)
            if not self._to_tell[request]:
                del self._to_tell[request]
                self._told.pop(request, None)
            return self._stories.find(request) or told

    def stories(self, last: int = 20) -> tuple[Story, ...]:
        """The newest ones of requests that have ended, newest first."""
        with self._changed:
            return self._stories.latest(last)

    def requests(self) -> tuple[str, ...]:
        """The requests whose stories are kept, oldest first."""
        with self._changed:
            return tuple(story.request for story in reversed(self._stories.latest(len(self._stories))))

    def watch(self, after: int = -1, timeout_s: float = MAX_WAIT_S) -> tuple[EngineEvent, ...]:
        """What has changed after that event, oldest first; waits for the next one, MAX_WAIT_S at most."""
        with self._changed:
            self._wait(lambda: self._last_event > after and bool(self._events), timeout_s)
            return tuple(event for event in self._events if event.number > after)

    # -- the engine -------------------------------------------------------------------------------------------

    def owner(self) -> tuple[int, int] | None:
        """The process that it ends with: pid, and start time in clock ticks. None: it was not made for one."""
        pid, _, started = os.environ.get(OWNER_VARIABLE, "").partition(":")
        return (int(pid), int(started)) if pid else None

    def fetch(self, timeout_s: float) -> Errands:
        """What is to be done, until `push` says that it is known; waits for something, MAX_WAIT_S at most."""
        with self._changed:
            self._wait(lambda: bool(self._to_fetch or self._to_hash or self._untold()), timeout_s)
            orders, hashes = tuple(self._to_fetch.values()), tuple(self._to_hash.values())
            return Errands(orders[:MAX_FETCHED], hashes[:MAX_FETCHED], self._untold()[:MAX_FETCHED])

    def _untold(self) -> tuple[str, ...]:
        return tuple(request for request in self._to_tell if request not in self._told)

    def push(
        self,
        view: EngineView | None = None,
        stories: Sequence[Story] = (),
        states: Sequence[OrderState] = (),
        hashed: Sequence[Hashed] = (),
        told: Sequence[tuple[str, Story | None]] = (),
    ) -> None:
        """What there is to tell; `view` None: nothing new. `told`: stories of running requests, by what was asked."""
        with self._changed:
            if view is not None:
                self._compare(view)
                self._view = view
            for story in stories:
                self._stories.add(story)
            for state in states:
                self._take_state(state)
            for one in hashed:
                self._to_hash.pop(one.number, None)
                self._hashed[one.number] = one
                while len(self._hashed) > MAX_QUESTIONS:
                    self._hashed.popitem(last=False)
            for request, live in told:
                if request in self._to_tell:
                    self._told[request] = live
            self._changed.notify_all()

    def _take_state(self, state: OrderState) -> None:
        self._to_fetch.pop(state.number, None)
        order, old = self._orders.get(state.number, (None, None))
        if old is not None and (old.progress.final or replace(old, since=state.since) == state):
            return
        if old is None and len(self._orders) >= MAX_ORDERS:
            number, _ = self._orders.popitem(last=False)
            self._to_fetch.pop(number, None)
        self._orders[state.number] = (order, state)
        self._tell("order", state.number, state.progress, state.detail)

    def _compare(self, view: EngineView) -> None:
        before = {child.name: child for child in self._view.children} if self._view is not None else {}
        after = {child.name: child for child in view.children}
        for name, child in after.items():
            old = before.get(name)
            if old is None or (old.state, old.incarnation) != (child.state, child.incarnation):
                detail = f"incarnation {child.incarnation}" if child.incarnation else ""
                self._tell("child", name, child.state, detail)
        for name in before.keys() - after.keys():
            self._tell("child", name, "gone", "")

    def _tell(self, what: str, name: str, state: str, detail: str) -> None:
        self._last_event += 1
        self._events.append(EngineEvent(self._last_event, time.time(), what, name, str(state), detail))
        self._changed.notify_all()

    def _wait(self, true: Callable[[], bool], timeout_s: float) -> None:
        self._changed.wait_for(true, max(0.0, min(timeout_s, MAX_WAIT_S)))

    def check_integrity(self) -> None:
        """Raise IntegrityError unless all is bounded and consistent."""
        with self._changed:
            sizes = (len(self._orders), len(self._to_hash), len(self._hashed), len(self._to_tell), len(self._events))
            limits = (MAX_ORDERS, MAX_QUESTIONS, MAX_QUESTIONS, MAX_QUESTIONS, MAX_EVENTS)
            if any(size > limit for size, limit in zip(sizes, limits, strict=True)):
                raise IntegrityError(f"{self!r} holds {sizes}, above {limits}")
            if not self._to_fetch.keys() <= self._orders.keys():
                raise IntegrityError(f"{self!r}: an order is to be fetched that is not known")
            if not self._told.keys() <= self._to_tell.keys():
                raise IntegrityError(f"{self!r}: a story is kept that nobody waits for")
            numbers = [event.number for event in self._events]
            if numbers != list(range(self._last_event - len(numbers) + 1, self._last_event + 1)):
                raise IntegrityError(f"{self!r}: events are missing")
