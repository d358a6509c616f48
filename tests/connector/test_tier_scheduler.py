"""TierConnector on vLLM's real scheduler, alone and under RayKV's MultiConnector: what is saved, asked and loaded."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from raykv.core.idle_pause import IdlePause
from raykv.core.lookups import LookupBook
from raykv.store_messages import Medium
from tests.support import fake_worker
from tests.support.fake_store_link import FakeStore
from tests.support.tier_bench import BENCHES, Benches, TierBench, tier_child

pytestmark = pytest.mark.vllm
WINDOW = 64


@pytest.fixture(params=BENCHES, ids=str)
def bench_of(request: pytest.FixtureRequest) -> Benches:
    return request.param


# -- cold, warm, partial --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batched_tokens", [512, 96])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_cold_prompt_is_saved_and_comes_back(bench_of: Benches, batched_tokens: int, window: int | None) -> None:
    with bench_of(batched_tokens=batched_tokens, window=window) as bench:
        cold = bench.add(307, max_tokens=20)
        bench.run()
        prompt, tokens = bench.results[cold].prompt, bench.results[cold].tokens
        bench.forget_locally()
        bench.store.medium = {0: Medium.DISK}
        warm = bench.add(prompt, max_tokens=20)
        bench.run()
        assert bench.results[warm].tokens == tokens
        assert bench.received() == [(bench.received()[0][0], warm)]
        (load,) = bench.store.loaded
        assert load.indices[0] == tuple(range(19))
        if window is not None:
            assert load.indices[1] == tuple(range(15, 19))  # the window's last ones only
        assert bench.tier_total("tokens_loaded_disk") == 16
        assert bench.tier_total("tokens_loaded_host") == 18 * 16
        assert bench.tier_total("loads") == 1 and bench.tier_total("loads_failed") == 0
        assert bench.tier_total("look_ups") == 2 and bench.tier_total("look_ups_missed") == 1
        # Of the warm request nothing is saved again but the block that it decoded: nobody asked for that one.
        assert sum(len(job.block_ids[0]) for job in bench.store.saved) == 19 + 1 + 1


def test_what_was_decoded_comes_back_too(bench_of: Benches) -> None:
    with bench_of() as bench:
        bench.add(30, max_tokens=80)
        bench.run()
        first = bench.results["r0"]
        bench.forget_locally()
        bench.add(first.prompt + first.tokens + [5, 6, 7])
        bench.run()
        assert bench.store.loaded[0].indices[0] == tuple(range(6))  # 109 computed tokens are 6 whole blocks


def test_a_shorter_and_a_longer_prefix(bench_of: Benches) -> None:
    with bench_of() as bench:
        bench.add(160)
        prompt = bench.results["r0"].prompt
        for tokens in (prompt[:100], [*prompt, *range(10, 90)], prompt[:17], prompt[:16], prompt[:15]):
            bench.forget_locally()
            bench.add(tokens)
            bench.run()
        assert [len(load.indices[0]) for load in bench.store.loaded] == [6, 10, 1]
        # One token of a prompt of 16 must be computed, so it has no block to load, and nobody is asked.
        assert len(bench.store.asked) == 4


def test_a_local_hit_is_not_loaded_again(bench_of: Benches) -> None:
    with bench_of() as bench:
        bench.add(160)
        prompt = bench.results["r0"].prompt
        bench.forget_locally()
        bench.add(prompt[:96])
        bench.run()
        bench.add(prompt)  # 5 or 6 blocks are local, the store has 9 of 10 that may be loaded
        bench.run()
        assert bench.store.loaded[-1].indices[0] == tuple(range(6, 9))
        saves = [block for job in bench.store.saved for block in job.block_ids[0]]
        assert len(saves) == 10 + 1 + 1  # of the other two only the block that each had to compute


def test_a_whole_local_hit_gives_the_lease_back(bench_of: Benches) -> None:
    with bench_of() as bench:
        bench.add(160)
        bench.run()
        bench.add(bench.results["r0"].prompt)
        bench.run()
        assert bench.store.loaded == [] and bench.store.leases == {}


def test_the_same_prompts_in_one_step_are_saved_once(bench_of: Benches) -> None:
    with bench_of() as bench:
        for _ in range(4):
            bench.add(100)
        bench.run()
        assert sum(len(job.block_ids[0]) for job in bench.store.saved) == 6


# -- look-ups -------------------------------------------------------------------------------------------------


def test_a_look_up_that_is_late_is_waited_for(bench_of: Benches) -> None:
    with bench_of() as bench:
        bench.add(160)
        bench.forget_locally()
        bench.store.hold_answers = True
        bench.add(bench.results["r0"].prompt)
        bench.step(6)
        assert bench.status("r1") == "WAITING" and len(bench.store.asked) == 2
        bench.store.hold_answers = False
        bench.run()
        assert len(bench.store.loaded) == 1


def test_a_look_up_that_takes_too_long_is_a_miss(bench_of: Benches) -> None:
    with bench_of(tier=tier_child(lookup_timeout_s=1e-9)) as bench:
        bench.add(160)
        bench.forget_locally()
        bench.store.hold_answers = True
        bench.add(bench.results["r0"].prompt, max_tokens=30)
        bench.until(lambda: bool(bench.results["r1"].tokens))
        assert bench.store.loaded == []
        bench.store.hold_answers = False
        bench.run()
        assert bench.store.leases == {}  # of the late answer
        assert bench.tier_total("look_ups_timed_out") == 1


def test_a_lease_that_waited_long_is_asked_for_again(ranks: int, overlap: bool) -> None:
    with TierBench(ranks=ranks, async_scheduling=overlap, sequences=1, tier=tier_child(lease_s=1e-9)) as bench:
        bench.add(160)
        bench.forget_locally()
        bench.add(60, seed=1, max_tokens=20)
        bench.step(2)
        bench.add(bench.results["r0"].prompt)  # answered at once, and then it waits for its turn
        bench.until(lambda: len(bench.store.asked) > 3)
        assert bench.store.loaded == [] and len(bench.store.leases) <= 1
        bench.tier._look_ups._keep_s = 60.0
        bench.run()
        assert len(bench.store.loaded) == 1


@pytest.mark.parametrize("when", ["asked", "loading"])
def test_an_abort_leaves_nothing(bench_of: Benches, when: str) -> None:
    with bench_of() as bench:
        bench.add(160)
        bench.forget_locally()
        bench.store.hold_answers = when == "asked"
        bench.store.hold_jobs = when == "loading"
        bench.add(bench.results["r0"].prompt)
        if when == "asked":
            bench.step(3)
        elif when == "loading":
            bench.until(lambda: bench.status("r1") == "WAITING_FOR_REMOTE_KVS")
            bench.step(3)
        bench.abort("r1")
        bench.step(3)
        assert bench.status("r1") == ("FINISHED_ABORTED" if when == "loading" else "GONE")
        if when == "loading":
            assert bench.used_blocks >= 9  # vLLM keeps them until the load has ended on all ranks
        bench.store.hold_answers = bench.store.hold_jobs = False
        bench.run()
        assert bench.store.leases == {}


# -- roles, adapters, resets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_roles(bench_of: Benches, role: str) -> None:
    with bench_of(tier=tier_child(role=role)) as bench:
        bench.add(100)
        bench.run()
        assert bool(bench.store.saved) == (role == "kv_producer")
        assert bool(bench.store.asked) == (role == "kv_consumer")


@pytest.mark.parametrize("options", [{"save": "none"}, {"load": False}], ids=str)
def test_a_child_plans_nothing_that_it_is_not_to_do(options: dict[str, Any], ranks: int, overlap: bool) -> None:
    with TierBench([], tier=tier_child(raykv=options), ranks=ranks, async_scheduling=overlap) as bench:
        bench.add(100)
        bench.run()
        assert bool(bench.store.saved) == ("load" in options) and bool(bench.store.asked) == ("save" in options)
        assert bench.tier_total("saves_failed") == 0 and not any(one.aborts for one in bench.store.settled)


def test_a_step_that_runs_nothing_sleeps_once(bench_of: Benches, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: Counter[int] = Counter()

    def before_step(self: IdlePause, idle: bool, awaited: bool, now: float) -> float:
        pauses[bench.steps] += idle
        return 0.0

    monkeypatch.setattr(IdlePause, "before_step", before_step)
    with bench_of() as bench:
        bench.store.hold_jobs = True
        bench.add(160)
        bench.finish("r0")
        bench.step(5)
        assert sum(pauses.values()) >= 4 and max(pauses.values()) == 1


def test_an_adapters_blocks_are_this_engines_own(bench_of: Benches, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM knows an adapter by its name and path: another engine, or this one later, may find other weights there."""
    adapter = LoRARequest("adapter", 1, "/adapter")
    monkeypatch.setattr(fake_worker, "Request", functools.partial(Request, lora_request=adapter))
    store = FakeStore()
    for life in range(2):
        with bench_of(store=store) as bench:
            for turn in range(2):
                bench.add(100)
                bench.forget_locally()
                assert len(store.loaded) == life + turn
        store.asked = []


