"""Scenarios 1 to 4: a completion is heard once, from the one that owes it, and blocks are given back after the last.

Children report what they should and what they should not, in every order, on one rank and on two.
"""

from __future__ import annotations

import itertools

import pytest

from tests.support.fake_config import child
from tests.support.fake_worker import Bench

pytestmark = pytest.mark.vllm

ORDERS = list(itertools.permutations(["A", "B"]))


# -- scenario 1: the same receive twice -----------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids="".join)
def test_the_losers_report_of_a_load_is_dropped(
    order: tuple[str, ...], ranks: int, hosted: bool, overlap: bool
) -> None:
    scripts = {"A": {"hit": 64, "auto": False}, "B": {}}
    children = [child(name, hosted, **scripts[name]) for name in order]
    with Bench(children, ranks=ranks, async_scheduling=overlap) as bench:
        bench.add(100)
        bench.wait_for_kv("r0")
        bench.child("B").report("recv", "r0")
        bench.step(4)
        assert bench.received() == []
        bench.child("A").report("recv", "r0")
        bench.step(4)
        assert len(bench.received()) == 1
        bench.child("B").report("recv", "r0")
        bench.child("A").report("recv", "r0")
        bench.finish("r0")
        bench.step(4)
        assert len(bench.received()) == 1
        assert bench.total("B", "reports_dropped") == 2 * ranks
        assert bench.total("A", "reports_dropped") == ranks


@pytest.mark.parametrize("order", ["01", "10", "0011", "0101"])
def test_a_load_ends_when_the_last_rank_has_reported(order: str, hosted: bool, overlap: bool) -> None:
    with Bench([child("A", hosted, hit=64, auto=False)], ranks=2, async_scheduling=overlap) as bench:
        bench.add(100)
        bench.wait_for_kv("r0")
        missing = {"0", "1"}
        for rank in order:
            assert (bench.received() == []) == bool(missing)
            bench.child("A").report("recv", "r0", [int(rank)])
            missing.discard(rank)
            bench.step(4)
        assert len(bench.received()) == 1


@pytest.mark.parametrize("kind", ["recv", "recv_failed", "send"])
def test_a_report_about_nothing_is_dropped(kind: str, ranks: int, hosted: bool, overlap: bool) -> None:
    """A phantom: of a request that never was, and of one that is over."""
    with Bench([child("A", hosted)], ranks=ranks, async_scheduling=overlap) as bench:
        bench.add(40)
        bench.child("A").report(kind, "nobody")
        bench.run()
        bench.child("A").report(kind, "r0")
        bench.add(40, seed=1)
        bench.run()
        assert bench.received() == []
        assert bench.total("A", "reports_dropped") == 2 * ranks


def test_a_late_report_of_a_lost_load_does_not_end_the_next_one(ranks: int, overlap: bool) -> None:
    """The host of A dies in the load; B takes over; A's next host reports the old load."""
    children = [child("A", hit=64, auto=False), child("B", False, hit=64, auto=False)]
    with Bench(children, ranks=ranks, async_scheduling=overlap) as bench:
        bench.add(100)
        bench.wait_for_kv("r0")
        bench.host("A").die()
        bench.until(lambda: ("r0", 64) in bench.child("B").allocated, "B to load")
        bench.until(lambda: bench.half.children[0].up, "A to come back")
        bench.step(4)
        bench.child("A").report("recv", "r0")
        received = len(bench.received())
        bench.step(8)
        assert len(bench.received()) == received
        bench.child("B").report("recv", "r0")
        bench.finish("r0")


# -- scenario 2: abort with a load and a save pending ---------------------------------------------------------


@pytest.mark.parametrize("completions", ["recv send", "send recv", "both", "ranks apart"])
@pytest.mark.parametrize("order", ORDERS, ids="".join)
def test_an_aborted_request_is_freed_once_after_load_and_save(
    completions: str, order: tuple[str, ...], ranks: int, hosted: bool, overlap: bool
) -> None:
    scripts = {"A": {"hit": 64, "auto": False}, "B": {"owes": True}}
    with Bench(
        [child(name, hosted, **scripts[name]) for name in order], ranks=ranks, async_scheduling=overlap
    ) as bench:
        bench.add(100)
        bench.wait_for_kv("r0")
        a, b = bench.child("A"), bench.child("B")
        bench.abort("r0")
        bench.step(4)
        used = bench.used_blocks
        assert used == 4
        if completions == "both":
            a.report("recv", "r0")
            b.report("send", "r0")
        elif completions == "ranks apart":
            for rank in range(ranks):
                assert bench.used_blocks == used
                a.report("recv", "r0", [rank])
                bench.step(4)
                assert bench.used_blocks == used
                b.report("send", "r0", [rank])
                bench.step(4)
        else:
            for i, kind in enumerate(completions.split()):
                (a if kind == "recv" else b).report(kind, "r0")
                bench.step(4)
                assert bench.used_blocks == (used if i == 0 else 0)
        bench.run()
        assert bench.used_blocks == 0
        assert len(bench.received()) == 1, "vLLM waits for the load of an aborted request, and hears of it once"


