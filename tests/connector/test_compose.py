"""Scenario 9: several children load one request's prefix, each a range of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tests.support import fake_ranges
from tests.support.fake_config import child
from tests.support.fake_ranges import pulling, ranged
from tests.support.fake_worker import Bench
from tests.support.tier_bench import TierBench

pytestmark = pytest.mark.vllm

COMPOSE = {"load_policy": "compose"}
LAST: list[Callable[..., dict[str, Any]]] = [ranged, child, pulling]
"""Kinds of child that may be the last contributor: it loads any range, or to its own end only."""


def bench_of(children: Sequence[dict[str, Any]], ranks: int = 1, overlap: bool = False, **more: Any) -> Bench:
    return Bench(children, ranks=ranks, async_scheduling=overlap, raykv=COMPOSE, **more)


def by_hand(hosted: bool = True, last: Callable[..., dict[str, Any]] = ranged, **b: Any) -> list[dict[str, Any]]:
    """A has 100 tokens, B 512; their loads end when a test says so."""
    return [ranged("A", hosted, hit=100, auto=False), last("B", hosted, hit=512, auto=False, **b)]


def told(bench: Bench, name: str) -> list[int]:
    """The tokens that the child was told to load, in order."""
    return [tokens for _, tokens in bench.child(name).allocated if tokens]


# -- who loads what -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", LAST)
def test_scenario_9(last: Callable[..., dict[str, Any]], ranks: int, hosted: bool, overlap: bool) -> None:
    with bench_of([ranged("A", hosted, hit=100), last("B", hosted, hit=512)], ranks, overlap) as bench:
        bench.add(600)
        bench.run()
        a, b = bench.child("A"), bench.child("B")
        assert (told(bench, "A"), told(bench, "B")) == ([96], [416])
        assert (a.asked["r0"], b.asked["r0"]) == (1, 1)
        blocks = [block for _, block in (*a.written, *b.written)]
        assert (len(a.written), len(blocks), len(set(blocks))) == (6, 32, 32), "no gap, no overlap"
        assert len(bench.received()) == 1, "one resume"
        assert (bench.total("A", "tokens_loaded"), bench.total("B", "tokens_loaded")) == (96, 416)
        assert (bench.total("A", "loads"), bench.total("B", "loads")) == (1, 1)


def test_each_order_names_the_blocks_of_its_range(hosted: bool) -> None:
    """By these a host tells which load a block id that failed belongs to."""
    with bench_of([ranged("A", hosted, hit=100), child("B", hosted, hit=512)]) as bench:
        take, orders = bench.half.loads.take_step, {}

        def spied() -> Any:
            step = take()
            orders.update({bench.names[index]: found for index, found in step.orders.items()})
            return step

        bench.half.loads.take_step = spied
        bench.add(600)
        bench.run()
        for name in "AB":
            (order,) = orders[name]
            assert list(order.blocks) == [block for _, block in bench.child(name).written]


def test_a_child_that_takes_blocks_without_a_hash_sees_its_own(hosted: bool) -> None:
    with bench_of([ranged("A", hosted, hit=100), pulling("B", hosted, hit=512)]) as bench:
        bench.add(48, max_tokens=1, name="before")  # A has 100, so nothing of it is B's
        bench.run()
        bench.add(600)
        bench.run()
        assert bench.child("A").allocated[-2:] == [("r1", 48), ("r1", 0)], "48 tokens are in vLLM's own cache"
        mine = [block for request, block in bench.child("B").written if request == "r1"]
        assert len(mine) == 26 and fake_ranges.seen[("B", "r1")][: len(mine)] == mine
        hashed = [block for request, block in bench.child("A").written if request == "r1"]
        assert not set(hashed) & set(fake_ranges.seen[("B", "r1")])
        assert all(block.block_hash != b"raykv: loaded by another child" for block in bench.pool.blocks)


def test_a_child_without_a_part_sees_the_real_blocks_and_no_load(hosted: bool) -> None:
    children = [ranged("A", hosted, hit=100), ranged("B", hosted, hit=512), pulling("C", hosted, hit=512)]
    with bench_of(children) as bench:
        bench.add(600)
        bench.run()
        assert told(bench, "C") == [] and ("r0", 0) in bench.child("C").allocated
        assert bench.child("C").written == []


def test_a_late_look_up_is_asked_once_more_with_the_end_of_the_range_before(hosted: bool, overlap: bool) -> None:
    children = [ranged("A", hosted, hit=100, pending=3), child("B", hosted, hit=512)]
    with bench_of(children, overlap=overlap) as bench:
        bench.add(600)
        bench.run()
        assert (told(bench, "A"), told(bench, "B")) == ([96], [416])
        assert (bench.child("A").asked["r0"], bench.child("B").asked["r0"]) == (4, 2)


def test_a_synchronous_child_loads_alone_if_it_is_longer(hosted: bool) -> None:
    children = [ranged("A", hosted, hit=100), child("S", hosted, hit=512, asynchronous=False)]
    with bench_of(children) as bench:
        bench.add(600)
        bench.run()
        assert (told(bench, "A"), told(bench, "S")) == ([], [512])
        assert len(bench.child("S").written) == 32
        bench.child("S").hit = 96
        bench.add(600, seed=1)
        bench.run()
        assert (told(bench, "A"), told(bench, "S")) == ([96], [512])


@pytest.mark.parametrize(
    ("given", "a", "b"), [(160, [96], [64]), (96, [96], []), (48, [48], []), (0, [], []), (100, [96], [4])]
)
def test_vllm_may_give_fewer_tokens(given: int, a: list[int], b: list[int], hosted: bool, overlap: bool) -> None:
    with bench_of([ranged("A", hosted, hit=100), child("B", hosted, hit=512)], overlap=overlap) as bench:
        ask = bench.connector.get_num_new_matched_tokens

        def trimmed(request: Any, computed: int) -> tuple[int | None, bool]:
            tokens, is_async = ask(request, computed)
            assert tokens == 512 - computed
            return given, is_async and given > 0

        bench.connector.get_num_new_matched_tokens = trimmed
        bench.add(600)
        bench.run()
        assert (told(bench, "A"), told(bench, "B")) == (a, b)
        assert len(bench.child("B").written) == -(-sum(b) // 16)
        assert len(bench.received()) == (given > 0)


def test_where_the_tokens_came_from(hosted: bool) -> None:
    with bench_of([ranged("A", hosted, hit=100), child("B", hosted, hit=512)]) as bench:
        ask, sources, groups = bench.connector.get_external_cache_hit_sources, [], []
        bench.connector.get_external_cache_hit_sources = lambda *args: sources.append(ask(*args)) or sources[-1]
        fill = bench.connector.get_loaded_kv_cache_group_ids
        bench.connector.get_loaded_kv_cache_group_ids = lambda *args: groups.append(fill(*args)) or groups[-1]
        bench.add(600)
        bench.run()
        assert sources == [{CacheHitSource.HOST: 96, CacheHitSource.EXTERNAL_UNSPECIFIED: 416}]
        assert groups == [(0,)]


@pytest.mark.parametrize("partial", "AB")
def test_groups_that_not_all_fill_are_zeroed(partial: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fake_ranges.groups, partial, (0,))
    with bench_of([ranged("A", hit=100), ranged("B", hit=512)], window=64) as bench:
        fill, groups = bench.connector.get_loaded_kv_cache_group_ids, []
        bench.connector.get_loaded_kv_cache_group_ids = lambda *args: groups.append(fill(*args)) or groups[-1]
        bench.add(300)
        bench.run()
        assert (told(bench, "A"), told(bench, "B")) == ([96], [192])
        assert groups == [(0,)]


# -- how it ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["AB", "BA"])
def test_vllm_hears_of_it_after_the_last_rank_of_the_last_child(
    order: str, ranks: int, hosted: bool, overlap: bool
) -> None:
    with bench_of(by_hand(hosted), ranks, overlap) as bench:
        bench.add(600)
        bench.wait_for_kv("r0")
        for name in order:
            for rank in range(ranks):
                assert bench.received() == []
                bench.child(name).report("recv", "r0", [rank])
                bench.step(4)
        assert len(bench.received()) == 1
        bench.child("A").report("recv", "r0")
        bench.finish("r0")
        assert len(bench.received()) == 1


@pytest.mark.parametrize("first", [True, False])
def test_a_failed_first_part_fails_the_load_after_the_other_has_ended(
    first: bool, ranks: int, hosted: bool, overlap: bool
) -> None:
    """B can't stand in: it loads to its own end only. So it is asked for all of it."""
    # vLLM keeps free what a request whose load failed needs, and asks for another load only beside that.
    with bench_of(by_hand(hosted, child), ranks, overlap, num_blocks=128) as bench:
        bench.add(600)
        bench.wait_for_kv("r0")
        fail(bench, "A", "B", first)
        assert [heard.failed for heard in bench.heard if heard.failed] == [{"r0"}]
        assert len(bench.received()) == 1
        bench.until(lambda: told(bench, "B")[1:] == [512], "the other child to load alone")
        bench.step(4)
        bench.child("B").report("recv", "r0")
        bench.finish("r0")
        assert len(told(bench, "A")) == 1, "what has failed is not asked again"
        assert bench.total("A", "load_failures") == 1 and bench.total("B", "load_failures") == 0
        assert (bench.total("A", "tokens_loaded"), bench.total("B", "tokens_loaded")) == (0, 512)


