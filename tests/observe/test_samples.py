"""From figures to what Ray is told: names of the table, few labels, totals, and nothing that ends what it is about."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from raykv.actors.store_meter import Meter
from raykv.cluster_messages import ClusterStatus, EngineRole, EngineRow, NodeRow, StoreRow
from raykv.core.histogram import Histogram
from raykv.directory_messages import DirectoryStatus
from raykv.observe.engine import EngineMeter, engine_samples
from raykv.observe.names import METRICS, By
from raykv.observe.reporter import Report, Reporter
from raykv.observe.samples import OTHER, Bounded, Point, Sample
from raykv.observe.store import controller_samples, directory_samples, store_samples
from tests.support.engine_views import engine_view, story


def values(samples: Iterable[Sample]) -> dict[tuple[str, ...], Any]:
    """By name and the labels behind the reporter's own."""
    return {(sample.metric, *sample.labels): sample.value for sample in samples}


def of(by: By) -> set[str]:
    return {metric.name for metric in METRICS if metric.by is by}


# -- labels -------------------------------------------------------------------------------------------------


def test_labels_are_few_and_what_is_left_is_added_up() -> None:
    bounded = Bounded(most=2)
    points = bounded.points([Sample("raykv_dropped_blocks_total", ("s", "n", f"w{i}"), 10 + i) for i in range(5)])
    assert [(dict(point.labels)["why"], point.value) for point in points] == [("w0", 10), ("w1", 11), (OTHER, 39)]
    again = bounded.points([Sample("raykv_dropped_blocks_total", ("s", "n", "w4"), 1)])
    assert dict(again[0].labels)["why"] == OTHER, "the first ones that came stay"
    other = bounded.points([Sample("raykv_moved_blocks_total", ("s", "n", "w4"), 1)])
    assert dict(other[0].labels)["direction"] == "w4", "each metric has its own"


@pytest.mark.parametrize(
    "sample",
    [
        Sample("raykv_nonsense", (), 1),
        Sample("raykv_leases", ("s",), 1),
        Sample("raykv_look_up_seconds", ("s", "n"), 1.0),
    ],
)
def test_what_is_not_in_the_table_is_an_error(sample: Sample) -> None:
    with pytest.raises(ValueError, match=sample.metric):
        Bounded().points([sample])


def test_a_histogram_is_told_as_prometheus_has_it() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.5, 0.6, 3.0):
        histogram.add(value)
    points = Bounded().points([Sample("raykv_look_up_seconds", ("s", "n"), histogram.read())])
    told = {
        (point.name.removeprefix("raykv_look_up_seconds_"), dict(point.labels).get("le")): point for point in points
    }
    assert {at: point.value for at, point in told.items()} == {
        ("bucket", "0.1"): 1,
        ("bucket", "1"): 3,
        ("bucket", "+Inf"): 4,
        ("sum", None): pytest.approx(4.15),
        ("count", None): 4,
    }


# -- reports ------------------------------------------------------------------------------------------------


def test_what_is_gone_is_told_once_more_as_0_if_it_is_a_gauge() -> None:
    told: list[Point] = []
    report = Report(told.append)
    report(
        [
            Sample("raykv_child_up", ("e", "r", "n", "c", "k"), 1),
            Sample("raykv_child_loads_total", ("e", "r", "n", "c", "k"), 7),
        ]
    )
    told.clear()
    report([])
    assert [(point.name, point.value) for point in told] == [("raykv_child_up", 0)]
    told.clear()
    report([])
    assert told == []
    report([Sample("raykv_child_loads_total", ("e", "r", "n", "c", "k"), 8)])
    assert [point.value for point in told] == [8]


def test_a_reporter_reports_at_once_and_outlives_what_raises() -> None:
    reads: list[int] = []
    told = threading.Semaphore(0)

    def read() -> Iterator[Sample]:
        reads.append(1)
        if len(reads) == 1:
            raise RuntimeError("not now")
        return iter([Sample("raykv_leases", ("s", "n"), len(reads))])

    def report(samples: Iterable[Sample]) -> None:
        list(samples)
        told.release()

    reporter = Reporter("test", read, report, every_s=0.001)
    reporter.start()
    assert told.acquire(timeout=30) and told.acquire(timeout=30)
    reporter.close()
    assert not any(thread.name == "raykv-metrics-test" for thread in threading.enumerate())


