"""Scenario 10: a failed load on a model with two KV groups, where vLLM can't take block ids."""

from __future__ import annotations

import pytest

from tests.support.fake_config import child
from tests.support.fake_worker import Bench

pytestmark = pytest.mark.vllm
WINDOW = 32


@pytest.mark.parametrize("failing", ["blocks", "request"])
@pytest.mark.parametrize(("failing_ranks", "ranks"), [(None, 1), (None, 2), ((1,), 2)])
def test_a_failed_load_is_recomputed(
    failing: str, failing_ranks: tuple[int, ...] | None, ranks: int, hosted: bool, overlap: bool
) -> None:
    scripted = child("A", hosted, hits={"r0": 128}, failing=failing, failing_ranks=failing_ranks, saves=True)
    with Bench([scripted], ranks=ranks, async_scheduling=overlap, window=WINDOW) as bench:
        bench.add(150, max_tokens=40)
        bench.add(150, seed=1)
        bench.run()
        assert [heard.failed for heard in bench.heard if heard.failed] == [frozenset({"r0"})]
        assert not any(heard.invalid for heard in bench.heard)
        assert len(bench.received()) == 1
        assert bench.total("A", "load_failures") == 1


@pytest.mark.parametrize("failing", ["blocks", "request"])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_the_policy_fail_fails_the_request_only(
    failing: str, window: int | None, ranks: int, hosted: bool, overlap: bool
) -> None:
    with Bench(
        [child("A", hosted, hits={"r0": 128}, failing=failing)],
        ranks=ranks,
        async_scheduling=overlap,
        window=window,
        transfer={"kv_load_failure_policy": "fail"},
    ) as bench:
        bench.add(150)
        bench.add(150, seed=1)
        bench.run()
        assert bench.results["r0"].reason.name == "ERROR" and bench.results["r0"].tokens == []
        assert bench.results["r1"].reason.name == "LENGTH"


def test_a_good_load_fills_both_groups(ranks: int, hosted: bool, overlap: bool) -> None:
    with Bench([child("A", hosted, hit=128)], ranks=ranks, async_scheduling=overlap, window=WINDOW) as bench:
        bench.add(150, max_tokens=40)
        bench.run()
        # Blocks before the window have no place in the second group.
        assert 8 < len(bench.child("A").written) < 16


def test_pins_follow_the_window(ranks: int, overlap: bool) -> None:
    """A long decode gives back the blocks that the window has left, although a hosted child saves them."""
    with Bench(
        [child("A", saves=True)], ranks=ranks, async_scheduling=overlap, window=WINDOW, batched_tokens=64
    ) as bench:
        bench.add(200, max_tokens=200)
        bench.until(lambda: len(bench.results["r0"].tokens) > 150)
        assert bench.used_blocks <= 352 // 16 + 1 + WINDOW // 16 + 4
