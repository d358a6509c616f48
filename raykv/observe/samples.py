"""Values of metrics at one moment, and the two rules about them: a name is of the table, and labels are few."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from raykv.core.histogram import Buckets
from raykv.observe.names import BY_NAME, RAY_PREFIX, Kind

MOST = 64
"""Values of one label of one metric in one process; what comes later is counted together as OTHER."""
OTHER = "other"


class Sample(NamedTuple):
    """`labels`: the values, in the order of the metric's `labels`. Totals are since the start of who reports."""

    metric: str
    labels: tuple[str, ...]
    value: float | Buckets


class Point(NamedTuple):
    """One number as Ray is given it; `labels` by name."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class Bounded:
    """Keeps the values of each label to `most`, the first ones that came. One thread."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._seen: dict[tuple[str, int], set[str]] = defaultdict(set)

    def points(self, samples: Iterable[Sample]) -> list[Point]:
        """What to report. Samples that fall together are added up. Raises ValueError for what is not in the table."""
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in samples:
            for name, labels, value in self._expanded(sample):
                sums[name, labels] = sums.get((name, labels), 0.0) + value
        return [Point(name, labels, value) for (name, labels), value in sums.items()]

    def _expanded(self, sample: Sample) -> Iterator[Point]:
        metric = BY_NAME.get(sample.metric)
        if metric is None or len(metric.labels) != len(sample.labels):
            raise ValueError(
                f"{sample.metric} with labels {sample.labels} is not in the table of metrics (observe.names)"
            )
        values = [self._bounded(metric.name, at, value) for at, value in enumerate(sample.labels)]
        labels = tuple(zip(metric.labels, values, strict=True))
        if not isinstance(sample.value, Buckets):
            if metric.kind is Kind.HISTOGRAM:
                raise ValueError(f"{metric.name} is a histogram, {sample.value} is a number")
            yield Point(metric.name, labels, float(sample.value))
            return
        for bound, count in sample.value.up_to():
            yield Point(f"{metric.name}_bucket", (*labels, ("le", bound)), float(count))
        yield Point(f"{metric.name}_sum", labels, sample.value.total)
        yield Point(f"{metric.name}_count", labels, float(sample.value.count))

    def _bounded(self, metric: str, at: int, value: str) -> str:
        seen = self._seen[metric, at]
        if value in seen:
            return value
        if len(seen) >= self._most:
            return OTHER
        seen.add(value)
        return value


def scraped(point: Point) -> str:
    """The point's name as Prometheus has it."""
    return RAY_PREFIX + point.name