def fail(bench: Bench, failing: str, other: str, first: bool = True) -> None:
    """The parts of r0's load end, one of them badly."""
    reports = [(failing, "recv_failed"), (other, "recv")]
    for name, kind in reports if first else reports[::-1]:
        assert bench.status("r0") == "WAITING_FOR_REMOTE_KVS" and bench.used_blocks == 32
        bench.child(name).report(kind, "r0")
        bench.step(6)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_what_lies_in_front_of_a_failed_part_is_kept(
    first: bool, policy: str, ranks: int, hosted: bool, overlap: bool
) -> None:
    transfer = {"kv_load_failure_policy": policy}
    with bench_of(by_hand(hosted, child), ranks, overlap, transfer=transfer, num_blocks=128) as bench:
        bench.add(600)
        bench.wait_for_kv("r0")
        fail(bench, "B", "A", first)
        bench.finish("r0")
        assert [len(heard.invalid) for heard in bench.heard if heard.invalid] == [26]
        assert len(bench.received()) == 1 and not any(heard.failed for heard in bench.heard)
        assert (told(bench, "A"), told(bench, "B")) == ([96], [416])
        assert (bench.total("A", "tokens_loaded"), bench.total("B", "tokens_loaded")) == (96, 0)
        assert (bench.results["r0"].reason.name == "ERROR") == (policy == "fail")
        assert bench.runner.corrupt == []


