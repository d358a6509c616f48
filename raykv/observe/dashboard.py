"""The Grafana dashboard, from the table of panels: as Grafana's JSON, for Ray's way of provisioning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raykv.observe.panels import PANELS, Panel

UID = "raykv"
COLUMNS, WIDTH, HEIGHT = 3, 8, 7
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """All of it. The same each time."""
    return {
        "uid": UID,
        "title": "RayKV",
        "tags": ["raykv", "ray"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "schemaVersion": 39,
        "version": 1,
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "panels": list(_panels()),
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}
    chosen = [
        ("session", "Ray cluster", "label_values(ray_raykv_store_started_seconds, SessionName)"),
        ("node", "Node", "label_values(ray_raykv_store_started_seconds, node)"),
        ("store", "Store", "label_values(ray_raykv_store_started_seconds, store)"),
        ("engine", "Engine", "label_values(ray_raykv_requests_running, engine)"),
    ]
    return [source, *(_variable(*one) for one in chosen)]


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "sort": 1,
    }


def _panels() -> Iterator[dict[str, Any]]:
    row, number, y, column = "", 0, 0, 0
    for panel in PANELS:
        number += 1
        if panel.row != row:
            y += HEIGHT if row else 0
            place = {"h": 1, "w": COLUMNS * WIDTH, "x": 0, "y": y}
            yield {"id": number, "type": "row", "title": panel.row, "collapsed": False, "gridPos": place, "panels": []}
            row, y, column, number = panel.row, y + 1, 0, number + 1
        elif column == COLUMNS:
            y, column = y + HEIGHT, 0
        yield _graph(panel, number, column * WIDTH, y)
        column += 1


def _graph(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 40 if panel.stack else 5, "lineWidth": 1, "showPoints": "never"}
    custom |= {"stacking": {"mode": "normal" if panel.stack else "none", "group": "A"}}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": query.expr, "legendFormat": query.legend}
            for at, query in enumerate(panel.queries)
        ],
    }
