"""The one table of metrics: it agrees with itself, with the dashboard, the alerts and the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from raykv.observe import docs, names, provision
from raykv.observe.alerts import ALERTS
from raykv.observe.dashboard import dashboard
from raykv.observe.names import METRICS, Kind
from raykv.observe.panels import PANELS, full

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
SERIES = {name: metric for metric in METRICS for name in metric.series}


def used(expr: str) -> set[str]:
    """The series that a query names."""
    return set(re.findall(r"ray_raykv_\w+", expr))


def labels_of(expr: str) -> set[str]:
    """The labels by which it selects or adds up."""
    selected = re.findall(r"[{,](\w+)[=!]~?\"", expr)
    grouped = [label for group in re.findall(r"\bby \(([^)]*)\)", expr) for label in re.split(r",\s*", group)]
    return {*selected, *grouped} - {"SessionName"}


EXPRESSIONS = [
    *((f"{panel.row}: {panel.title}", query.expr) for panel in PANELS for query in panel.queries),
    *((alert.name, alert.expr) for alert in ALERTS),
]


def test_names_are_unique_and_say_what_they_are() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS) == len(names.BY_NAME)
    for metric in METRICS:
        assert re.fullmatch(r"raykv_[a-z_]+", metric.name)
        assert (metric.kind is Kind.COUNTER) == metric.name.endswith("_total"), metric.name
        assert (metric.unit == "s") == bool(re.search(r"_seconds(_total)?$", metric.name)), metric.name
        assert metric.help.endswith(".") and len(set(metric.labels)) == len(metric.labels)


def test_every_line_of_the_text_tables_was_read() -> None:
    tables = (names.ENGINE, names.STORE, names.DIRECTORY, names.CONTROLLER)
    lines = [line for table in tables for line in table.splitlines() if line and not line.startswith(" ")]
    children = len(names.CHILD_COUNTERS) + len(names.CHILD_TIMES)
    assert len(lines) + children == len(METRICS)


@pytest.mark.parametrize(("what", "expr"), EXPRESSIONS)
def test_queries_name_series_and_labels_of_the_table(what: str, expr: str) -> None:
    series = used(expr)
    assert series and series <= SERIES.keys(), series - SERIES.keys()
    assert labels_of(expr) <= {label for name in series for label in SERIES[name].labels} | {"le"}
    for name in series:
        if name.endswith("_total") and "recover" not in expr:
            assert re.search(rf"(rate|increase)\({name}", expr), f"{name} is a total: its rate says something"


def test_every_metric_is_drawn() -> None:
    drawn = {SERIES[name].name for _, expr in EXPRESSIONS for name in used(expr)}
    assert {metric.name for metric in METRICS} == drawn


def test_the_dashboard_has_all_panels_in_rows_without_overlap() -> None:
    board = json.loads(provision.dashboard_text())
    graphs = [panel for panel in board["panels"] if panel["type"] != "row"]
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert [panel["title"] for panel in graphs] == [panel.title for panel in PANELS]
    assert rows == list(dict.fromkeys(panel.row for panel in PANELS))
    assert rows == ["Sources", "Tiers", "Children", "P/D", "Nodes", "Faults"]
    cells = [
        (x, y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    chosen = {variable["name"] for variable in board["templating"]["list"]}
    asked = set(re.findall(r"\$\{?(\w+)", provision.dashboard_text())) - {"__rate_interval", "__all"}
    assert asked == chosen
    assert dashboard() == board


def test_the_rules_are_for_prometheus() -> None:
    (group,) = yaml.safe_load(provision.alerts_text())["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [alert.name for alert in ALERTS]
    for alert in ALERTS:
        assert re.fullmatch(r"(<|>|==) [\d.]+", alert.condition) and alert.severity in ("info", "warning", "critical")
        named = set(re.findall(r"\$labels\.(\w+)", alert.summary))
        assert named <= labels_of(full(alert.value)), f"{alert.name} names a label that its value has lost"


def test_the_page_is_what_the_tables_say() -> None:
    page = PAGE.read_text()
    assert docs.filled(page) == page, "python -m raykv.observe docs/metrics.md"


def test_a_page_without_a_mark_is_an_error() -> None:
    with pytest.raises(ValueError, match="made: engine"):
        docs.filled("nothing")


def test_a_session_gets_the_dashboard_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(provision.DASHBOARDS_VARIABLE, raising=False)
    assert not provision.into_session(tmp_path), "Ray has made no folder yet"
    folder = tmp_path / "metrics" / "grafana" / "dashboards"
    folder.mkdir(parents=True)
    assert provision.into_session(tmp_path) and not provision.into_session(tmp_path)
    assert [path.name for path in folder.iterdir()] == [provision.DASHBOARD]
    assert (folder / provision.DASHBOARD).read_text() == provision.dashboard_text()
    monkeypatch.setenv(provision.DASHBOARDS_VARIABLE, str(tmp_path))
    assert provision.into_session(tmp_path / "elsewhere") and (tmp_path / provision.DASHBOARD).exists()
