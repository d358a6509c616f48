"""Everything at once while the chain changes: children come, go, pause, go on, restart and change places under load.

As `test_storm`: few blocks, many requests that share prefixes, preemptions, aborts, loads that fail or never end, late
saves, hosts that are slow or die. Each order must end, no request may fail, no token may be wrong, no block may be
handed out that anybody may still touch, and at the end all blocks are free.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from raykv.core.pins import PinTable
from raykv.engine_messages import ChildOp, Progress
from tests.connector.test_storm import LIMITS, Storm
from tests.support.chain_bench import ChainBench, child, ranged
from tests.support.fake_control import controls

pytestmark = pytest.mark.vllm

SEEDS = int(os.environ.get("RAYKV_CHAIN_SEEDS", "5"))
CHANGES = int(os.environ.get("RAYKV_CHAIN_CHANGES", "14"))
"""Orders of one storm; requests go on to come until all were given."""
SOAK_SEEDS, SOAK_CHANGES = 40, 200
NAMES = "abcdef"
FEWEST_IN_FLIGHT = 4


class ChainStorm(Storm):
    """One seed's weather."""

    def __init__(self, bench: ChainBench, rng: random.Random, changes: int, window: int | None) -> None:
        super().__init__(bench, rng)
        self.chain_bench, self.changes, self.window = bench, changes, window
        self.seen: Counter[str] = Counter()
        self.left = 1 << 30

    # -- weather --------------------------------------------------------------------------------------------

    def blow(self) -> None:
        bench, rng = self.chain_bench, self.rng
        if len(bench.unfinished) < FEWEST_IN_FLIGHT:
            self.add()
        if self.changes and rng.random() < 0.25:
            self.change()
        elif len(bench.unfinished) < 3 * FEWEST_IN_FLIGHT and rng.random() < 0.3:
            self.add()
        self.gust()

    def gust(self) -> None:
        """What may happen to any child, or to the engine."""
        bench, rng = self.chain_bench, self.rng
        kind = rng.choices(
            ["abort", "auto", "failing", "hold", "release", "die", "raise", "reset", "none"],
            [3, 6, 3, 4, 8, 0.7, 1, 1, 14],
        )[0]
        here = [child for child in bench.half.children if child.name in controls]
        processes = [process for process in bench.hosts.started if process.alive()]
        if kind == "abort" and bench.unfinished:
            bench.abort(rng.choice(bench.unfinished))
        elif kind == "hold" and processes:
            rng.choice(processes).hold()
        elif kind == "release" and processes:
            rng.choice(processes).release()
        elif kind == "die" and processes:
            rng.choice(processes).die()
        elif kind == "reset":
            bench.scheduler.reset_prefix_cache()
        elif here and kind in ("auto", "failing", "raise"):
            self.upset(rng.choice(here), kind)

    def upset(self, child: Any, kind: str) -> None:
        control, rng = controls[child.name], self.rng
        if kind == "auto":
            control.auto, control.auto_send = rng.random() < 0.6, rng.random() < 0.6
        elif kind == "failing":
            control.failing = rng.choice(["", "", "request", "blocks"])
            control.failing_ranks = rng.choice([None, (0,), (self.bench.ranks - 1,)])
        else:
            hooks = ["get_num_new_matched_tokens", "update_state_after_alloc", "take_events"]
            if child.hosted:  # else it keeps blocks: see test_faults
                hooks.append("request_finished")
            control.raises[rng.choice(hooks)] += 1

    def calm(self) -> None:
        for control in controls.values():
            control.auto, control.auto_send, control.failing = True, True, ""
            control.raises.clear()
        for process in self.bench.hosts.started:
            process.release()

    def change(self) -> None:
        rng, bench = self.rng, self.chain_bench
        there = [c.name for c in bench.half.children]
        absent = [name for name in NAMES if name not in there]
        kinds: list[tuple[Callable[[], str], float]] = [
            (lambda: bench.order(ChildOp.REORDER, names=tuple(rng.sample(there, len(there)))), 2),
        ]
        if absent:
            kinds.append((lambda: self.add_child(rng.choice(absent), rng.choice(["", *there])), 6))
        if there:
            for op, weight in ((ChildOp.REMOVE, 4), (ChildOp.PAUSE, 3), (ChildOp.RESUME, 4), (ChildOp.RESTART, 2)):
                kinds.append((lambda op=op: bench.order(op, rng.choice(there)), weight))  # type: ignore[misc]
        rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0]()
        self.changes -= 1

    def add_child(self, name: str, before: str) -> str:
        """A new child, of whatever kind the last one with this name was."""
        old = controls.pop(name, None)
        assert old is None or not old.wrong, f"{name} read blocks of others: {old.wrong}"
        return self.chain_bench.add_child(some_child(self.rng, name, self.window), before)

    # -- the end --------------------------------------------------------------------------------------------

    def count(self) -> None:
        for state in self.chain_bench.half.chain.states():
            self.seen[state.progress] += 1