def test_nothing_is_kept_with_several_kv_groups(ranks: int, hosted: bool) -> None:
    """Their block ids are ambiguous, so all of the load has failed."""
    with bench_of(by_hand(hosted, child), ranks, window=64, num_blocks=256) as bench:
        bench.child("A").auto = bench.child("B").auto = True
        bench.child("B").failing = "request"
        bench.add(600)
        bench.run()
        assert not any(heard.invalid for heard in bench.heard)
        assert [heard.failed for heard in bench.heard if heard.failed] == [{"r0"}]
        assert told(bench, "A") == [96, 96]


# -- somebody else has what failed ----------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("pending", [0, 3])
def test_another_contributor_stands_in(first: bool, pending: int, ranks: int, hosted: bool, overlap: bool) -> None:
    with bench_of(by_hand(hosted), ranks, overlap) as bench:
        bench.add(600)
        bench.wait_for_kv("r0")
        bench.child("B").pending = pending
        bench.child("B").asked.clear()
        fail(bench, "A", "B", first)
        bench.until(lambda: told(bench, "B") == [416, 96], "B to load the part of A")
        bench.step(6)
        assert bench.status("r0") == "WAITING_FOR_REMOTE_KVS" and bench.heard == []
        bench.child("B").report("recv", "r0")
        bench.finish("r0")
        assert len(bench.received()) == 1 and not any(heard.failed or heard.invalid for heard in bench.heard)
        blocks = [block for _, block in bench.child("B").written]
        assert len(blocks) == len(set(blocks)) == 32
        assert (bench.total("A", "tokens_loaded"), bench.total("B", "tokens_loaded")) == (0, 512)


def three(hosted: bool, c: int) -> list[dict[str, Any]]:
    return [*by_hand(hosted, child), ranged("C", hosted, hit=c, auto=False)]


@pytest.mark.parametrize("failing", "AB")
def test_a_child_without_a_part_stands_in(failing: str, ranks: int, hosted: bool, overlap: bool) -> None:
    with bench_of(three(hosted, 512), ranks, overlap) as bench:
        bench.add(600)
        bench.wait_for_kv("r0")
        assert told(bench, "C") == []
        fail(bench, failing, "B" if failing == "A" else "A")
        missing = 96 if failing == "A" else 416
        bench.until(lambda: told(bench, "C") == [missing], "C to load the part")
        bench.step(4)
        bench.child("C").report("recv", "r0")
        bench.finish("r0")
        assert len(bench.received()) == 1 and not any(heard.failed or heard.invalid for heard in bench.heard)
        assert sum(bench.total(name, "tokens_loaded") for name in "ABC") == 512


