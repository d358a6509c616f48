"""TierConnector, its real links and a real NodeStore on vLLM's real scheduler; only the processes are one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raykv.store_messages import Medium
from tests.support.real_store import PATIENCE_S, RealStore
from tests.support.tier_bench import BENCHES, Benches, TierBench, tier_child
from tests.support.waiting import eventually

pytestmark = pytest.mark.vllm


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[[str], RealStore]]:
    """Makes a store whose host tier has this capacity."""
    opened: list[RealStore] = []

    def make(host: str) -> RealStore:
        disk = {"medium": "disk", "capacity": "4MiB", "path": str(tmp_path / "disk")}
        opened.append(RealStore(tmp_path, [{"medium": "host", "capacity": host}, disk]))
        return opened[0]

    yield make
    for store in opened:
        store.process.close()


@pytest.fixture
def store(open_store: Callable[[str], RealStore]) -> RealStore:
    return open_store("2MiB")


@pytest.fixture(params=BENCHES, ids=str)
def bench_of(request: pytest.FixtureRequest) -> Benches:
    return request.param


def bench(make: Benches, store: RealStore, **options: Any) -> TierBench:
    return make(store=store, tier=tier_child(lookup_timeout_s=PATIENCE_S), **options)


@pytest.mark.parametrize("window", [None, 64])
def test_a_prompt_comes_back_byte_by_byte(bench_of: Benches, store: RealStore, window: int | None) -> None:
    with bench(bench_of, store, window=window, batched_tokens=96) as engine:
        engine.add(307, max_tokens=20)
        engine.forget_locally()
        blocks = 20 * bench_of.ranks * len(engine.groups)
        eventually(lambda: store.used(Medium.HOST) + store.used(Medium.DISK) >= blocks, "the commits")
        engine.add(engine.results["r0"].prompt, max_tokens=20)
        engine.run()
        assert engine.results["r1"].tokens == engine.results["r0"].tokens
        assert engine.tier_total("tokens_loaded_host") + engine.tier_total("tokens_loaded_disk") == 19 * 16


def test_another_engine_finds_it(bench_of: Benches, store: RealStore) -> None:
    """The first engine has gone; the store has not."""
    with bench(bench_of, store) as engine:
        engine.add(200)
        engine.run()
        prompt = engine.results["r0"].prompt
        eventually(lambda: store.used(Medium.HOST) + store.used(Medium.DISK) >= 12 * bench_of.ranks, "the commits")
    eventually(lambda: store.status().engines == (), "the engine to leave")
    with bench(bench_of, store) as engine:
        engine.add(prompt)
        engine.run()
        assert engine.tier_total("loads") == 1 and engine.tier_total("loads_failed") == 0


def test_the_store_dies_and_what_it_had_is_found_again(bench_of: Benches, store: RealStore) -> None:
    with bench(bench_of, store) as engine:
        engine.add(200)
        engine.forget_locally()
        eventually(lambda: store.used(Medium.HOST) + store.used(Medium.DISK) >= 12 * bench_of.ranks, "the commits")
        store.process.hang("load")
        engine.add(engine.results["r0"].prompt)
        engine.until(lambda: engine.status("r1") == "WAITING_FOR_REMOTE_KVS")
        engine.step(3)
        store.process.die()
        store.process.go_on()
        engine.run()
        assert engine.tier_total("loads_failed") == 1
        engine.forget_locally()
        eventually(lambda: len(store.status().engines) == 1, "the ranks to come back")
        loads = engine.tier_total("loads")
        for seed in range(50):  # the first may come before the asker has heard of the new life
            engine.add([*engine.results["r0"].prompt, seed])
            engine.run()
            if engine.tier_total("loads") > loads:
                break
            engine.forget_locally()
            time.sleep(0.1)
        assert engine.tier_total("loads") > loads


def test_many_prompts_through_small_tiers(bench_of: Benches, open_store: Callable[[str], RealStore]) -> None:
    """Evictions, moves to disk and back, preemptions, repeated prompts: every token is right."""
    store = open_store("160KiB")
    with bench(bench_of, store, num_blocks=40, window=64) as engine:
        for turn in range(30):
            engine.add(60 + turn % 5 * 40, seed=turn % 3, max_tokens=10)
            engine.step(2)
            if turn % 3 == 2:
                engine.forget_locally()
        assert engine.tier_total("tokens_saved") > 0 and engine.tier_total("loads") > 0
