"""A real Prometheus scrapes a real cluster: each panel's query and each alert's value gives data."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raykv.observe import provision
from raykv.observe.alerts import ALERTS
from raykv.observe.panels import PANELS, full
from tests.support.metrics_cluster import MetricsCluster, metrics_cluster
from tests.support.prometheus import Prometheus, binary

pytestmark = [pytest.mark.soak, pytest.mark.ray]

FILL_S = 180.0
"""A rate needs two scrapes of what Ray tells anew every 10 s."""

QUERIES = {
    **{f"{panel.row}: {panel.title} ({query.legend})": query.expr for panel in PANELS for query in panel.queries},
    **{alert.name: full(alert.value) for alert in ALERTS},
    **{f"{alert.name}, only": full(alert.only.partition(" > ")[0]) for alert in ALERTS if alert.only},
}


def as_grafana_sends(expr: str) -> str:
    """With everything chosen."""
    for name in ("session", "store", "node", "engine"):
        expr = expr.replace(f'"${name}"', '".*"')
    return expr.replace("$__rate_interval", "1m")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MetricsCluster]:
    yield from metrics_cluster(tmp_path_factory.mktemp("disk"))


@pytest.fixture(scope="module")
def prometheus(cluster: MetricsCluster) -> Iterator[Prometheus]:
    found = Prometheus(cluster.targets, provision.alerts_text())
    try:
        yield found
    finally:
        found.stop()


def test_each_query_gives_data(cluster: MetricsCluster, prometheus: Prometheus) -> None:
    wanted = {what: as_grafana_sends(expr) for what, expr in QUERIES.items()}
    deadline = time.monotonic() + FILL_S
    while wanted and time.monotonic() < deadline:
        cluster.work()
        time.sleep(1.0)
        wanted = {what: expr for what, expr in wanted.items() if not has_data(prometheus, what, expr)}
    assert not wanted, "these give no data"


def has_data(prometheus: Prometheus, what: str, expr: str) -> bool:
    """Numbers, but where nothing happens here: no other node is asked, so its seconds are not a number."""
    found = [float(result["value"][1]) for result in prometheus.query(expr)]
    return bool(found) and ("Asking other nodes" in what or not all(map(math.isnan, found)))


def test_a_fault_raises_its_alert(cluster: MetricsCluster, prometheus: Prometheus) -> None:
    """The child that is down, and whose loads fail, is seen; a store that is well is not."""
    deadline = time.monotonic() + FILL_S
    firing: set[str] = set()
    while "RayKVChildOff" not in firing and time.monotonic() < deadline:
        cluster.work()
        time.sleep(1.0)
        alerts = prometheus.get("alerts")["alerts"]
        firing = {alert["labels"]["alertname"] for alert in alerts if alert["state"] in ("pending", "firing")}
    assert {"RayKVChildOff", "RayKVLoadsFail"} <= firing
    assert not firing & {"RayKVFaults", "RayKVTierOff", "RayKVStoreRestarted", "RayKVControllerStuck"}


def test_the_rules_file_is_good(tmp_path: Path) -> None:
    provision.write(tmp_path)
    subprocess.run([binary("promtool"), "check", "rules", str(tmp_path / provision.ALERTS)], check=True)