def some_child(rng: random.Random, name: str, window: int | None) -> dict[str, Any]:
    """A child of any kind: a store, one that saves late, one that is remote; hosted or inline."""
    hosted = rng.random() < 0.65
    make = rng.choice([child, ranged])
    if rng.random() < 0.4:
        return make(name, hosted, search=True, saves=True, raykv=LIMITS)
    if rng.random() < 0.5:
        return make(
            name, hosted, saves=True, late=window is None, owes=rng.random() < 0.4, auto_send=True, raykv=LIMITS
        )
    return make(name, hosted, hit=rng.choice([16, 48, 96]), pending=rng.choice([0, 2]), raykv=LIMITS)


def storm(seed: int, overlap: bool, changes: int) -> ChainStorm:
    rng = random.Random(f"chain {seed * 2 + overlap}")
    window = rng.choice([None, None, 32])
    with ChainBench(
        [some_child(rng, name, window) for name in NAMES[: rng.randint(1, 3)]],
        ranks=rng.choice([1, 1, 2]),
        async_scheduling=overlap,
        num_blocks=24 if window is None else 44,
        window=window,
        batched_tokens=rng.choice([48, 256]),
        sequences=6,
        raykv={"load_policy": rng.choice(["first", "longest", "compose"]), "lookup_timeout_s": 0.2},
        eager=lambda: rng.random() < 0.5,
    ) as bench:
        weather = ChainStorm(bench, rng, changes, window)
        while weather.changes or bench.half.chain.busy:
            weather.blow()
            bench.step(settle=rng.random() < 0.7)
            bench.half.check_integrity()
            if not weather.changes:
                weather.calm()
        weather.calm()
        bench.run()
        weather.count()
        failed = [name for name, result in bench.results.items() if result.reason and result.reason.name == "ERROR"]
        assert not failed, f"requests failed: {failed}"
    return weather


@pytest.mark.parametrize("seed", range(SEEDS))
def test_chain_storm(seed: int, overlap: bool) -> None:
    found = storm(seed, overlap, CHANGES)
    assert found.seen.total() == CHANGES and not found.seen[Progress.RUNNING] + found.seen[Progress.WAITING]
    print(dict(found.seen))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(SEEDS, SEEDS + SOAK_SEEDS))
def test_long_chain_storm(seed: int, overlap: bool) -> None:
    found = storm(seed, overlap, SOAK_CHANGES)
    assert found.seen[Progress.DONE] > SOAK_CHANGES / 3
    print(dict(found.seen))


def test_without_pins_a_removal_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are worth something: take the pins away, and a child that leaves is caught reading others' blocks."""
    monkeypatch.setattr(PinTable, "grow", lambda self, request, group, blocks: ())
    bench = ChainBench([child("A", saves=True)], num_blocks=12)
    with pytest.raises(AssertionError, match="may touch"), bench:
        bench.host("A").hold()
        bench.add(60, max_tokens=2)
        bench.step(2, settle=False)
        bench.order(ChildOp.REMOVE, "A")
        for i in range(1, 6):
            bench.add(60, seed=i, max_tokens=2)
        bench.finish(*bench.results)
        bench.host("A").release()