@pytest.mark.parametrize(("c", "asked"), [(300, True), (512, False)])
def test_who_has_not_all_of_the_part_or_is_not_to_be_asked_does_not_stand_in(
    c: int, asked: bool, hosted: bool, overlap: bool
) -> None:
    with bench_of(three(hosted, c), overlap=overlap) as bench:
        bench.add(600)
        bench.wait_for_kv("r0")
        if not asked:
            one = bench.half.children[2]
            one.mark_down() if hosted else one.distrust()  # an inline one can't be down, only off
        fail(bench, "B", "A")
        bench.finish("r0")
        assert told(bench, "C") == [] and [len(heard.invalid) for heard in bench.heard if heard.invalid] == [26]
        assert bench.child("C").allocated[-1] == ("r0", 0)


def test_a_stand_in_that_never_answers_is_not_waited_for(hosted: bool, overlap: bool) -> None:
    with bench_of(three(hosted, 512), overlap=overlap) as bench:
        bench.add(600)
        bench.wait_for_kv("r0")
        bench.child("C").pending = -1
        bench.half.loads.retries._limits = [1e-9] * 3
        fail(bench, "B", "A")
        bench.finish("r0")
        assert told(bench, "C") == [] and [len(heard.invalid) for heard in bench.heard if heard.invalid] == [26]


def test_a_stand_in_that_fails_too(ranks: int, hosted: bool, overlap: bool) -> None:
    with bench_of(three(hosted, 512), ranks, overlap, num_blocks=128) as bench:
        bench.add(600)
        bench.wait_for_kv("r0")
        fail(bench, "B", "A")
        bench.until(lambda: told(bench, "C") == [416], "C to load the part")
        bench.step(4)
        bench.child("C").report("recv_failed", "r0")
        bench.finish("r0")
        assert [len(heard.invalid) for heard in bench.heard if heard.invalid] == [26]
        assert (bench.total("A", "tokens_loaded"), bench.total("C", "tokens_loaded")) == (96, 0)
        assert bench.total("B", "load_failures") == bench.total("C", "load_failures") == 1


@pytest.mark.parametrize("when", ["asked", "loading"])
def test_an_abort_while_somebody_stands_in(when: str, ranks: int, hosted: bool, overlap: bool) -> None:
    with bench_of(three(hosted, 512), ranks, overlap) as bench:
        bench.add(600)
        bench.wait_for_kv("r0")
        bench.child("C").pending = -1 if when == "asked" else 0
        fail(bench, "B", "A")
        if when == "loading":
            bench.until(lambda: told(bench, "C") == [416], "C to load the part")
            bench.step(4)
        bench.abort("r0")
        bench.step(6)
        if when == "loading":
            assert bench.used_blocks == 32, "C still writes"
            bench.child("C").report("recv", "r0")
        bench.run()
        assert bench.used_blocks == 0 and len(bench.received()) == 1


@pytest.mark.parametrize("dies", "AB")
def test_the_death_of_one_host_waits_for_the_other_childs_load(dies: str, ranks: int, overlap: bool) -> None:
    with bench_of(by_hand(), ranks, overlap) as bench:
        bench.add(600)
        bench.wait_for_kv("r0")
        bench.host(dies, ranks - 1).die()
        bench.until(lambda: bench.total(dies, "restarts") >= 1, "the death to be seen")
        for rank in range(ranks - 1):
            bench.child(dies).report("recv", "r0", [rank])
        bench.step(6)
        assert bench.status("r0") == "WAITING_FOR_REMOTE_KVS" and bench.received() == []
        other = bench.child("B" if dies == "A" else "A")
        other.report("recv", "r0")
        if dies == "A":  # then B has its part too, and stands in
            bench.until(lambda: told(bench, "B") == [416, 96], "B to load the part of A")
            bench.step(4)
            other.report("recv", "r0")
        bench.until(lambda: len(bench.received()) == 1, "the end of the load")
        assert [len(heard.invalid) for heard in bench.heard if heard.invalid] == ([] if dies == "A" else [26])
        other.auto = True
        bench.finish("r0")


