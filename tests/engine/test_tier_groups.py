"""TierConnector alone, on models whose KV cache is not that of a plain Llama."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import answers_of
from tests.support.configs import tier_child
from tests.support.engine import Engine
from tests.support.prompts import MAX_TOKENS, PROMPTS
from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.timeout(600)]

HITS = {
    "hybrid": {"long": 1184, "branch": 1088, "page": 320, "aligned": 480},
    # vLLM's prefill of such a model does not read what was loaded, on a CPU without AMX: RayKV must not load.
    "mla": {"long": 0, "branch": 0},
}
"""By kind of model and prompt: the tokens that a warm request loads."""


@pytest.mark.parametrize(("kind", "kv_groups"), [("hybrid", 2), ("mla", 1)])
def test_cold_and_warm_from_both_tiers(
    kind: str, kv_groups: int, request: pytest.FixtureRequest, ray_cluster: RayCluster, tmp_path: Path
) -> None:
    model: Path = request.getfixturevalue(f"tiny_{kind}_model")
    expected = answers_of(model, request)
    store = f"{kind}{os.getpid()}"
    child = tier_child(store, host="16MiB", disk="64MiB", path=tmp_path, cascade="write")
    env = {**ray_cluster.env, "PYTHONPATH": os.getcwd()}
    options = {"disable_hybrid_kv_cache_manager": False}
    with Engine(model, child, env=env, extra_args=options) as engine:
        assert len(engine.call_core("tests.support.probes:kv_groups")) == kv_groups
        free = engine.free_blocks()
        for turn in ("cold", "host", "disk"):
            for name, whole in HITS[kind].items():
                result = engine.generate(PROMPTS[name], MAX_TOKENS)
                assert result.token_ids == expected[name], (turn, name)
                assert turn == "cold" or result.num_external_tokens == whole, (turn, name)
                engine.wait_free_blocks(free, timeout_s=30)
                engine.forget(30)
            engine.call_core("tests.support.probes:store_settle", store)
            assert engine.call_core("tests.support.probes:store_status", store)["saved_blocks"] > 0
            if turn == "host":
                engine.call_core("tests.support.probes:store_clear", store, "host")
