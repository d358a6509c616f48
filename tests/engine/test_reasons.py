"""Why a request was computed, where that takes an engine of its own: another model's blocks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import multi, tier_child
from tests.support.engine import Engine
from tests.support.prompts import MAX_TOKENS, PROMPTS
from tests.support.ray_cluster import RayCluster
from tests.support.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(900)]

HOST = 16 << 20


@pytest.fixture(scope="module")
def engines(tiny_model: Path, ray_cluster: RayCluster) -> Iterator[dict[str, Engine]]:
    """ "full" and "half" have one model, one store and another dtype."""
    tiers = tier_child(f"r{os.getpid()}", host=str(HOST), slot=128 << 10)  # the blocks of "full" are the larger ones
    env = {**ray_cluster.env, "PYTHONPATH": os.getcwd()}
    with contextlib.ExitStack() as stack:
        made = {"full": Engine(tiny_model, multi([tiers], engine_id="full"), env=env)}
        stack.callback(made["full"].close)
        made["half"] = Engine(tiny_model, multi([tiers], engine_id="half"), env=env, extra_args={"dtype": "bfloat16"})
        stack.callback(made["half"].close)
        for engine in made.values():
            engine.wait_ready()
        yield made


@pytest.fixture
def kv(engines: dict[str, Engine]) -> Iterator[Any]:
    import raykv

    with raykv.connect(timeout_s=30) as found:
        eventually(lambda: set(engines) <= {engine.id for engine in found.engines}, "the engines' desks")
        yield found


def reasons(kv: Any, request: str, engine: str) -> dict[str, str]:
    """What kept its tokens from being loaded, and what was said of that."""
    eventually(lambda: any(known.startswith(request) for known in kv.requests(engine=engine)), f"story of {request}")
    told = kv.explain(request, engine=engine)
    assert sum(told.by_source.values()) == told.prompt_tokens
    return {reason.why: reason.detail for piece in told.pieces for reason in piece.reasons}


def test_blocks_of_another_model(engines: dict[str, Engine], kv: Any) -> None:
    """The same tokens under another dtype: no hit, and the fact that differs is named with both values."""
    prompt = PROMPTS["page"]
    engines["full"].generate(prompt, MAX_TOKENS)
    eventually(lambda: kv.lookup(prompt, engine="full").held_tokens, "save")
    assert not kv.lookup(prompt, engine="half").held_tokens
    engines["half"].generate(prompt, MAX_TOKENS, request_id="other")
    found = reasons(kv, "other", "half")
    assert "other fingerprint" in found and "never stored" not in found
    assert all(word in found["other fingerprint"] for word in ("dtype", "float32", "bfloat16"))
