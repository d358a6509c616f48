"""RayKV's metrics on the page that Ray's agent has for Prometheus, from a real store, Directory and Controller."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from raykv.observe import provision
from raykv.observe.names import METRICS, Kind
from tests.support.metrics_cluster import PATIENCE, MetricsCluster, Series, metrics_cluster

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MetricsCluster]:
    yield from metrics_cluster(tmp_path_factory.mktemp("disk"))


TIMELINE = {f"task::NodeStore.{method}" for method in ("look_ups", "save", "load", "settle")}


def missing(found: Series) -> list[str]:
    return sorted(name for metric in METRICS for name in metric.series if name not in found)


def total(found: Series, name: str, **labels: str) -> float:
    return sum(value for own, value in found[name] if labels.items() <= own.items())


def test_every_metric_of_the_table_is_on_the_page(cluster: MetricsCluster) -> None:
    found: Series = {}
    deadline = time.monotonic() + PATIENCE
    while (not found or missing(found)) and time.monotonic() < deadline:
        cluster.work()
        time.sleep(0.5)  # Ray's own pace: a page every 10 s
        found = cluster.scrape()
    assert not missing(found)
    by_name = {name: metric for metric in METRICS for name in metric.series}
    for name, rows in found.items():
        metric = by_name[name]
        wanted = {*metric.labels, "le"} if name.endswith("_bucket") else set(metric.labels)
        for labels, _ in rows:
            assert wanted <= labels.keys(), name
    assert total(found, "ray_raykv_faults_total") == 0, "and they are there, at 0"
    assert total(found, "ray_raykv_look_ups_total") > 0
    assert 0 < total(found, "ray_raykv_hit_blocks_total") <= total(found, "ray_raykv_reusable_blocks_total")
    assert total(found, "ray_raykv_reusable_blocks_total") < total(found, "ray_raykv_asked_blocks_total")
    for metric in METRICS:
        if metric.kind is Kind.HISTOGRAM:
            bucket, _, count = metric.series
            assert total(found, bucket, le="+Inf") == total(found, count)


def test_the_controller_puts_the_dashboard_beside_rays_own(cluster: MetricsCluster) -> None:
    folder = Path(cluster.ray.record.log_dir).parent / "metrics" / "grafana" / "dashboards"
    deadline = time.monotonic() + PATIENCE
    while not (folder / provision.DASHBOARD).exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert (folder / provision.DASHBOARD).read_text() == provision.dashboard_text()
    assert len(list(folder.glob("*.json"))) > 1


def test_actors_and_tasks_have_names_that_a_person_understands(cluster: MetricsCluster) -> None:
    from ray.util.state import list_actors

    shown = {actor.class_name: actor.repr_name for actor in list_actors(detail=True) if actor.state == "ALIVE"}
    assert shown["NodeStore"] == f"NodeStore({cluster.spec.name})"
    assert shown.keys() >= {"NodeStore", "Directory", "Controller"}
    seen: set[str] = set()
    deadline = time.monotonic() + PATIENCE
    while not seen >= TIMELINE and time.monotonic() < deadline:
        time.sleep(0.5)  # Ray's own pace
        seen = {event["cat"] for event in ray.timeline()}
    assert seen >= TIMELINE
