"""Everything at once, on vLLM's real scheduler and block pool: the safety rule holds whatever happens.

Few blocks and many requests that share prefixes; preemptions; aborts at any moment; loads that fail, come late or
never; saves that are late; reports that are false; hosts that are slow, hang or die. `Bench` sees to it that no block
which a host may still touch is handed out, that every read and every token is right, that all requests end, and that
all blocks are free at the end; vLLM's own assertions would end the test.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from raykv.core.pins import PinTable
from tests.support.fake_config import child
from tests.support.fake_ranges import pulling, ranged
from tests.support.fake_worker import Bench

pytestmark = pytest.mark.vllm

SEEDS = int(os.environ.get("RAYKV_STORM_SEEDS", "14"))
"""Storms with and without overlapping steps each; raise it to look for what is rare."""
REQUESTS = 24
LIMITS = {"max_faults": 1000, "retry_s": 0.01, "load_timeout_s": 0.4, "promise_timeout_s": 0.6, "timeout_s": 5.0}


def children(rng: random.Random, overlap: bool, window: int | None) -> list[dict[str, Any]]:
    """Two to four children in any order, most of them hosted."""
    late = window is None  # vLLM frees what leaves a window without asking a connector that reads late
    found = [
        child("store", rng.random() < 0.8, search=True, saves=True, raykv=LIMITS),
        child("late", rng.random() < 0.8, saves=True, late=late, owes=rng.random() < 0.5, raykv=LIMITS),
        child("remote", rng.random() < 0.6, hit=rng.choice([0, 32, 96]), pending=rng.choice([0, 2]), raykv=LIMITS),
    ]
    if not overlap and window is None and all(c["kv_connector_extra_config"]["raykv"]["run"] == "actor" for c in found):
        found.append(child("sync", hit=48, asynchronous=False, raykv=LIMITS))
    found = rng.sample(found, rng.randint(2, len(found)))
    return found


def composing(rng: random.Random, overlap: bool, window: int | None) -> list[dict[str, Any]]:
    """Three to five children: two tiers and others behind or before them, whose loads are composed."""
    found = children(rng, overlap, window)
    taken = {c["kv_connector_extra_config"]["fake"] for c in found}
    last = rng.choice([child, pulling]) if window is None else child
    found += [
        ranged("tier", rng.random() < 0.6, hit=rng.choice([16, 40]), pending=rng.choice([0, 1]), raykv=LIMITS),
        ranged("tier2", rng.random() < 0.6, search=True, saves=True, raykv=LIMITS),
    ]
    if "remote" not in taken:
        found.append(last("remote", rng.random() < 0.6, hit=rng.choice([64, 96]), raykv=LIMITS))
    rng.shuffle(found)
    return found


class Storm:
    """One seed's weather."""

    def __init__(self, bench: Bench, rng: random.Random) -> None:
        self.bench, self.rng = bench, rng
        base = [rng.randrange(3, 480) for _ in range(90)]
        self.prefixes = [base[: rng.choice([20, 48, 90])] for _ in range(4)]
        self.left = REQUESTS

    def add(self) -> None:
        rng = self.rng
        prompt = list(rng.choice(self.prefixes)) + [rng.randrange(3, 480) for _ in range(rng.randrange(1, 40))]
        self.bench.add(prompt, max_tokens=rng.randint(1, 24))
        self.left -= 1

    def blow(self) -> None:
        """One event, or none."""
        rng, bench = self.rng, self.bench
        control = bench.child(rng.choice(bench.names))
        processes = [p for p in bench.hosts.started if p.alive()]
        kind = rng.choices(
            ["add", "abort", "auto", "failing", "phantom", "hold", "release", "die", "raise", "reset", "none"],
            [12, 3, 6, 3, 3, 4, 6, 0.7, 1, 1, 10],
        )[0]
        if kind == "add" and self.left:
            self.add()
        elif kind == "abort" and bench.unfinished:
            bench.abort(rng.choice(bench.unfinished))
        elif kind == "auto":
            control.auto, control.auto_send = rng.random() < 0.6, rng.random() < 0.6
        elif kind == "failing":
            control.failing = rng.choice(["", "", "request", "blocks"])
            control.failing_ranks = rng.choice([None, (0,), (bench.ranks - 1,)])
        elif kind == "phantom":
            # Not 'send' of a living request: the ledger takes that as the end of what the child will owe for it.
            control.report("recv", rng.choice(["nobody", "r0"]))
        elif kind == "hold" and processes:
            process = rng.choice(processes)
            if process.child != "sync":  # the engine itself would stand still
                process.hold()
        elif kind == "release" and processes:
            rng.choice(processes).release()
        elif kind == "die" and processes:
            rng.choice(processes).die()
        elif kind == "raise":
            hooks = ["get_num_new_matched_tokens", "update_state_after_alloc", "take_events"]
            if bench.half.children[bench.names.index(control.name)].hosted:  # else it keeps blocks: see test_faults
                hooks.append("request_finished")
            control.raises[rng.choice(hooks)] += 1
        elif kind == "reset":
            bench.scheduler.reset_prefix_cache()

    def calm(self) -> None:
        for control in map(self.bench.child, self.bench.names):
            control.auto, control.auto_send, control.failing = True, True, ""
            control.raises.clear()
        for process in self.bench.hosts.started:
            process.release()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_storm(seed: int, overlap: bool) -> None:
    rng = random.Random(seed * 2 + overlap)
    window = rng.choice([None, None, 32])
    blow(children(rng, overlap, window), rng.choice(["first", "longest"]), rng, overlap, window)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_storm_of_composed_loads(seed: int, overlap: bool) -> None:
    rng = random.Random(f"compose {seed * 2 + overlap}")
    window = rng.choice([None, None, 32])
    blow(composing(rng, overlap, window), "compose", rng, overlap, window)


def blow(found: list[dict[str, Any]], policy: str, rng: random.Random, overlap: bool, window: int | None) -> None:
    with Bench(
        found,
        ranks=rng.choice([1, 1, 2]),
        async_scheduling=overlap,
        num_blocks=24 if window is None else 44,
        window=window,
        batched_tokens=rng.choice([48, 256]),
        sequences=6,
        raykv={"load_policy": policy, "lookup_timeout_s": 0.2},
        eager=lambda: rng.random() < 0.5,
    ) as bench:
        storm = Storm(bench, rng)
        for _ in range(4):
            storm.add()
        while storm.left:
            storm.blow()
            bench.step(settle=rng.random() < 0.7)
            bench.half.check_integrity()
        storm.calm()


@pytest.mark.parametrize("overlap", [False, True])
def test_without_pins_the_storm_is_seen(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of the storm are worth something: take the pins away, and they find it out."""
    monkeypatch.setattr(PinTable, "grow", lambda self, request, group, blocks: ())
    bench = Bench([child("A", saves=True)], async_scheduling=overlap, num_blocks=12)
    with pytest.raises(AssertionError, match="may touch"), bench:
        bench.host("A").hold()
        for i in range(6):
            bench.add(60, seed=i, max_tokens=2)
        bench.finish(*bench.results)
        bench.host("A").release()
