"""Transfers that were not over in time: what they write into is theirs until NIXL says that they have ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class LateTransfers(Generic[T]):
    """Any thread. `ended` looks at one: True if nothing writes for it any more, and then it has given its memory back.
    It is asked by one thread at a time for each, and never again after True."""

    def __init__(self, ended: Callable[[T], bool]) -> None:
        self._ended = ended
        self._late: list[T] = []
        self._lock = threading.Lock()

    def let_go(self, one: T) -> None:
        """Nobody waits for it any more. Its memory goes back now, if it has ended, else by a later `reap`."""
        if not self._ended(one):
            with self._lock:
                self._late.append(one)

    def reap(self) -> int:
        """Give the memory of those back that have ended; how many have not. After the end of the transport all have."""
        with self._lock:
            late, self._late = self._late, []
        left = [one for one in late if not self._ended(one)]
        with self._lock:
            self._late.extend(left)
            return len(self._late)
