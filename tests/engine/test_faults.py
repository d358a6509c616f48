"""A child's process that is killed, stopped or raises: the engine and the other children go on."""

from __future__ import annotations

import signal
import time

import pytest

from tests.engine.conftest import Offload
from tests.support.prompts import MAX_TOKENS, PROMPTS

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.timeout(600)]


def check(offload: Offload, name: str, baseline: dict[str, list[int]]) -> None:
    assert offload.engine.generate(PROMPTS[name], MAX_TOKENS).token_ids == baseline[name]


def hits_again(offload: Offload, child: str, name: str, baseline: dict[str, list[int]]) -> None:
    """A cold request saves (if nothing was), and a warm one loads from the child."""
    before = offload.children.metric("tokens_loaded", child)
    for _ in range(4):  # a machine that stands still for seconds can cost the child another host
        check(offload, name, baseline)
        offload.engine.forget()
        if offload.children.metric("tokens_loaded", child) > before:
            return
        time.sleep(3)
    raise AssertionError(f"no tokens were loaded from {child} again")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_lost_during_a_load(offload: Offload, baseline: dict[str, list[int]], how: signal.Signals) -> None:
    check(offload, "page", baseline)
    offload.engine.forget()
    offload.set("hold_load")
    pending = offload.engine.submit(PROMPTS["page"], MAX_TOKENS)
    offload.wait_for("loading")
    old = offload.children.kill("FileChild", how)
    assert pending.result().token_ids == baseline["page"]
    offload.set()
    offload.children.wait_back("FileChild", old)
    offload.engine.forget()
    hits_again(offload, "FileChild", "page", baseline)


def test_killed_during_a_save(offload: Offload, baseline: dict[str, list[int]]) -> None:
    offload.set("miss", "hold_save")
    check(offload, "crowd7", baseline)
    offload.wait_for("saving")
    assert offload.engine.free_blocks() < offload.all_free, "the blocks of an open save must stay pinned"
    old = offload.children.kill("FileChild")
    offload.engine.wait_free_blocks(offload.all_free)
    offload.set()
    offload.children.wait_back("FileChild", old)
    offload.engine.forget()
    hits_again(offload, "FileChild", "crowd7", baseline)


def test_example_killed_while_idle(offload: Offload, baseline: dict[str, list[int]]) -> None:
    offload.set("miss")
    old = offload.children.kill("ExampleConnector")
    check(offload, "page", baseline)
    offload.children.wait_back("ExampleConnector", old)
    offload.engine.forget()
    hits_again(offload, "ExampleConnector", "page", baseline)


def test_lmcache_killed_while_idle(offload: Offload, baseline: dict[str, list[int]]) -> None:
    offload.set("miss")
    check(offload, "long", baseline)
    offload.engine.forget()
    old = offload.children.kill("LMCacheMPConnector")
    check(offload, "page", baseline)
    offload.children.wait_back("LMCacheMPConnector", old)
    offload.engine.forget()
    # A prompt that no other test uses: ExampleConnector, which stands first, can't have it.
    before = offload.children.metric("tokens_loaded", "LMCacheMPConnector")
    check(offload, "branch2", baseline)
    assert offload.children.metric("tokens_loaded", "LMCacheMPConnector") - before >= 800 // 128 * 128


@pytest.mark.parametrize(
    "hook",
    [
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "start_load_kv",
        "save_kv_layer",
        "wait_for_save",
        "get_finished",
        pytest.param("get_kv_connector_stats", marks=pytest.mark.soak),  # a minute, and on the way of "get_finished"
        "request_finished",
    ],
)
def test_a_child_that_raises(offload: Offload, baseline: dict[str, list[int]], hook: str) -> None:
    """Scenario 11: the others go on, and the child is used again when it no longer raises."""
    check(offload, "page", baseline)
    offload.engine.forget()
    pid = offload.children.pid("FileChild")
    restarts = offload.children.metric("restarts", "FileChild")
    offload.set(f"raise_in_{hook}")
    for name in ("page", "crowd0", "crowd1", "crowd2"):
        check(offload, name, baseline)
        offload.engine.forget()
    offload.set()
    if offload.children.metric("restarts", "FileChild") > restarts or not offload.children.metric(
        "child_up", "FileChild"
    ):
        offload.children.wait_back("FileChild", pid)
    hits_again(offload, "FileChild", "page", baseline)
