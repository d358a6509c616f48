"""A real Prometheus on loopback that scrapes what a test tells it to. Debian's package `prometheus` has the binary."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.process import ProcessGroup, free_ports

START_S = 60.0


def binary(name: str = "prometheus") -> str:
    """Its path. Fails the test where it is not installed: `apt-get install prometheus`."""
    found = shutil.which(name)
    assert found is not None, f"{name} is not on this machine: apt-get install --no-install-recommends prometheus"
    return found


class Prometheus:
    """Runs from construction to `stop`."""

    def __init__(self, targets: Sequence[str], rules: str = "") -> None:
        """`targets`: host:port of pages called /metrics; `rules`: a file of alert rules."""
        self.folder = Path(tempfile.mkdtemp(prefix="rkprom"))
        config: dict[str, Any] = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "scrape_configs": [{"job_name": "ray", "static_configs": [{"targets": list(targets)}]}],
        }
        if rules:
            (self.folder / "rules.yml").write_text(rules)
            config["rule_files"] = ["rules.yml"]
        (self.folder / "prometheus.yml").write_text(json.dumps(config))  # which is YAML too
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        command = [binary(), f"--config.file={self.folder}/prometheus.yml", f"--storage.tsdb.path={self.folder}/data"]
        self._group = ProcessGroup("prometheus", [*command, f"--web.listen-address=127.0.0.1:{port}"])
        deadline = time.monotonic() + START_S
        while not self._ready():
            assert self._group.alive and time.monotonic() < deadline, "Prometheus does not get ready"
            time.sleep(0.1)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API. Raises for a bad query, with what Prometheus says."""
        try:
            with urllib.request.urlopen(
                f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30
            ) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error

    def query(self, expr: str) -> list[dict[str, Any]]:
        """What an instant query gives now."""
        found = self.get("query", query=expr)
        return [] if found["resultType"] == "scalar" else found["result"]

    def stop(self) -> None:
        self._group.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
