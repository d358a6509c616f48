"""What a wrong set-up says when a real engine starts: one paragraph, and no engine is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.configs import example_child, multi
from tests.support.engine import Engine, EngineError
from tests.support.process import free_ports
from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.timeout(300)]


def what_it_says(model: Path, config: dict, env: dict[str, str]) -> str:
    engine = Engine(model, config, env={**env, "PYTHONPATH": os.getcwd()})
    try:
        with pytest.raises(EngineError) as caught:
            engine.wait_ready()
        return caught.value.log
    finally:
        engine.kill()


def test_no_ray(tiny_model: Path, tmp_path: Path) -> None:
    port = free_ports(1)[0]
    said = what_it_says(tiny_model, multi([example_child(tmp_path)]), {"RAY_ADDRESS": f"127.0.0.1:{port}"})
    assert "ClusterError" in said and f"127.0.0.1:{port}" in said


def test_a_child_that_refuses(tiny_model: Path, ray_cluster: RayCluster) -> None:
    """LMCacheConnectorV1 needs a GPU; its own words reach the user."""
    child = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    said = what_it_says(tiny_model, multi([child]), ray_cluster.env)
    assert "The child LMCacheConnectorV1" in said and "No supported cpu connector found" in said


def test_a_misspelt_option(tiny_model: Path, ray_cluster: RayCluster, tmp_path: Path) -> None:
    config = multi([example_child(tmp_path, timeout_sec=3)], kv_connector="RayMultiConnector")
    said = what_it_says(tiny_model, config, ray_cluster.env)
    assert "ConfigError" in said and "timeout_sec" in said and "timeout_s" in said
