"""Synchronous loads that fail: the request is recomputed, and what the step computed on garbage is saved nowhere."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_config import child
from tests.support.fake_worker import Bench

pytestmark = pytest.mark.vllm

SYNC: dict[str, Any] = {"asynchronous": False, "hits": {"r0": 64}}


def where(hosted: bool) -> str:
    return "hosted" if hosted else "inline"


@pytest.mark.parametrize(
    ("failing_ranks", "ranks"),
    [(None, 1), (None, 2), ((0,), 2), ((1,), 2)],
    ids=["all-of-1", "all-of-2", "0-of-2", "1-of-2"],
)
@pytest.mark.parametrize("saver", [True, False], ids=["saver-hosted", "saver-inline"])
@pytest.mark.parametrize("order", ["AB", "BA"])
def test_nothing_is_saved_of_a_step_on_garbage(
    failing_ranks: tuple[int, ...] | None, saver: bool, order: str, ranks: int, hosted: bool
) -> None:
    """A fails; B saves. What is in B's store afterwards is right, in whole or not at all."""
    refused = ranks > 1 and not saver
    made = {
        "A": child("A", hosted, **SYNC, failing="blocks", failing_ranks=failing_ranks),
        "B": child("B", saver, saves=True, search=True),
    }
    with Bench([made[name] for name in order], ranks=ranks) as bench:
        bench.add(100)
        bench.run()
        if refused:
            # An inline saver of another rank can't be told in time, so the hit is not used.
            assert bench.child("A").written == [] and bench.total("A", "sync_loads_refused") == 1
        else:
            assert [heard.invalid for heard in bench.heard if heard.invalid]
            assert bench.child("A").allocated[0] == ("r0", 64)
            assert bench.total("A", "load_failures") == 1
        bench.scheduler.reset_prefix_cache()
        bench.add(bench.results["r0"].prompt)
        bench.run()


def test_the_policy_fail_fails_the_request_only(ranks: int, hosted: bool) -> None:
    with Bench(
        [child("A", hosted, **SYNC, failing="blocks")], ranks=ranks, transfer={"kv_load_failure_policy": "fail"}
    ) as bench:
        bench.add(100)
        bench.add(100, seed=1)
        bench.run()
        assert bench.results["r0"].reason.name == "ERROR"
        assert bench.results["r1"].reason.name == "LENGTH"


@pytest.mark.parametrize("hook", ["update_state_after_alloc", "build_connector_meta"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_load_whose_plan_raised_fails(hook: str, asynchronous: bool, ranks: int, hosted: bool) -> None:
    """The scheduler half of A raises while the load is planned: nothing of its step may run."""
    script = {"hits": {"r0": 64}, "asynchronous": asynchronous}
    with Bench([child("A", hosted, **script), child("B", saves=True)], ranks=ranks) as bench:
        bench.add(30, "before")
        bench.run()
        bench.child("A").raises[hook] = 1
        bench.add(100, "r0", seed=1)
        bench.run()
        assert bench.child("A").written == []
        assert bench.total("A", "load_failures") == 1


def test_a_host_that_dies_in_a_synchronous_load(ranks: int) -> None:
    with Bench([child("A", **SYNC, hangs=["copy"], raykv={"timeout_s": 0.05})], ranks=ranks) as bench:
        bench.add(100)
        bench.finish("r0")
        bench.child("A").hangs = set()
        assert bench.total("A", "restarts") == ranks


@pytest.mark.parametrize("together", [False, True], ids=["later", "same-step"])
def test_nobody_finds_what_a_failed_load_left_behind(together: bool, ranks: int, hosted: bool) -> None:
    """The request is aborted before it could compute its blocks again; another one has the same prompt.

    vLLM hashes the blocks when it plans the load and leaves them in its prefix cache when the load fails.
    """
    with Bench([child("A", hosted, **SYNC, failing="blocks")], ranks=ranks) as bench:
        bench.add(100)
        prompt = bench.results["r0"].prompt
        if together:
            bench.add(prompt)
        bench.until(lambda: any(heard.invalid for heard in bench.heard), "the failed load")
        bench.abort("r0")
        bench.add(prompt)
        bench.run()
        assert bench.results["r0"].tokens == []


def test_what_was_loaded_well_is_shared(ranks: int, hosted: bool) -> None:
    with Bench([child("A", hosted, **SYNC)], ranks=ranks) as bench:
        bench.add(100)
        bench.add(bench.results["r0"].prompt)
        bench.run()
        assert bench.child("A").allocated == [("r0", 64), ("r1", 0)]


# -- overlapping steps ----------------------------------------------------------------------------------------


def test_hits_of_a_synchronous_child_are_not_used_with_overlapping_steps(
    ranks: int, hosted: bool, raykv_log: list[str]
) -> None:
    with Bench([child("A", hosted, **SYNC)], ranks=ranks, async_scheduling=True) as bench:
        bench.add(100)
        bench.run()
        assert bench.child("A").written == []
        assert bench.total("A", "sync_loads_refused") == 1
        assert sum("hits of child A are not used" in line for line in raykv_log) == 1


@pytest.mark.parametrize("hosted", [True])
def test_hits_of_a_synchronous_child_are_not_used_with_several_groups(hosted: bool) -> None:
    with Bench([child("A", hosted, **SYNC)], window=32) as bench:
        bench.add(100)
        bench.run()
        assert bench.child("A").written == []
        assert bench.total("A", "sync_loads_refused") == 1


def test_why_synchronous_loads_are_refused_with_overlapping_steps() -> None:
    """What vLLM 0.32 does when the refusal is switched off: it keeps a token of a pass over garbage.

    Step S loads and fails. When its output is processed, step S+1 is already planned, from the token that S would
    have sampled, and on the same blocks. vLLM drops S's token and rewinds the request, but takes S+1's token as a
    good one. Only RayKV knows that S+1 is worthless too, and no hook lets it say so: hence `sync_refusal`.
    """
    with pytest.raises(AssertionError) as caught:  # noqa: SIM117 - the end of the bench checks the tokens
        with Bench([child("A", **SYNC, failing="blocks")], async_scheduling=True) as bench:
            bench.half.loads.sync_refusals = [None]
            bench.add(100, max_tokens=8)
            bench.run()
    assert "wrong tokens" in str(caught.value), caught.value
