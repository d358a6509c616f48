"""Whether to load a hit or to compute it: the time of the one against that of the other, by measured rates.

A child's rate is what its loads that went well brought, from the step that planned them to the report that ended
them, so a slow disk, a busy network and the wait in a queue all count. The engine's rate is what its steps compute of
prompts. Both are averages in which the newest measure has the weight `NEWEST`. No hit is left before both are known,
and every `TRY_AGAIN`th that would be is loaded after all, so that a rate can recover.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable

from raykv.messages import ChildIndex
from raykv.types import RequestId

NEWEST = 0.2
TRY_AGAIN = 20
LEAST_TOKENS = 16
"""A step that computes fewer tokens of prompts tells nothing of their rate: what else it does takes the time."""

Key = tuple[RequestId, ChildIndex]


class LoadCost:
    """One engine's rates. Times are monotonic seconds. One thread: the scheduler's."""

    def __init__(self) -> None:
        self.load_rates: dict[ChildIndex, float] = {}
        """By child: tokens a second."""
        self.prefill_rate: float | None = None
        self._left: Counter[ChildIndex] = Counter()
        self._loads: dict[Key, tuple[int, float]] = {}
        self._steps: deque[tuple[int, float]] = deque(maxlen=16)
        self._last_end = 0.0

    def worth_it(self, child: ChildIndex, tokens: int) -> bool:
        """Whether the child loads so many tokens sooner than the engine computes them. Ask once a hit: it counts."""
        rate = self.load_rates.get(child)
        if rate is None or self.prefill_rate is None or tokens / rate <= tokens / self.prefill_rate:
            return True
        self._left[child] += 1
        return self._left[child] % TRY_AGAIN == 0

    def load_begun(self, request: RequestId, child: ChildIndex, tokens: int, now: float) -> None:
        """An asynchronous load was planned."""
        self._loads[(request, child)] = (tokens, now)

    def loads_ended(self, ended: Iterable[Key], well: Collection[Key], now: float) -> None:
        """Loads that ended; `well`: those of them that did not fail."""
        for key in ended:
            tokens, begun = self._loads.pop(key, (0, now))
            if key in well and tokens and now > begun:
                child = key[1]
                self.load_rates[child] = _average(self.load_rates.get(child), tokens / (now - begun))

    def step_begun(self, tokens: int, now: float) -> None:
        """A step was planned that computes so many tokens of prompts."""
        self._steps.append((tokens, now))

    def step_ended(self, now: float) -> None:
        """The oldest step's output is there. With two steps in flight it began when the one before it ended."""
        if not self._steps:
            return
        tokens, planned = self._steps.popleft()
        begun, self._last_end = max(planned, self._last_end), now
        if tokens >= LEAST_TOKENS and now > begun:
            self.prefill_rate = _average(self.prefill_rate, tokens / (now - begun))


def _average(known: float | None, newest: float) -> float:
    return newest if known is None else (1 - NEWEST) * known + NEWEST * newest
