"""Children that fail for good, or at the worst moment: nobody's blocks and nobody's requests wait for them."""

from __future__ import annotations

import pytest

from tests.support.fake_config import child
from tests.support.fake_worker import Bench

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_child_that_never_comes_back_keeps_no_block(asynchronous: bool, ranks: int) -> None:
    """It goes down in the very step that plans a load from it, and its hosts can't be started again."""
    script = {"hit": 64, "asynchronous": asynchronous, "saves": True, "raykv": {"max_faults": 1}}
    with Bench([child("A", **script), child("B", saves=True)], ranks=ranks) as bench:
        bench.hosts.unstartable.add("A")
        bench.child("A").raises["update_state_after_alloc"] = 1
        bench.add(100)
        bench.finish("r0")
        bench.until(lambda: bench.used_blocks == 0, "the blocks of the lost child")
        assert not bench.half.children[0].up
        bench.hosts.unstartable.clear()


@pytest.mark.parametrize(
    "hook",
    [
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "update_connector_output",
        "request_finished",
        "take_events",
    ],
)
def test_a_scheduler_half_that_raises_disturbs_nobody(hook: str, ranks: int, hosted: bool, overlap: bool) -> None:
    children = [child("A", hosted, hit=64, saves=True, owes=True, auto_send=True), child("B", hosted, saves=True)]
    with Bench(children, ranks=ranks, async_scheduling=overlap) as bench:
        bench.child("A").raises[hook] = 1
        for i in range(3):
            bench.add(100, seed=i)
        bench.run()
        assert bench.child("A").raises[hook] == 0, "the hook was not called"
        assert bench.total("B", "load_failures") == 0
        assert len(bench.child("B").store) == 3 * 6 * len(bench.runner.layers) * ranks


def test_a_child_that_can_not_say_whether_it_still_reads_keeps_the_blocks(ranks: int, hosted: bool) -> None:
    """Until the death of its hosts; an inline one, which can't die alone, until it reports."""
    with Bench([child("A", hosted, late=True), child("B", saves=True)], ranks=ranks) as bench:
        control = bench.child("A")
        control.auto_send = False
        control.raises["request_finished"] = 1
        bench.add(100)
        bench.finish("r0")
        if not hosted:
            bench.step(30)
            assert bench.used_blocks == 7
            control.report("send", "r0")
        bench.until(lambda: bench.used_blocks == 0, "the end of its reading")
        control.auto_send = True
        bench.add(100, seed=1)
        bench.run()


def test_blocks_of_a_child_that_went_down_wait_for_its_death(ranks: int) -> None:
    """It is off and its hosts are to be ended, but they hang, and may still read."""
    with Bench([child("A", late=True, raykv={"max_faults": 1}), child("B", saves=True)], ranks=ranks) as bench:
        control = bench.child("A")
        control.auto_send = False
        bench.add(100, max_tokens=8)
        bench.step(4)
        held = bench.hosts.started
        for process in held:
            if process.child == "A":
                process.hold()
        control.raises["take_events"] = 1
        bench.finish("r0")
        assert bench.used_blocks > 0
        for process in held:
            process.release()
        bench.until(lambda: bench.used_blocks == 0, "the death of its hosts")


@pytest.mark.parametrize("hook", ["start_load_kv", "save_kv_layer", "wait_for_save", "get_transfer_results", "copy"])
def test_a_worker_half_that_raises_disturbs_nobody(hook: str, ranks: int, overlap: bool) -> None:
    limits = {"load_timeout_s": 0.3}  # a child that raises in the middle of a load may forget it
    children = [child("A", hit=64, saves=True, owes=True, auto_send=True, raykv=limits), child("B", saves=True)]
    with Bench(children, ranks=ranks, async_scheduling=overlap) as bench:
        bench.child("A").raises[hook] = 1
        for i in range(3):
            bench.add(100, seed=i)
        bench.run()
        assert bench.child("A").raises[hook] == 0, "the hook was not called"
        assert len(bench.child("B").store) == 3 * 6 * len(bench.runner.layers) * ranks


def test_failed_loads_do_not_block_each_other(hosted: bool, overlap: bool) -> None:
    """vLLM counts blocks for requests whose load failed as reserved, and takes no other load for any of them."""
    children = [child("A", hosted, hit=64, failing="request", auto=False), child("B", hosted, hit=64)]
    with Bench(children, async_scheduling=overlap, num_blocks=24) as bench:
        for i in range(3):
            bench.add(100, seed=i)
        for name in list(bench.results):
            bench.wait_for_kv(name)
        for name in bench.results:
            bench.child("A").report("recv", name)
        bench.run()


def test_a_host_that_hangs_is_replaced(ranks: int, overlap: bool) -> None:
    children = [child("A", hit=64, saves=True, raykv={"timeout_s": 0.1}), child("B", saves=True)]
    with Bench(children, ranks=ranks, async_scheduling=overlap) as bench:
        bench.add(100)
        bench.step(2)
        bench.host("A").stop()
        bench.add(100, seed=1)
        bench.finish("r0", "r1")
        bench.until(lambda: bench.half.children[0].up and bench.host("A").incarnation > 0, "A to come back")
        written = len(bench.child("A").written)
        bench.add(100, seed=2)
        bench.run()
        assert len(bench.child("A").written) == written + 4


def test_what_an_inline_child_owes_is_not_lost_with_its_plan(overlap: bool) -> None:
    """It raises in the very step that tells its worker half of the send that it owes for r0."""
    with Bench([child("A", False, saves=True, late=True, owes=True)], async_scheduling=overlap) as bench:
        bench.child("A").auto_send = True
        bench.add(60, max_tokens=2)
        bench.finish("r0")
        bench.child("A").raises["update_state_after_alloc"] += 1
        bench.add(60, seed=1, max_tokens=2)
        bench.run()
