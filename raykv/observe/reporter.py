"""A thread that reads figures every few seconds and hands them on: nobody else ever makes a metric call.

Totals are handed on as totals, each time anew, so a report that gets lost costs nothing. Why they are not Ray's
Counters and Histograms: a Counter of Ray's can't begin at 0, so the first fault of a process would be no rise that an
alert could see; its Histograms take a call for each observation, and add up the middles of buckets for the sum.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from raykv.observe.names import BY_NAME, Kind
from raykv.observe.samples import Bounded, Point, Sample

logger = logging.getLogger("raykv")

EVERY_S = 5.0
"""Ray hands its processes' metrics on every 10 s."""

Read = Callable[[], Iterable[Sample]]
Write = Callable[[Point], None]


class Report:
    """One report after the other to `write`. What is not there any more is told once more, as 0, if it is a gauge. One
    thread at a time."""

    def __init__(self, write: Write) -> None:
        self._write, self._bounded = write, Bounded()
        self._last: dict[tuple[str, tuple[tuple[str, str], ...]], Point] = {}

    def __call__(self, samples: Iterable[Sample]) -> None:
        """Hand these on. Raises ValueError for a name that is not in the table; then nothing was."""
        points = {(point.name, point.labels): point for point in self._bounded.points(samples)}
        gone = [point for at, point in self._last.items() if at not in points and _is_gauge(point.name)]
        self._last = {at: point for at, point in self._last.items() if at not in points and not _is_gauge(point.name)}
        self._last |= points
        for point in (*points.values(), *(point._replace(value=0.0) for point in gone)):
            self._write(point)


def _is_gauge(name: str) -> bool:
    metric = BY_NAME.get(name)
    return metric is not None and metric.kind is Kind.GAUGE


class Reporter:
    """Reports what `read` gives, every `every_s` seconds, from `start` to `close`. What raises costs one report."""

    def __init__(
        self, name: str, read: Read, report: Callable[[Iterable[Sample]], None], every_s: float = EVERY_S
    ) -> None:
        self._read, self._report, self._every_s = read, report, every_s
        self._stop = threading.Event()
        self._said = ""
        self._thread = threading.Thread(target=self._run, name=f"raykv-metrics-{name}", daemon=True)

    def start(self) -> None:
        """The first report is made at once, so that everything is seen at its 0."""
        self._thread.start()

    def close(self) -> None:
        """No report is made any more when this returns."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._report(self._read())
            except Exception as error:  # metrics must never end what they are about
                text = f"{type(error).__name__}: {error}"
                if text != self._said:
                    self._said = text
                    logger.warning("a report of metrics failed: %s", text)
            if self._stop.wait(self._every_s):
                return
