"""TierConnector on vLLM's real scheduler: blocks stay while they are read; failures cost no token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_config import child
from tests.support.tier_bench import BENCHES, Benches, TierBench

pytestmark = pytest.mark.vllm
WINDOW = 64
FAILING = [
    pytest.param(failing, benches, id=f"{'+'.join(map(str, failing))}-{benches}")
    for benches in BENCHES
    for failing in ({0}, {1}, {0, 1})
    if max(failing) < benches.ranks
]
"""The ranks on which something fails."""


@pytest.fixture(params=BENCHES, ids=str)
def bench_of(request: pytest.FixtureRequest) -> Benches:
    return request.param


# -- pins -----------------------------------------------------------------------------------------------------


def test_blocks_that_are_saved_stay_until_all_ranks_have_read_them(bench_of: Benches) -> None:
    with bench_of() as bench:
        bench.store.hold_jobs = True
        bench.add(160)
        bench.until(lambda: bench.results["r0"].reason is not None)
        bench.step(3)
        assert bench.used_blocks == 10 and bench.connector.has_pending_push_work()
        assert bench.tier.has_pending_block_frees()
        bench.store.hold_jobs = False
        bench.run()
        assert bench.used_blocks == 0 and len(bench.store.blocks) == 10 * bench.ranks * len(bench.groups)


def test_pins_hold_while_vllm_wants_the_blocks(bench_of: Benches) -> None:
    """More requests than memory, saves that take their time: nobody gets a block that is still read."""
    with bench_of(num_blocks=24, batched_tokens=64) as bench:
        bench.store.hold_jobs = True
        for i in range(6):
            bench.add(150, seed=i, max_tokens=12)
        for _ in range(40):
            bench.step(3)
            bench.store.hold_jobs = not bench.store.hold_jobs
        bench.store.hold_jobs = False
        bench.run()


def test_preempted_requests_come_back_from_the_store(ranks: int, overlap: bool) -> None:
    with TierBench(ranks=ranks, async_scheduling=overlap, num_blocks=20) as bench:
        for i in range(3):
            bench.add(70, seed=i, max_tokens=70)
        preempted: set[str] = set()

        def done() -> bool:
            preempted.update(n for n in bench.unfinished if bench.status(n) == "PREEMPTED")
            return not bench.unfinished

        bench.until(done)
        assert preempted
        assert bench.store.loaded, "nothing came back"


def test_a_window_moves_over_pinned_blocks(bench_of: Benches) -> None:
    with bench_of(window=WINDOW, batched_tokens=64) as bench:
        bench.add(300, max_tokens=100)
        bench.run()
        # Each group has each block of the 399 computed tokens.
        assert sum(len(job.block_ids[1]) for job in bench.store.saved) == 399 // 16


# -- failures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(("failing", "bench_of"), FAILING, indirect=["bench_of"])
def test_a_failed_load_is_recomputed(bench_of: Benches, failing: set[int], window: int | None) -> None:
    with bench_of(window=window) as bench:
        bench.add(160)
        bench.forget_locally()
        bench.store.fail_loads = failing
        bench.add(bench.results["r0"].prompt, max_tokens=20)
        bench.run()
        assert len(bench.store.loaded) == 1, "it must not be tried again"
        assert bench.tier_total("loads_failed") == 1 and bench.tier_total("tokens_loaded_host") == 0
        assert len(bench.received()) == 1
        assert not any(heard.invalid for heard in bench.heard)


def test_what_failed_once_is_not_hit_again_after_a_preemption(bench_of: Benches) -> None:
    with bench_of() as bench:
        bench.add(160)
        bench.forget_locally()
        bench.store.fail_loads = {0}
        bench.add(bench.results["r0"].prompt, max_tokens=20)
        bench.until(lambda: bool(bench.results["r1"].tokens))
        request, asked = bench.scheduler.requests["r1"], len(bench.store.asked)
        request.num_preemptions += 1
        assert bench.tier.get_num_new_matched_tokens(request, 0) == (0, False)
        request.num_preemptions -= 1
        assert len(bench.store.asked) == asked


def test_blocks_that_a_window_has_left_are_not_saved(bench_of: Benches) -> None:
    """A local hit whose prefix the store has lost: the window's group has null blocks in front."""
    with bench_of(window=WINDOW) as bench:
        bench.add(160)
        bench.run()
        bench.store.die(forget=True)
        bench.add(bench.results["r0"].prompt)
        bench.run()
        again = bench.store.saved[-1]
        assert 0 < len(again.block_ids[1]) < len(again.block_ids[0]) == 10