@pytest.mark.parametrize("order", ["AB", "BA"])
def test_an_aborted_request_keeps_its_blocks_until_both_have_ended(
    order: str, ranks: int, hosted: bool, overlap: bool
) -> None:
    with bench_of(by_hand(hosted), ranks, overlap) as bench:
        bench.add(600)
        bench.wait_for_kv("r0")
        bench.abort("r0")
        for name in order:
            bench.step(4)
            assert bench.used_blocks == 32
            bench.child(name).report("recv", "r0")
        bench.run()
        assert bench.used_blocks == 0 and len(bench.received()) == 1


# -- with RayKV's own tiers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [child, pulling])
def test_a_tier_and_another_child(last: Callable[..., dict[str, Any]], ranks: int, hosted: bool, overlap: bool) -> None:
    options = {"ranks": ranks, "async_scheduling": overlap, "raykv": COMPOSE}
    with TierBench([last("B", hosted)], first=True, **options) as bench:
        prompt = bench.results[bench.add(100, max_tokens=1)].prompt
        bench.forget_locally()
        bench.child("B").hit = 512
        bench.add(prompt + list(range(3, 480)), name="long")
        bench.run()
        assert bench.store.loaded[-1].indices[0] == tuple(range(6))
        assert told(bench, "B") == [416]
        assert bench.tier_total("tokens_loaded_host") == 96
        assert (bench.total("tier", "tokens_loaded"), bench.total("B", "tokens_loaded")) == (96, 416)
        bench.child("B").hit = 0
        bench.forget_locally()
        bench.add(prompt + list(range(3, 480)), name="again")
        bench.run()
        assert len(bench.store.loaded[-1].indices[0]) == 36, "what B brought was saved in the tier"


def test_a_tier_goes_on_where_another_tier_ends() -> None:
    with TierBench([ranged("A", hit=100)], raykv=COMPOSE) as bench:
        bench.child("A").hit = 0
        prompt = bench.results[bench.add(300, max_tokens=1)].prompt
        bench.forget_locally()
        bench.child("A").hit = 100
        bench.add(prompt, name="again")
        bench.run()
        assert told(bench, "A") == [96]
        assert bench.store.loaded[-1].indices[0] == tuple(range(6, 18))


@pytest.mark.parametrize("failing", ["tier", "B"])
def test_a_load_of_a_tier_and_another_child_fails(failing: str, ranks: int, hosted: bool, overlap: bool) -> None:
    options = {"ranks": ranks, "async_scheduling": overlap, "raykv": COMPOSE, "num_blocks": 128}
    with TierBench([child("B", hosted)], first=True, **options) as bench:
        prompt = bench.results[bench.add(100, max_tokens=1)].prompt
        bench.forget_locally()
        bench.child("B").hit = 512
        if failing == "tier":
            bench.store.fail_loads = {ranks - 1}
        else:
            bench.child("B").failing = "request"
        bench.add(prompt + list(range(3, 480)), name="long")
        bench.run()
        assert [heard.failed for heard in bench.heard if heard.failed] == ([{"long"}] if failing == "tier" else [])
        assert [len(heard.invalid) for heard in bench.heard if heard.invalid] == ([] if failing == "tier" else [26])
        assert told(bench, "B") == ([416, 512] if failing == "tier" else [416])
        assert bench.total(failing, "load_failures") == 1
        assert bench.total("tier", "tokens_loaded") == (0 if failing == "tier" else 96)


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("late", [False, True])
def test_a_tier_stands_in(window: int | None, late: bool, ranks: int, hosted: bool, overlap: bool) -> None:
    options = {"ranks": ranks, "async_scheduling": overlap, "raykv": COMPOSE, "window": window}
    with TierBench([ranged("A", hosted, hit=0)], num_blocks=256, **options) as bench:
        prompt = bench.results[bench.add(300, max_tokens=1)].prompt
        bench.forget_locally()
        bench.child("A").hit, bench.child("A").auto = 100, False
        bench.add(prompt, name="again")
        bench.wait_for_kv("again")
        bench.store.hold_answers = late
        bench.child("A").report("recv_failed", "again")
        bench.step(8)
        assert bench.status("again") == "WAITING_FOR_REMOTE_KVS" or not late
        bench.store.hold_answers = False
        bench.run()
        assert [load.indices[0] for load in bench.store.loaded] == [tuple(range(6, 18)), tuple(range(6))]
        assert not any(heard.failed or heard.invalid for heard in bench.heard) and len(bench.received()) == 1
        assert (bench.total("A", "tokens_loaded"), bench.total("tier", "tokens_loaded")) == (0, 288)
