"""A histogram with fixed upper bounds: an `add` costs a bisection and two additions, and allocates nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""For look-ups and copies: from a tenth of a millisecond to what counts as hung."""
AGES_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0, 7 * 24 * 3600.0)
"""For how long a block was kept."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram at one moment. `counts[i]`: values up to `bounds[i]`, above the bound before; the last: the rest."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """How many values."""
        return sum(self.counts)

    def up_to(self) -> list[tuple[str, int]]:
        """Cumulative, as Prometheus has them: the bound as text, "+Inf" last."""
        found, so_far = [], 0
        for bound, count in zip((*(f"{bound:g}" for bound in self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            found.append((bound, so_far))
        return found


class Histogram:
    """Who adds from several threads holds a lock of his own; `read` needs none, it may be a value behind."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"the bounds of a histogram ascend, these do not: {tuple(bounds)}")
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> Buckets:
        """As it is now."""
        return Buckets(self._bounds, tuple(self._counts), self._total)
