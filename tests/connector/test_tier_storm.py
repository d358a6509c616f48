"""Everything at once, with a real store: what it keeps under a key are always that key's bytes.

vLLM's real scheduler and block pool with few blocks and many requests that share prefixes; preemptions; aborts at any
moment; saves and loads that dawdle, hang or die with the store; tiers so small that blocks are evicted, moved to the
disk and back all the time; other children whose loads fail, synchronous ones too. Afterwards every slot of every tier
is read back and compared with a recompute. `TierBench` checks tokens, blocks and leases, as ever.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from raykv.actors import store_asker, store_worker_link
from raykv.connector.tier_saves import TierSaves
from tests.support.fake_config import child
from tests.support.fake_ranges import ranged
from tests.support.fake_worker import Result
from tests.support.real_store import PATIENCE_S, RealStore
from tests.support.tier_bench import TierBench, tier_child

pytestmark = pytest.mark.vllm

SEEDS, SOAK_SEEDS = 8, 200
REQUESTS = 24
WINDOW = 32
LIMITS = {"max_faults": 1000, "retry_s": 0.01, "load_timeout_s": 0.4, "promise_timeout_s": 0.6, "timeout_s": 5.0}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that died is back before the storm is over."""
    for module in (store_asker, store_worker_link):
        monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
        monkeypatch.setattr(module, "LAST_PAUSE_S", 0.1)
    monkeypatch.setattr(store_worker_link, "IDLE_CHECK_S", 0.02)