def test_after_a_reset_nothing_of_before_is_found(bench_of: Benches) -> None:
    with bench_of() as bench:
        bench.add(100)
        bench.forget_locally()
        assert bench.scheduler.reset_connector_cache()
        prompt = bench.results["r0"].prompt
        for loads in (0, 1):
            bench.add(prompt)
            bench.run()
            bench.forget_locally()
            assert len(bench.store.loaded) == loads


@pytest.mark.parametrize("remembered", [False, True])
def test_a_reset_between_the_promise_of_a_load_and_its_blocks(
    bench_of: Benches, remembered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`remembered`: even if vLLM or a MultiConnector keeps to the promise, the request does not wait for ever."""
    if remembered:
        monkeypatch.setattr(LookupBook, "clear", lambda self: None)
    with bench_of() as bench:
        bench.add(160)
        bench.forget_locally()
        manager = bench.scheduler.kv_cache_manager
        allocate, manager.allocate_slots = manager.allocate_slots, lambda *args, **more: None
        bench.add(bench.results["r0"].prompt, max_tokens=20)
        bench.step()
        assert bench.status("r1") == "WAITING" and len(bench.store.leases) == 1
        assert bench.scheduler.reset_connector_cache()
        manager.allocate_slots = allocate
        bench.run()
        kept = remembered and not bench.alone
        assert bench.store.loaded == [] and bench.tier_total("loads_failed") == kept
