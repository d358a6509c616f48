"""Why a request was computed, where that takes an engine of its own: another model's blocks, and what a load costs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import wait_until
from tests.support.configs import file_child, multi, tier_child
from tests.support.engine import Engine
from tests.support.prompts import MAX_TOKENS, PROMPTS
from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(900)]

HOST = 16 << 20
LIMITS = {"timeout_s": 60, "load_timeout_s": 120}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reasons")


@pytest.fixture(scope="module")
def engines(tiny_model: Path, ray_cluster: RayCluster, folder: Path) -> Iterator[dict[str, Engine]]:
    """ "full" and "half" have one model, one store and another dtype; "half" weighs what a hit costs."""
    tiers = tier_child(f"r{os.getpid()}", host=str(HOST), slot=128 << 10)  # the blocks of "full" are the larger ones
    env = {**ray_cluster.env, "PYTHONPATH": os.getcwd()}
    slow = file_child(folder, name="slow", **LIMITS)
    half = multi([slow, tiers], raykv={"load_cost": True}, engine_id="half")
    with contextlib.ExitStack() as stack:
        made = {"full": Engine(tiny_model, multi([tiers], engine_id="full"), env=env)}
        stack.callback(made["full"].close)
        made["half"] = Engine(tiny_model, half, env=env, extra_args={"dtype": "bfloat16"})
        stack.callback(made["half"].close)
        for engine in made.values():
            engine.wait_ready()
        yield made


@pytest.fixture
def kv(engines: dict[str, Engine]) -> Iterator[Any]:
    import raykv

    with raykv.connect(timeout_s=30) as found:
        yield found


def reasons(kv: Any, request: str, engine: str) -> dict[str, str]:
    """What kept its tokens from being loaded, and what was said of that."""
    wait_until(lambda: any(known.startswith(request) for known in kv.requests(engine=engine)), f"story of {request}")
    told = kv.explain(request, engine=engine)
    assert sum(told.by_source.values()) == told.prompt_tokens
    return {reason.why: reason.detail for piece in told.pieces for reason in piece.reasons}


def test_blocks_of_another_model(engines: dict[str, Engine], kv: Any) -> None:
    """The same tokens under another dtype: no hit, and the fact that differs is named with both values."""
    prompt = PROMPTS["page"]
    engines["full"].generate(prompt, MAX_TOKENS)
    wait_until(lambda: kv.lookup(prompt, engine="full").held_tokens, "save")
    assert not kv.lookup(prompt, engine="half").held_tokens
    engines["half"].generate(prompt, MAX_TOKENS, request_id="other")
    found = reasons(kv, "other", "half")
    assert "other fingerprint" in found and "never stored" not in found
    assert all(word in found["other fingerprint"] for word in ("dtype", "float32", "bfloat16"))


def test_below_the_cost_line(engines: dict[str, Engine], kv: Any, folder: Path) -> None:
    """A child whose load takes longer than to compute all else is not asked a second time, and the story says so."""
    half, control = engines["half"], folder / "control"
    free = half.free_blocks()
    half.generate(PROMPTS["long"], MAX_TOKENS)
    half.wait_free_blocks(free, 60)
    half.forget(60)
    (control / "hold_load").touch()
    pending = half.submit(PROMPTS["long"], MAX_TOKENS)
    wait_until(lambda: (control / "loading").exists(), "the child's load")
    for name in ("aligned", "branch", *(f"crowd{number}" for number in range(6))):
        half.generate(PROMPTS[name], MAX_TOKENS)
    (control / "hold_load").unlink()
    pending.result()
    half.wait_free_blocks(free, 60)
    half.forget(60)
    assert kv.clear(everything=True).ok
    half.generate(PROMPTS["long"], MAX_TOKENS, request_id="dear")
    found = reasons(kv, "dear", "half")
    assert "below the cost line" in found
    assert kv.explain("dear", engine="half").by_source == {"computed": len(PROMPTS["long"])}
