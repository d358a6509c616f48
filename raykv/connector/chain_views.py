"""What an operator sees of an engine's children."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from raykv.connector.scheduler_child import SchedulerChild
from raykv.connector.stats import SchedulerCounters
from raykv.core.chain import Place
from raykv.engine_messages import ChildView

REFRESH_S = 0.25
"""How old counters get while steps are planned. Who stands where is always that of the moment."""

WORDS = {
    Place.STARTING: "starting",
    Place.OFF: "off",
    Place.RESTARTING: "starting",
    Place.LEAVING: "leaving",
    Place.ENDING: "leaving",
}


@dataclass(frozen=True, slots=True)
class _Figures:
    child: SchedulerChild
    counters: dict[str, int]
    pids: tuple[int, ...]


class ChainViews:
    """One engine's. Call it from any thread for the views of its children, first asked first."""

    def __init__(self, children: Iterable[SchedulerChild], counters: SchedulerCounters) -> None:
        self._children, self._counters = children, counters
        self._due = 0.0
        self._figures: dict[int, _Figures] = {}

    def step_planned(self, now: float) -> None:
        """EngineCore's thread, each step; now and then it copies the counters. `now`: monotonic."""
        if now < self._due:
            return
        self._due = now + REFRESH_S
        self._figures = {child.index: self._of(child) for child in self._children}

    def _of(self, child: SchedulerChild) -> _Figures:
        pids = self._counters.pids.get(child.index, {})
        living = tuple(pid for _, pid in sorted(pids.items()) if pid)
        return _Figures(child, dict(self._counters.totals.get(child.index, {})), living)

    def __call__(self) -> tuple[ChildView, ...]:
        figures = self._figures
        return tuple(_view(child, figures.get(child.index)) for child in self._children)


def _view(child: SchedulerChild, figures: _Figures | None) -> ChildView:
    config = child.config
    return ChildView(
        name=child.name,
        connector=config.connector,
        run=config.options.run.value,
        state=WORDS.get(child.place, child.state.value),
        loads=config.options.load and config.role != "kv_producer",
        saves=child.saves,
        incarnation=max(child.incarnations),
        host_pids=figures.pids if figures is not None and child.hosted else (),
        counters=figures.counters if figures is not None else {},
        config=json.dumps(child.raw) if child.raw else "",
    )
