"""What engines have said of themselves, and for how long those that don't answer have been silent.

Not thread-safe: the Controller calls it under its lock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from raykv.actors.controller_view import View
from raykv.actors.controller_world import FoundEngine
from raykv.cluster_messages import EngineInfo, EngineReport, EngineState
from raykv.core.reconcile import Busy, Instance, SeenEngine

SILENT_S = 60.0
"""An actor that does not answer for this long - Ray can't place it, or it hangs - is ended and started anew."""


class Reports:
    """Of one life of the Controller. `now`: seconds of its clock."""

    def __init__(self) -> None:
        self._last: dict[Instance, EngineReport] = {}
        self._silent: dict[Instance, float] = {}  # since when
        self._first_look: float | None = None
        self.heard_all = False
        """Whether all engines have been heard in this life, or have been given the time for it."""

    def state(self, instance: Instance, engine: FoundEngine, now: float) -> SeenEngine:
        """What an engine is taken for at this look."""
        if engine.report is not None:
            self._silent.pop(instance, None)
            return SeenEngine(engine.report.state, engine.digest)
        silent = now - self._silent.setdefault(instance, now)
        return SeenEngine(EngineState.FAILED if silent > SILENT_S else None, engine.digest)

    def note(self, found: Mapping[Instance, FoundEngine], now: float) -> None:
        """Remember what each engine said last, and whether all have been heard."""
        last = {instance: engine.report or self._last.get(instance) for instance, engine in found.items()}
        self._last = {instance: report for instance, report in last.items() if report is not None}
        if self._first_look is None:
            self._first_look = now
        if len(self._last) == len(found) or now - self._first_look > SILENT_S:
            self.heard_all = True

    def ended(self, instance: Instance) -> None:
        """It was ended: how long it was silent counts for no other."""
        self._silent.pop(instance, None)

    def serving(self, view: View, busy: Collection[Busy]) -> list[EngineInfo]:
        """What the router may use. One that does not answer for the moment stays in it as it was."""
        found = []
        for instance, engine in sorted(view.engines.items(), key=lambda item: item[0]):
            report = engine.report or self._last.get(instance)
            if report is None or not report.url or report.digest != engine.digest:
                continue
            target = view.wanted.engines.get(instance.replica)
            right = target is not None and target.node == instance.node
            name = instance.replica if right else f"{instance.replica}@{instance.node[:8]}"
            ready = report.state is EngineState.READY and instance not in busy
            found.append(EngineInfo(name, report.role, report.url, instance.node, ready))
        return found


def failures(found: Mapping[Instance, FoundEngine]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Why engines have failed, and their last lines; by replica."""
    reports = {instance.replica: engine.report for instance, engine in found.items() if engine.report is not None}
    return {
        replica: (report.error, report.log_tail)
        for replica, report in reports.items()
        if report.state is EngineState.FAILED
    }
