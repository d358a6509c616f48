"""`raykv check`: a config's errors in a second, without an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def check(config: Any, *options: str) -> tuple[int, dict[str, Any]]:
    text = config if isinstance(config, str) else json.dumps(config)
    command = [sys.executable, "-m", "raykv.cli", "check", "-", "--no-ray", "--json", *options]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    return done.returncode, json.loads(done.stdout)


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "raykv.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def test_a_good_config() -> None:
    status, said = check(multi({"kv_connector": "NixlConnector"}, {"kv_connector": "ExampleConnector"}))
    assert status == 0
    assert [child["name"] for child in said["children"]] == ["NixlConnector", "ExampleConnector"]
    assert said["load_policy"] == "first" and said["ray"] is None


def test_bad_ones_are_one_paragraph() -> None:
    for config, words in (
        (multi(), ["connectors"]),
        (multi({"kv_conector": "NixlConnector"}), ["kv_conector", "kv_connector"]),
        ("{", ["JSON"]),
    ):
        status, said = check(config)
        assert status == 1 and said["type"] == "ConfigError"
        assert all(word in said["error"] for word in words) and "\n" not in said["error"]