# -- who reports --------------------------------------------------------------------------------------------


def test_an_engine_reports_all_that_the_table_has_of_it() -> None:
    meter = EngineMeter()
    meter.add(story(lookup_s=0.01, load_s=0.2, recompute_s=0.5))
    meter.add(story(lookup_s=0.02))
    found = values(engine_samples(engine_view(), meter))
    assert {name for name, *_ in found} == of(By.ENGINE)
    mine = ("e", "kv_both", "n" * 12)
    assert found["raykv_tokens_total", *mine, "host"] == 48 and found["raykv_tokens_total", *mine, "gpu"] == 0
    assert found["raykv_missed_tokens_total", *mine, "tier", "evicted"] == 96
    assert found["raykv_child_load_seconds_total", *mine, "tier", "TierConnector"] == 1.5
    assert found["raykv_child_up", *mine, "nixl", "NixlConnector"] == 0
    assert (
        found["raykv_child_state", *mine, "nixl", "down"] == 1 and found["raykv_child_state", *mine, "nixl", "up"] == 0
    )
    assert found["raykv_engine_look_up_seconds", *mine].count == 2
    assert found["raykv_engine_load_seconds", *mine].count == 1, "a request without a load has none"
    assert found["raykv_saved_by_loads_seconds_total", *mine] == pytest.approx(0.3)
    Bounded().points(engine_samples(engine_view(), meter))


def test_a_store_without_an_engine_reports_zeros() -> None:
    meter = Meter().read()
    nothing = {"tiers": {}, "counts": {}, "gauges": {}, "asked_blocks": 0, "reusable_blocks": 0, "opened_s": 0.0}
    found = values(store_samples("s", "n", 5.0, {**meter, **nothing}))
    assert found["raykv_faults_total", "s", "n", "bad read"] == 0
    assert found["raykv_store_started_seconds", "s", "n"] == 5.0
    Bounded().points(store_samples("s", "n", 5.0, {**meter, **nothing}))


def test_the_meter_knows_rates_of_large_copies_only() -> None:
    meter = Meter()
    meter.moved("host", "read", "engine", 1 << 20, 0.001)
    meter.moved("host", "read", "engine", 1 << 20, 0.002)
    meter.moved("host", "write", "engine", 100, 1e-9)
    meter.moved("host", "read", "engine", 0, 1.0)
    found = meter.read()
    assert found["best"] == {("host", "read"): pytest.approx((1 << 20) / 0.001)}
    assert found["bytes"]["host", "read", "engine"] == 2 << 20
    assert found["busy_s"]["host", "read", "engine"] == pytest.approx(0.003)


def test_directory_and_controller_report_all_that_the_table_has_of_them() -> None:
    directory = DirectoryStatus("l", 1, 9, 0, 1, (), 4, 1, 0, 0, 0, 20, 0, 12)
    found = values(directory_samples(directory))
    assert {name for name, *_ in found} == of(By.DIRECTORY)
    assert (found["raykv_directory_look_ups_total",], found["raykv_directory_hits_total",]) == (20, 12)
    status = ClusterStatus(
        "{}",
        (NodeRow("n", "h", "a", "alive"), NodeRow("m", "h", "a", "draining")),
        (EngineRow("e", EngineRole.PREFILL, "ready", restarts=2), EngineRow("f", EngineRole.PREFILL, "waiting")),
        (StoreRow("s", "n", "up"),),
        problem="the head is away",
    )
    found = values(controller_samples(status))
    assert {name for name, *_ in found} == of(By.CONTROLLER)
    assert found["raykv_cluster_nodes", "draining"] == 1 and found["raykv_cluster_nodes", "drained"] == 0
    assert (
        found["raykv_cluster_engines", "prefill", "ready"] == 1 and found["raykv_cluster_engines", "both", "ready"] == 0
    )
    assert (found["raykv_cluster_problem",], found["raykv_cluster_engine_restarts",]) == (1, 2)
    Bounded().points([*controller_samples(status), *directory_samples(directory)])
