"""An engine's metrics: summed up and handed to Ray by the thread of its desk, never by EngineCore's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from raykv.actors import ray_metrics
from raykv.engine_messages import EngineView, Story
from raykv.observe.engine import EngineMeter, engine_samples
from raykv.observe.reporter import EVERY_S
from raykv.observe.samples import Sample

logger = logging.getLogger("raykv")


class EngineReport:
    """The desk's thread calls `story` for each request that has ended, and `view` whenever it has made one.

    `meter.missed` may be read by any thread.
    """

    def __init__(
        self, report: Callable[[Iterable[Sample]], None] = ray_metrics.report, every_s: float = EVERY_S
    ) -> None:
        self.meter = EngineMeter()
        self._report, self._every_s = report, every_s
        self._due = 0.0
        self._complained = False

    def story(self, story: Story) -> None:
        """A request has ended."""
        self.meter.add(story)

    def view(self, view: EngineView, now: float) -> None:
        """Report, unless it was done just now. `now`: monotonic. Raises nothing: the desk matters more."""
        if now < self._due:
            return
        self._due = now + self._every_s
        try:
            self._report(engine_samples(view, self.meter))
        except Exception as error:
            if not self._complained:
                self._complained = True
                logger.warning("engine %s can't report its metrics: %s: %s", view.engine, type(error).__name__, error)
