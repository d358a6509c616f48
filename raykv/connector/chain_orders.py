"""The orders of one engine and how far each has come."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from raykv.engine_messages import ChainOrder, OrderState, Progress

KEPT = 256
"""Orders that have ended and whose numbers are still known."""


class OrderBook:
    """`add`, `states`: any thread. `waiting`: orders not begun, oldest first; EngineCore's thread takes from it."""

    def __init__(self) -> None:
        self.waiting: deque[ChainOrder] = deque()
        self.wake: Callable[[], None] | None = None
        self._states: dict[str, OrderState] = {}
        self._lock = threading.Lock()

    def add(self, order: ChainOrder) -> None:
        """A number that is known is not taken again."""
        with self._lock:
            if order.number in self._states:
                return
            self._states[order.number] = OrderState(order.number, Progress.WAITING, since=time.time())
            self._forget()
            self.waiting.append(order)
        if self.wake is not None:
            self.wake()

    def set(self, number: str, progress: Progress, detail: str) -> None:
        """How far it is now."""
        with self._lock:
            old = self._states[number]
            since = old.since if old.progress is progress else time.time()
            self._states[number] = OrderState(number, progress, detail, since)

    def states(self) -> list[OrderState]:
        with self._lock:
            return list(self._states.values())

    def _forget(self) -> None:
        ended = [number for number, state in self._states.items() if state.progress.final]
        for number in ended[: max(0, len(ended) - KEPT)]:
            del self._states[number]
