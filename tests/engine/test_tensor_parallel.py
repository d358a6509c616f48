"""Two ranks, two hosted children: same tokens, and one completion for both ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import PATIENT, Children
from tests.support.configs import file_child, multi
from tests.support.engine import Engine
from tests.support.lmcache_server import LMCacheServer
from tests.support.prompts import MAX_TOKENS, PROMPTS
from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def two_ranks(
    tiny_model: Path,
    ray_cluster: RayCluster,
    lmcache_server: LMCacheServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Engine, Path]]:
    folder = tmp_path_factory.mktemp("tp2")
    children = [file_child(folder, **PATIENT), lmcache_server.child(**PATIENT)]
    env = {**ray_cluster.env, "PYTHONPATH": os.getcwd()}
    with Engine(tiny_model, multi(children), tensor_parallel_size=2, env=env) as engine:
        yield engine, folder / "control"


def test_both_children_load_on_both_ranks(
    two_ranks: tuple[Engine, Path], baseline_of_two_ranks: dict[str, list[int]]
) -> None:
    engine, control = two_ranks
    children = Children(engine)
    for child, steer in (("FileChild", None), ("LMCacheMPConnector", control / "miss")):
        if steer is not None:
            steer.touch()
        before = children.metric("tokens_loaded", child)
        for _ in range(5):  # cold, then warm; more only if the machine stood still for longer than a limit
            result = engine.generate(PROMPTS["page"], MAX_TOKENS, timeout_s=300)
            assert result.token_ids == baseline_of_two_ranks["page"]
            engine.forget(60)
            if children.metric("tokens_loaded", child) > before:
                break
        assert children.metric("tokens_loaded", child) > before
    free = engine.free_blocks()
    assert engine.generate(PROMPTS["long"], MAX_TOKENS).token_ids == baseline_of_two_ranks["long"]
    engine.wait_free_blocks(free, timeout_s=60)
