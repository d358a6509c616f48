"""Scenarios 5 to 8: who loads a request's prefix, and that nobody else writes it."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from tests.support.fake_config import child
from tests.support.fake_model import chain
from tests.support.fake_worker import Bench

pytestmark = pytest.mark.vllm

REMOTE = {"do_remote_prefill": True, "remote_block_ids": [1, 2], "remote_engine_id": "p"}


def stored_blocks(bench: Bench, name: str, tokens: list[int]) -> int:
    """How many leading blocks of these tokens the child has, of all layers and ranks."""
    values, store = chain(tokens), bench.child(name).store
    ends = range(bench.block_size, len(tokens) + 1, bench.block_size)
    whole = [
        all((rank, layer, values[end - 1]) in store for rank in range(bench.ranks) for layer in bench.runner.layers)
        for end in ends
    ]
    return whole.index(False) if False in whole else len(whole)


# -- scenario 5: a cold request -------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(["transfer", "offload"])), ids=" ".join)
@pytest.mark.parametrize("batched_tokens", [512, 96])
@pytest.mark.parametrize(
    ("asynchronous", "overlap"),
    [(True, False), (True, True), (False, False)],  # the fourth is refused: see test_sync_loads.py
)
def test_a_cold_request_is_offloaded_and_found_again(
    order: tuple[str, ...], batched_tokens: int, asynchronous: bool, ranks: int, hosted: bool, overlap: bool
) -> None:
    scripts: dict[str, Any] = {
        "transfer": {"pd": True, "raykv": {"save": "none"}},
        "offload": {"search": True, "saves": True, "asynchronous": asynchronous},
    }
    with Bench(
        [child(name, hosted, **scripts[name]) for name in order],
        ranks=ranks,
        async_scheduling=overlap,
        batched_tokens=batched_tokens,
    ) as bench:
        cold = bench.add(307)
        bench.run()
        prompt = bench.results[cold].prompt
        assert stored_blocks(bench, "offload", prompt) == 307 // 16
        assert bench.scheduler.reset_prefix_cache(), "blocks are still pinned"
        warm = bench.add(prompt)
        bench.run()
        assert (warm, 304) in bench.child("offload").allocated
        assert bench.results[warm].tokens == bench.results[cold].tokens
        assert bench.total("offload", "tokens_loaded") == 304
        assert bench.child("transfer").written == []


@pytest.mark.parametrize("save", ["all", "none"])
def test_a_child_that_is_not_loaded_from_still_saves(save: str, ranks: int, hosted: bool, overlap: bool) -> None:
    options = {"load": False, "save": save}
    with Bench([child("A", hosted, hit=64, saves=True, raykv=options)], ranks=ranks, async_scheduling=overlap) as bench:
        name = bench.add(100)
        bench.run()
        assert bench.child("A").allocated == [(name, 0)]
        assert stored_blocks(bench, "A", bench.results[name].prompt) == (6 if save == "all" else 0)


# -- scenario 6: the loser must not write ---------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(["tier", "pd"])), ids=" ".join)
@pytest.mark.parametrize("prompt", [65, 100, 64])
def test_each_block_has_one_writer(
    order: tuple[str, ...], prompt: int, ranks: int, hosted: bool, overlap: bool
) -> None:
    scripts: dict[str, Any] = {"tier": {"hit": 64}, "pd": {"pd": True}}
    with Bench(
        [child(name, hosted, **scripts[name]) for name in order], ranks=ranks, async_scheduling=overlap
    ) as bench:
        bench.add(prompt, params=dict(REMOTE))
        bench.run()
        winner, loser = order
        assert bench.child(loser).written == []
        assert ("r0", 0) in bench.child(loser).allocated
        writers = Counter(block for _, block in bench.child(winner).written)
        assert writers and set(writers.values()) == {1}
        assert len(bench.received()) == 1


# -- scenario 7: the P/D child that was not needed frees the other side ---------------------------------------


@pytest.mark.parametrize("where", ["tier", "prefix cache"])
def test_the_pd_child_tells_the_other_side_at_once(where: str, ranks: int, hosted: bool, overlap: bool) -> None:
    with Bench(
        [child("tier", hosted, hit=1000), child("pd", hosted, pd=True)], ranks=ranks, async_scheduling=overlap
    ) as bench:
        if where == "prefix cache":
            bench.child("tier").hit = 0
            bench.add(65)
            bench.run()
        request = bench.add(65, params=dict(REMOTE))
        bench.step(6)
        assert bench.child("pd").told == [request]
        bench.run()
        assert bench.child("pd").written == []
        # It reports the receive that it never made, as NIXL does; vLLM must not hear of it.
        assert bench.received() == ([] if where == "prefix cache" else [(bench.received()[0][0], request)])


# -- scenario 8: a look-up that is not ready ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "policy", "deadline", "loaded"),
    [
        ("AB", "first", None, ("A", 64)),
        ("BA", "first", None, ("B", 160)),
        ("AB", "longest", None, ("B", 160)),
        ("BA", "longest", None, ("B", 160)),
        ("AB", "first", 1e-9, ("A", 64)),
        ("BA", "first", 1e-9, ("A", 64)),
        ("AB", "longest", 1e-9, ("A", 64)),
        ("BA", "longest", 1e-9, ("A", 64)),
        ("AB", "compose", None, ("B", 160)),  # neither can be stopped before its end
        ("BA", "compose", 1e-9, ("A", 64)),
    ],
)
@pytest.mark.parametrize("whose", ["top", "child"])
def test_policies_and_a_slow_look_up(
    order: str,
    policy: str,
    deadline: float | None,
    loaded: tuple[str, int],
    whose: str,
    hosted: bool,
    overlap: bool,
) -> None:
    limit = {} if deadline is None else {"lookup_timeout_s": deadline}
    scripts: dict[str, Any] = {"A": {"hit": 64}, "B": {"hit": 4096, "pending": 3}}
    with Bench(
        [child(name, hosted, raykv=limit if whose == "child" else {}, **scripts[name]) for name in order],
        async_scheduling=overlap,
        raykv={"load_policy": policy, **(limit if whose == "top" else {})},
    ) as bench:
        bench.add(170)
        bench.run()
        a, b = bench.child("A"), bench.child("B")
        winner, tokens = loaded
        assert ("r0", tokens) in bench.child(winner).allocated
        assert [n for n in order if bench.child(n).written] == [winner]
        assert a.asked["r0"] == 1
        assert b.asked["r0"] <= 4 and b.answered["r0"] <= 1
        waited = not (policy == "first" and order == "AB")
        assert bench.total("B", "lookups_timed_out") == (1 if waited and deadline else 0)


@pytest.mark.parametrize("policy", ["first", "longest", "compose"])
def test_a_queue_of_slow_look_ups_moves(policy: str, hosted: bool, overlap: bool) -> None:
    """B never answers: its time limit makes it a miss, and requests behind are not held up meanwhile."""
    with Bench(
        [child("B", hosted, pending=-1), child("A", hosted, hit=32)],
        async_scheduling=overlap,
        raykv={"load_policy": policy, "lookup_timeout_s": 0.02},
    ) as bench:
        for i in range(12):
            bench.add(50, seed=i)
        bench.run()
        assert len(bench.received()) == 12
        assert bench.total("B", "lookups_timed_out") == 12


def test_an_abort_during_a_look_up_leaves_nothing(hosted: bool, overlap: bool) -> None:
    with Bench([child("A", hosted, pending=-1)], async_scheduling=overlap) as bench:
        bench.add(50)
        bench.step(3)
        bench.abort("r0")
        bench.run()
        assert len(bench.half.loads.lookups) == 0


# -- a hit that takes longer to load than to compute ----------------------------------------------------------


def test_a_slow_childs_hit_is_computed_instead(hosted: bool, overlap: bool) -> None:
    children = [child("A", hosted, hit=64), child("B", hosted, hit=32)]
    with Bench(children, async_scheduling=overlap, raykv={"load_cost": True}) as bench:
        bench.add(100)
        bench.run()
        cost = bench.half.loads._cost
        assert set(cost.load_rates) == {0} and cost.load_rates[0] > 0 and cost.prefill_rate > 0
        cost.load_rates[0], cost.prefill_rate = 1.0, 1e12
        bench.add(100, seed=1)
        bench.run()
        assert ("r1", 0) in bench.child("A").allocated and ("r1", 32) in bench.child("B").allocated
        assert bench.total("A", "hits_left") == 1 and bench.total("B", "hits_left") == 0
        assert bench.child("A").asked["r1"] == 1


def test_without_the_option_every_hit_is_loaded(hosted: bool) -> None:
    with Bench([child("A", hosted, hit=64)]) as bench:
        bench.add(100)
        bench.run()
        assert bench.half.loads._cost is None
