"""A TierConnector that comes and goes in a running engine, with a store whose copies and answers a test directs."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from raykv.engine_messages import ChildOp, Progress
from tests.support.chain_bench import ChainMixin, child
from tests.support.fake_control import Control, controls
from tests.support.tier_bench import TierBench, tier_child

pytestmark = pytest.mark.vllm

ADD, REMOVE, PAUSE, RESUME = ChildOp.ADD, ChildOp.REMOVE, ChildOp.PAUSE, ChildOp.RESUME


class TierChainBench(ChainMixin, TierBench):
    """Starts with a TierConnector called `tier`; all that was ordered must have ended at its end."""

    def check(self) -> None:
        for number in getattr(self, "orders", []):
            self.ended(number)
        self.store.hold_answers = self.store.hold_jobs = False
        self.run()
        self.tier = self.newest()
        super().check()
        assert not self.half.chain.busy

    def newest(self) -> Any:
        """The scheduler half of the newest TierConnector, also of one that is gone."""
        halves = [c._connector._scheduler_half for c in self.half.children if c.config.is_tier]
        return halves[-1] if halves else self.tier

    def add_tier(self, name: str = "tier2", **extra: Any) -> str:
        controls.setdefault(name, Control(name))
        config = copy.deepcopy(tier_child(raykv={"name": name}, **extra))
        return self.add_child(config)


def bench_of(ranks: int = 1, overlap: bool = False, **more: Any) -> TierChainBench:
    return TierChainBench([child("other")], ranks=ranks, async_scheduling=overlap, **more)


def test_a_tier_goes_and_comes_again(ranks: int, overlap: bool) -> None:
    with bench_of(ranks, overlap) as bench:
        bench.add(100, max_tokens=40)
        bench.step(4)
        bench.done(bench.order(REMOVE, "tier"))
        assert bench.chain == ["other"] and bench.status("r0") == "RUNNING"
        bench.forget_locally()
        bench.done(bench.add_tier("tier"))
        bench.add(100, max_tokens=4)
        bench.run()
        bench.forget_locally()
        bench.add(100, max_tokens=4)
        bench.run()
        assert bench.total("tier", "tokens_loaded") > 0, "what the new one has saved, or the old one before it"


def test_its_saves_are_waited_for(ranks: int, overlap: bool) -> None:
    with bench_of(ranks, overlap) as bench:
        bench.store.hold_jobs = True
        bench.add(100, max_tokens=2)
        bench.finish("r0")
        number = bench.order(REMOVE, "tier")
        bench.step(8)
        assert bench.state(number).progress is Progress.RUNNING and bench.used_blocks > 0
        bench.store.hold_jobs = False
        bench.done(number)
        bench.until(lambda: bench.used_blocks == 0, "its pins to be given back")


def test_a_paused_tier_neither_saves_nor_loads(overlap: bool) -> None:
    with bench_of(1, overlap) as bench:
        bench.done(bench.order(PAUSE, "tier"))
        for _ in range(2):
            bench.add(100, max_tokens=2)
            bench.run()
            bench.forget_locally()
        assert bench.tier_total("tokens_saved") == 0 and bench.total("tier", "tokens_loaded") == 0
        bench.done(bench.order(RESUME, "tier"))
        for _ in range(2):
            bench.add(100, max_tokens=2)
            bench.run()
            bench.forget_locally()
        assert bench.tier_total("tokens_saved") > 0 and bench.total("tier", "tokens_loaded") == 96
        assert bench.total("tier", "tokens_saved") == bench.tier_total("tokens_saved")


def test_two_tiers_of_one_store_are_refused() -> None:
    with bench_of() as bench:
        state = bench.ended(bench.add_tier())
        assert state.progress is Progress.REFUSED and 'uses the store "default"' in state.detail, state


def test_a_tier_with_a_wrong_option_is_refused() -> None:
    with bench_of() as bench:
        state = bench.ended(bench.add_tier(store="x", tiers=[{"medium": "ram", "capacity": "1MiB"}]))
        assert state.progress is Progress.REFUSED and "Valid:" in state.detail, state