def test_the_policy_fail_fails_the_request(bench_of: Benches) -> None:
    with bench_of(transfer={"kv_load_failure_policy": "fail"}) as bench:
        bench.add(160)
        bench.forget_locally()
        bench.store.fail_loads = {0}
        bench.add(bench.results["r0"].prompt)
        bench.run()
        assert bench.results["r1"].reason.name == "ERROR"


@pytest.mark.parametrize(("failing", "bench_of"), FAILING, indirect=["bench_of"])
def test_a_save_that_failed_on_a_rank_is_never_seen(bench_of: Benches, failing: set[int]) -> None:
    with bench_of() as bench:
        bench.store.fail_saves = failing
        bench.add(160)
        bench.forget_locally()
        assert bench.store.blocks == {} and bench.tier_total("saves_failed") >= 1
        bench.store.fail_saves = set()
        bench.add(bench.results["r0"].prompt)
        bench.run()
        assert bench.store.loaded == [] and bench.store.blocks


@pytest.mark.parametrize("away", [False, True])
def test_the_store_dies_in_a_load(bench_of: Benches, away: bool) -> None:
    with bench_of() as bench:
        bench.add(160)
        bench.forget_locally()
        bench.store.hold_jobs = True
        bench.add(bench.results["r0"].prompt, max_tokens=10)
        bench.until(lambda: bench.status("r1") == "WAITING_FOR_REMOTE_KVS")
        bench.step(2)
        bench.store.die(away=away)
        bench.store.hold_jobs = False
        bench.run()
        assert bench.tier_total("loads_failed") == 1
        bench.store.away = False
        bench.forget_locally()
        bench.add(bench.results["r0"].prompt)
        bench.run()
        assert len(bench.store.loaded) == 2


@pytest.mark.parametrize("away", [False, True])
def test_the_store_dies_in_a_save(bench_of: Benches, away: bool) -> None:
    with bench_of() as bench:
        bench.store.hold_jobs = True
        bench.add(160, max_tokens=30)
        bench.step(4)
        bench.store.die(away=away)
        bench.store.hold_jobs = False
        bench.run()
        assert bench.used_blocks == 0
        bench.store.away = False


def test_a_lease_of_an_older_life_is_not_used(bench_of: Benches) -> None:
    """The store dies between its answer and the load; the next life may have a lease of the same number."""
    with bench_of() as bench:
        bench.add(160)
        bench.forget_locally()
        prompt = bench.results["r0"].prompt
        inner = bench.connector.update_state_after_alloc

        def dies(request: Any, blocks: Any, tokens: int) -> None:
            inner(request, blocks, tokens)
            if tokens:
                bench.store.die()
                bench.store.leases = {one: [b"other content" * 2 + b"123456"] * 9 for one in range(100)}

        bench.connector.update_state_after_alloc = dies
        bench.add(prompt)
        bench.run()
        assert bench.store.loaded == [] and bench.tier_total("loads_failed") == 1
        bench.store.leases = {}


# -- beside another child -------------------------------------------------------------------------------------

SYNC = {"hits": {"r0": 64}, "asynchronous": False}


@pytest.mark.parametrize("failing", ["blocks", ""])
@pytest.mark.parametrize("first", [False, True])
def test_nothing_is_saved_of_a_step_whose_synchronous_load_failed(hosted: bool, failing: str, first: bool) -> None:
    with TierBench([child("A", hosted, **SYNC, failing=failing)], first=first) as bench:
        bench.add(100, max_tokens=30)
        bench.run()
        saved = bench.tier_total("saves_failed")
        assert saved == (1 if failing else 0)
        bench.forget_locally()
        bench.add(bench.results["r0"].prompt)
        bench.run()


@pytest.mark.parametrize("first", [False, True])
def test_what_another_child_loads_is_saved_here(ranks: int, overlap: bool, hosted: bool, first: bool) -> None:
    with TierBench([child("A", hosted, hits={"r0": 64})], first=first, ranks=ranks, async_scheduling=overlap) as bench:
        bench.add(100)
        bench.run()
        assert bench.child("A").written
        bench.forget_locally()
        bench.add(bench.results["r0"].prompt)
        bench.run()
        assert bench.store.loaded[0].indices[0] == tuple(range(6))