class TierStorm:
    """One seed's weather: a store, and the engines that use it one after the other."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = rng = random.Random(f"tiers {seed}")
        disk = {"medium": "disk", "capacity": rng.choice(["256KiB", "2MiB"]), "path": str(folder / "disk")}
        host = {"medium": "host", "capacity": rng.choice(["64KiB", "256KiB", "1MiB"])}
        self.store = RealStore(
            folder,
            rng.choice([[host], [host, disk], [host, disk], [disk]]),
            limit_s=1.0,
            cascade=rng.choice(["write", "evict"]),
            eviction=rng.choice(["lru", "s3fifo"]),
        )
        self.window = rng.choice([None, None, WINDOW])
        bases = [[rng.randrange(3, 480) for _ in range(90)] for _ in range(4)]
        # More than vLLM's own pool keeps, so that they come back from the store.
        self.prefixes = [base[:length] for base in bases for length in (rng.randint(17, 60), 90)]
        self.results: list[Result] = []
        self.salts = {b""}
        self.seen: Counter[str] = Counter()
        self.groups: Sequence[Any] = ()
        self.slots: list[int] = []

    # -- an engine's life -----------------------------------------------------------------------------------

    def engine(self, requests: int) -> None:
        rng, overlap, ranks = self.rng, self.rng.random() < 0.5, self.rng.choice([1, 1, 2])
        others, policy = self.others(overlap), rng.choice(["first", "longest", "compose"])
        with TierBench(
            others,
            first=rng.random() < 0.7,
            store=self.store,
            tier=tier_child(lookup_timeout_s=rng.choice([0.02, PATIENCE_S])),
            ranks=ranks,
            async_scheduling=overlap,
            num_blocks=24 if self.window is None else 44,
            window=self.window,
            batched_tokens=rng.choice([48, 256]),
            sequences=6,
            raykv=None if others is None else {"load_policy": policy, "lookup_timeout_s": 1.0},
            eager=lambda: rng.random() < 0.5,
        ) as bench:
            left = requests
            while left or len(bench.unfinished) > 4:
                left -= self.blow(bench, left)
                bench.step(settle=rng.random() < 0.7)
                self.look(bench)
            self.calm(bench)
        self.groups = bench.groups
        self.results += bench.results.values()
        for counter in ("tokens_saved", "loads", "loads_failed", "saves_failed"):
            self.seen[counter] += bench.tier_total(counter)
        self.seen["evicted"] += sum(tier.evicted for tier in self.store.status().tiers)

    def others(self, overlap: bool) -> list[dict[str, Any]] | None:
        rng = self.rng
        if rng.random() < 0.4:
            return None
        found = []
        if not overlap and self.window is None and rng.random() < 0.4:
            found.append(child("sync", True, hit=48, asynchronous=False, raykv=LIMITS))
        if rng.random() < 0.6:
            make = rng.choice([child, ranged])
            found.append(make("other", rng.random() < 0.6, search=True, saves=True, raykv=LIMITS))
        return found

    def look(self, bench: TierBench) -> None:
        bench.half.check_integrity()
        bench.tier.check_integrity()
        self.seen["preempted"] += sum(bench.status(name) == "PREEMPTED" for name in bench.unfinished)

    # -- weather --------------------------------------------------------------------------------------------

    def blow(self, bench: TierBench, left: int) -> int:
        """One event, or none; returns the requests that it added."""
        rng, process = self.rng, self.store.process
        kind = rng.choices(
            ["add", "abort", "dawdle", "haste", "hang", "go on", "die", "forget", "reset", "failing", "none"],
            [12, 3, 3, 2, 1, 6, 0.4, 1, 0.2, 4, 8],
        )[0]
        if kind == "add" and left:
            prompt = list(rng.choice(self.prefixes)) + [rng.randrange(3, 480) for _ in range(rng.randrange(1, 40))]
            bench.add(prompt, max_tokens=rng.randint(1, 60))
            return 1
        if kind == "abort" and bench.unfinished:
            saving = any(job.blocks for job in bench.tier._jobs._open.values())
            self.seen["aborted in a save"] += saving
            bench.abort(rng.choice(bench.unfinished))
        elif kind == "dawdle":
            process.delay(rng.choice([0.002, 0.01, 0.03]), rng.choice(["save", "load", "settle", "look_ups"]))
        elif kind == "haste":
            process.delay(0.0, "save", "load", "settle", "look_ups")
        elif kind == "hang":
            process.hang(rng.choice(["save", "load", "settle"]))
        elif kind == "go on":
            process.go_on()
        elif kind == "die":
            process.die()
            process.go_on()
            self.seen["died"] += 1
        elif kind == "forget":
            bench.scheduler.reset_prefix_cache()
        elif kind == "reset":
            bench.scheduler.reset_connector_cache()
            self.salts.add(bench.tier._known.salt)
        elif kind == "failing" and len(bench.names) > 1:
            control = bench.child(rng.choice(bench.names))
            control.failing = rng.choice(["", "request", "blocks"])
            control.failing_ranks = rng.choice([None, (0,), (bench.ranks - 1,)])
        return 0

    def calm(self, bench: TierBench) -> None:
        self.store.process.go_on()
        self.store.process.delay(0.0, "save", "load", "settle", "look_ups")
        for name in bench.names:
            bench.child(name).failing = ""

    # -- the end --------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.store.check_empty()
        self.slots = self.store.check_bytes(self.results, self.groups, self.salts)


def storm(seed: int, folder: Path, requests: int = REQUESTS) -> TierStorm:
    weather = TierStorm(seed, folder)
    try:
        for _ in range(weather.rng.choice([1, 1, 2])):
            weather.engine(requests)
        weather.check()
    finally:
        weather.store.process.close()
    return weather


@pytest.mark.parametrize("seed", range(SEEDS))
def test_storm(seed: int, tmp_path: Path) -> None:
    found = storm(seed, tmp_path)
    print(dict(found.seen), found.slots)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(SEEDS, SEEDS + SOAK_SEEDS))
def test_long_storm(seed: int, tmp_path: Path) -> None:
    storm(seed, tmp_path)


def unpinned(self: TierSaves, output: Any, plan: Any = TierSaves.plan) -> Any:
    """`TierSaves.plan` without its pins: given back in the same moment."""
    job = plan(self, output)
    if job is not None:
        found = self._jobs._open[job.job]
        self._pool.free_blocks(reversed(found.blocks))
        found.blocks = ()
        self._jobs._pins.clear()
    return job


@pytest.mark.parametrize("overlap", [False, True])
def test_without_pins_wrong_bytes_are_seen(overlap: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The check of the storm is worth something: take the pins away, and it finds the bytes of others."""
    monkeypatch.setattr(TierSaves, "plan", unpinned)
    store = RealStore(tmp_path, [{"medium": "host", "capacity": "1MiB"}])
    try:
        with TierBench(None, store=store, num_blocks=12, async_scheduling=overlap) as bench:
            store.process.hang("save")
            for seed in range(6):
                bench.add(60, seed=seed, max_tokens=2)
            bench.finish(*bench.results)
            store.process.go_on()
        with pytest.raises(AssertionError, match="wrong bytes under the key"):
            store.check_bytes(bench.results.values(), bench.groups)
    finally:
        store.process.close()
