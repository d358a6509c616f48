"""Offload children in actors: tokens equal to an engine without a connector, cold and warm."""

from __future__ import annotations

import time

import pytest

from tests.engine.conftest import Offload
from tests.support.prompts import MAX_TOKENS, PROMPTS

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.timeout(600)]


def answers(offload: Offload, name: str) -> list[int]:
    return offload.engine.generate(PROMPTS[name], MAX_TOKENS).token_ids


def loads(offload: Offload, child: str, name: str, baseline: dict[str, list[int]], tokens: int) -> None:
    """A warm request takes exactly so many tokens from the child."""
    for _ in range(4):  # once, unless the machine stood still for longer than the child's limit
        before = offload.children.metric("tokens_loaded", child)
        assert answers(offload, name) == baseline[name]
        offload.engine.forget()
        if offload.children.metric("tokens_loaded", child) - before == tokens:
            return
        time.sleep(3)
    raise AssertionError(f"{name} did not load {tokens} tokens from {child}")


def test_cold_then_warm_from_each_child(offload: Offload, baseline: dict[str, list[int]]) -> None:
    """Scenario 5 too: the cold request stored every full block in every child."""
    assert answers(offload, "long") == baseline["long"]
    offload.engine.forget()
    full_blocks = (len(PROMPTS["long"]) - 1) // 32 * 32
    loads(offload, "FileChild", "long", baseline, full_blocks)
    offload.set("miss")
    loads(offload, "ExampleConnector", "long", baseline, full_blocks)
    # ExampleConnector knows whole prompts only; LMCache has the chunks that `branch` shares with `long`, or more of
    # it where this test is tried again.
    before = offload.children.metric("tokens_loaded", "LMCacheMPConnector")
    assert answers(offload, "branch") == baseline["branch"]
    assert offload.children.metric("tokens_loaded", "LMCacheMPConnector") - before >= 800 // 128 * 128


def test_many_requests_at_once(offload: Offload, baseline: dict[str, list[int]]) -> None:
    names = [name for name in PROMPTS if name.startswith("crowd")]
    for _ in range(2):
        pending = {name: offload.engine.submit(PROMPTS[name], MAX_TOKENS) for name in names}
        assert {name: p.result().token_ids for name, p in pending.items()} == {n: baseline[n] for n in names}
        offload.engine.forget()


def test_abort_while_a_load_and_a_save_are_open(offload: Offload, baseline: dict[str, list[int]]) -> None:
    """Scenario 2 on a real engine: the memory is free again once both are settled, and not before."""
    assert answers(offload, "aligned") == baseline["aligned"]
    offload.engine.forget()
    offload.set("hold_load")
    pending = offload.engine.submit(PROMPTS["aligned"], MAX_TOKENS, request_id="aborted")
    offload.wait_for("loading")
    offload.engine.abort("aborted")
    pending.result()
    assert offload.engine.free_blocks() < offload.all_free
    offload.set()
    offload.engine.wait_free_blocks(offload.all_free)
    assert answers(offload, "aligned") == baseline["aligned"]
