"""How often a child may fail before it is switched off, and when it is tried again.

A child that fails now and then is restarted at once. One that fails `max_faults` times within the window is
switched off for a pause that doubles with each further failure; a quiet window resets it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do after a fault. `off`: the child is over its limit; `pause_s`: wait before the next try."""

    off: bool
    pause_s: float


class FaultWindow:
    """The faults of one child on one rank. Times are monotonic seconds."""

    def __init__(self, max_faults: int, window_s: float, retry_s: float, max_retry_s: float) -> None:
        self._max_faults = max_faults
        self._window_s = window_s
        self._retry_s = retry_s
        self._max_retry_s = max_retry_s
        self._recent: deque[float] = deque()
        self._pauses = 0

    def fault(self, now: float) -> Verdict:
        """A fault happened at `now`."""
        if self._recent and now - self._recent[-1] > max(self._window_s, 2 * self._max_retry_s):
            self._pauses = 0
        while self._recent and now - self._recent[0] > self._window_s:
            self._recent.popleft()
        self._recent.append(now)
        if len(self._recent) < self._max_faults:
            return Verdict(off=False, pause_s=0.0)
        pause = min(self._retry_s * 2**self._pauses, self._max_retry_s)
        self._pauses += 1
        return Verdict(off=True, pause_s=pause)
