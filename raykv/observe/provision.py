"""The dashboard and the alert rules as files, and where Ray's own way of provisioning Grafana takes them from.

Ray writes Grafana's provisioning into its session's folder when the head starts; Grafana then reads every dashboard of
the folder `dashboards` there, also those that are not Ray's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from raykv.observe.alerts import rules
from raykv.observe.dashboard import dashboard

DASHBOARD, ALERTS = "raykv_grafana_dashboard.json", "raykv_alerts.yml"
DASHBOARDS_VARIABLE = "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"
"""Ray's own: where it puts its dashboards, if not into the session's folder."""


def dashboard_text() -> str:
    """The dashboard's file."""
    return json.dumps(dashboard(), indent=1) + "\n"


def alerts_text() -> str:
    """The alert rules' file."""
    import yaml

    return yaml.safe_dump(rules(), sort_keys=False, width=120)


def write(folder: Path) -> list[Path]:
    """Both files, into a folder that is made if need be. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in ((DASHBOARD, dashboard_text()), (ALERTS, alerts_text())):
        (folder / name).write_text(text)
        written.append(folder / name)
    return written


def dashboards_of(session: Path) -> Path:
    """The folder from which Grafana has the dashboards of a Ray session on this machine."""
    chosen = os.environ.get(DASHBOARDS_VARIABLE)
    return Path(chosen) if chosen else session / "metrics" / "grafana" / "dashboards"


def into_session(session: Path) -> bool:
    """Put the dashboard where Grafana takes Ray's own from, unless it is there; whether that was so.

    False too while Ray has not made that folder: it clears it when its dashboard starts. Raises OSError.
    """
    folder = dashboards_of(session)
    if not folder.is_dir() or (folder / DASHBOARD).exists():
        return False
    made = folder / f".{DASHBOARD}"
    made.write_text(dashboard_text())
    made.replace(folder / DASHBOARD)  # Grafana must not see half of it
    return True
