"""RayKV's metrics through Ray: `ray.util.metrics` in whatever process of the cluster calls. Part of the edge to Ray.

Each process reports for itself; Ray's agent of its node has all of them on one page for Prometheus, about 10 s later. A
gauge's series ends 20 s after its process has.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ray
from ray.util.metrics import Gauge

from raykv.observe import provision
from raykv.observe.names import BY_NAME, Metric
from raykv.observe.reporter import EVERY_S, Read, Report, Reporter
from raykv.observe.samples import Point, Sample
from raykv.types import NODE_CHARS

logger = logging.getLogger("raykv")

MakeGauge = Callable[[str, str, tuple[str, ...]], Any]


class RayWriter:
    """Sets one gauge of Ray's for each point: 3 to 6 microseconds."""

    def __init__(self, make: MakeGauge = Gauge) -> None:
        self._make = make
        self._gauges: dict[str, Any] = {}

    def __call__(self, point: Point) -> None:
        gauge = self._gauges.get(point.name)
        if gauge is None:
            text = _metric_of(point.name).help
            gauge = self._gauges[point.name] = self._make(point.name, text, tuple(key for key, _ in point.labels))
        gauge.set(point.value, tags=dict(point.labels))


def _metric_of(name: str) -> Metric:
    """Also by the name of a histogram's part."""
    for known in (name, *(name.removesuffix(part) for part in ("_bucket", "_sum", "_count"))):
        if known in BY_NAME:
            return BY_NAME[known]
    raise KeyError(name)


_report = Report(RayWriter())
_lock = threading.Lock()


def report(samples: Iterable[Sample]) -> None:
    """Hand an engine's samples to Ray, once; the caller comes again every few seconds, with all of them. Any thread,
    but none that anybody waits for. Raises ValueError for what is not in the table."""
    with _lock:
        _report(samples)


def start(name: str, read: Read, every_s: float = EVERY_S) -> Reporter:
    """Report what `read` gives from now on, in a thread of its own, until `Reporter.close` or the process's end."""
    reporter = Reporter(name, read, Report(RayWriter()), every_s)
    reporter.start()
    return reporter


def put_dashboard() -> bool:
    """Put RayKV's dashboard where Grafana has Ray's own from, on this node; whether it was put there now. It is not
    while Ray has made no folder for it. Raises nothing."""
    try:
        # Ray has no public name for its session's folder (2.60).
        session = ray._private.worker.global_worker.node.get_session_dir_path()
        return provision.into_session(Path(session))
    except Exception as error:
        logger.debug("the dashboard was not put into Ray's session: %s", error)
        return False


def node_label() -> str:
    """This node as metrics name it: the first letters of its id, as in the names of its stores."""
    return ray.get_runtime_context().get_node_id()[:NODE_CHARS]