@pytest.mark.parametrize("failing", ["", "request", "blocks"])
def test_an_aborted_request_is_freed_after_a_load_that_fails(
    failing: str, ranks: int, hosted: bool, overlap: bool
) -> None:
    with Bench(
        [child("A", hosted, hit=64, auto=False, failing=failing)], ranks=ranks, async_scheduling=overlap
    ) as bench:
        bench.add(100)
        bench.wait_for_kv("r0")
        bench.child("A").report("recv", "r0")
        bench.abort("r0")
        bench.run()
        assert len(bench.received()) == 1


# -- scenario 3: one child reports twice ----------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids="".join)
def test_two_reports_of_one_child_do_not_stand_for_two_children(
    order: tuple[str, ...], ranks: int, hosted: bool, overlap: bool
) -> None:
    with Bench(
        [child(name, hosted, saves=True, owes=True) for name in order], ranks=ranks, async_scheduling=overlap
    ) as bench:
        bench.add(70)
        bench.finish("r0")
        bench.step(4)
        used = bench.used_blocks
        assert used == 5
        bench.child("A").report("send", "r0", times=2)
        bench.step(8)
        assert bench.used_blocks == used
        bench.child("B").report("send", "r0")
        bench.until(lambda: bench.used_blocks == 0, "B's blocks")


def test_two_reports_of_one_rank_do_not_stand_for_two_ranks(hosted: bool, overlap: bool) -> None:
    with Bench([child("A", hosted, owes=True)], ranks=2, async_scheduling=overlap) as bench:
        bench.add(70)
        bench.finish("r0")
        bench.step(4)
        used = bench.used_blocks
        bench.child("A").report("send", "r0", [1], times=3)
        bench.step(8)
        assert bench.used_blocks == used > 0
        bench.child("A").report("send", "r0", [0])
        bench.until(lambda: bench.used_blocks == 0, "the blocks")


# -- scenario 4: a promise that is broken ---------------------------------------------------------------------


def test_a_send_that_is_never_reported_ends_with_its_host(ranks: int, overlap: bool, raykv_log: list[str]) -> None:
    with Bench(
        [child("A", saves=True, owes=True, raykv={"promise_timeout_s": 0.05}), child("B", saves=True)],
        ranks=ranks,
        async_scheduling=overlap,
    ) as bench:
        bench.add(70)
        bench.finish("r0")
        bench.until(lambda: bench.used_blocks == 0, "the blocks of a broken promise")
        assert bench.total("A", "restarts") == ranks
        bench.until(lambda: bench.half.children[0].up, "A to come back")
        bench.child("A").report("send", "r0")  # the old incarnation's, late
        bench.child("A").owes = False
        bench.add(70, seed=1)
        bench.run()
        assert bench.total("A", "reports_dropped") == ranks
        assert bench.total("A", "restarts") == ranks
        assert bench.total("B", "restarts") == 0
    assert any("child A" in line and "lost its host" in line for line in raykv_log)


@pytest.mark.parametrize("abort", [False, True])
def test_a_load_that_never_ends_is_ended_with_its_host(abort: bool, ranks: int, overlap: bool) -> None:
    with Bench(
        [child("A", hits={"r0": 64}, auto=False, raykv={"load_timeout_s": 0.05})], ranks=ranks, async_scheduling=overlap
    ) as bench:
        bench.add(100)
        bench.until(lambda: bench.status("r0") == "WAITING_FOR_REMOTE_KVS")
        if abort:
            bench.abort("r0")
        bench.run()
        assert len(bench.received()) == 1
        assert bench.child("A").allocated[0] == ("r0", 64)
        assert ("r0", 64) not in bench.child("A").allocated[1:], "what failed is not tried again"
        bench.child("A").report("recv", "r0")
        bench.add(20, seed=1)
        bench.run()
        assert len(bench.received()) == 1


def test_without_a_host_to_kill_a_broken_promise_waits(ranks: int, overlap: bool) -> None:
    """An inline child's late report is what frees its blocks: nothing else proves that it no longer reads them."""
    with Bench(
        [child("A", False, owes=True, raykv={"promise_timeout_s": 0.001})], ranks=ranks, async_scheduling=overlap
    ) as bench:
        bench.add(70)
        bench.finish("r0")
        bench.step(20)
        assert bench.used_blocks == 5
        bench.child("A").report("send", "r0")
        bench.until(lambda: bench.used_blocks == 0)


@pytest.mark.parametrize("hosted", [True, False], ids=["hosted", "inline"])
def test_a_send_reported_too_early_frees_nothing(hosted: bool) -> None:
    """A report of a living request is no proof that the child will not read its blocks when it has ended."""
    with Bench([child("A", hosted, saves=True, owes=True)], num_blocks=16) as bench:
        bench.add(60, max_tokens=12)
        bench.step(3)
        bench.child("A").report("send", "r0")
        bench.finish("r0")
        bench.step(4)
        assert bench.used_blocks > 0
        bench.child("A").report("send", "r0")
        bench.run()
