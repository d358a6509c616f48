"""A prefill engine says what it is saving, a decode engine waits for it: right tokens, and never for ever.

One engine on vLLM's real scheduler is both, with a real store whose commits come as late as a test wants.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from raykv.connector.tier_hints import hint, read_hint
from raykv.store_messages import HandOver
from tests.support import fake_worker
from tests.support.fake_config import child
from tests.support.real_store import RealStore
from tests.support.tier_bench import BENCHES, Benches, TierBench, tier_child
from tests.support.waiting import eventually

pytestmark = pytest.mark.vllm
ASKED = {"do_remote_decode": True}
ELSEWHERE = "raykv-store-default-0123456789ab"
LONG = {"lookup_timeout_s": 2000.0, "lease_s": 8000.0}
"""Who waits for the limit waits longer than the test may."""
SHORT = {"lookup_timeout_s": 0.5}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RealStore]:
    made = RealStore(tmp_path, [{"medium": "host", "capacity": "2MiB"}], limit_s=60.0)
    yield made
    made.process.close()


@pytest.fixture(params=BENCHES, ids=str)
def bench_of(request: pytest.FixtureRequest) -> Benches:
    return request.param


def bench(make: Benches, store: RealStore, **options: Any) -> TierBench:
    raykv = None if make.alone else {"lookup_timeout_s": 1 + options["lookup_timeout_s"]}
    return make(store=store, tier=tier_child(raykv=raykv, **options))


def look_ups(store: RealStore) -> int:
    return store.process.calls.get("look_ups", 0)


def prefill(engine: TierBench, tokens: int = 200, **options: Any) -> tuple[list[int], dict[str, Any]]:
    """A prompt, and what the engine that has computed it says."""
    name = engine.add(tokens, params=ASKED, **options)
    engine.forget_locally()
    said = engine.results[name].params
    assert said is not None
    return engine.results[name].prompt, said


def test_blocks_that_are_being_saved_are_waited_for(bench_of: Benches, store: RealStore) -> None:
    with bench(bench_of, store, **LONG) as engine:
        store.process.hang("settle")  # the commits
        prompt, said = prefill(engine)
        assert said == {"raykv_tiers": {"store": store.process.name, "tokens": 12 * 16}}
        before = look_ups(store)
        engine.add(prompt, params=said)
        engine.until(lambda: look_ups(store) >= before + 4)
        assert engine.status("r1") == "WAITING" and engine.tier_total("loads") == 0
        store.process.go_on()
        engine.run()
        assert engine.tier_total("loads") == 1 and engine.tier_total("tokens_loaded_host") == 12 * 16


def test_what_is_there_is_not_waited_for(bench_of: Benches, store: RealStore) -> None:
    with bench(bench_of, store, **LONG) as engine:
        prompt, said = prefill(engine)
        eventually(lambda: store.status().saved_blocks >= 12 * bench_of.ranks, "the commits")
        for tokens in (12 * 16, 10**9):  # more than a prompt has to load is no more than that
            engine.add(prompt, params=hint(said["raykv_tiers"]["store"], tokens))
            engine.run()
            engine.forget_locally()
        assert engine.tier_total("loads") == 2


def test_the_engines_own_cache_is_not_waited_beside(bench_of: Benches, store: RealStore) -> None:
    with bench(bench_of, store, **LONG) as engine:
        store.process.hang("settle")
        engine.add(200, params=ASKED)
        engine.run()
        first = engine.results["r0"]
        engine.add(first.prompt, params=first.params)
        engine.run()
        assert engine.results["r1"].tokens == first.tokens and engine.tier_total("loads") == 0
        store.process.go_on()


def test_the_limit_ends_it(bench_of: Benches, store: RealStore) -> None:
    with bench(bench_of, store, **SHORT) as engine:
        store.process.hang("settle")
        prompt, said = prefill(engine)
        before = look_ups(store)
        engine.add(prompt, params=said)
        engine.run()
        assert engine.tier_total("loads") == 0 and look_ups(store) > before + 1
        store.process.go_on()


def test_a_lie_costs_time_and_the_rest_is_loaded(bench_of: Benches, store: RealStore) -> None:
    """The prompt goes on where the one in the store ended, and an unknown store is said to have all of it."""
    with bench(bench_of, store, **SHORT) as engine:
        prompt, _ = prefill(engine, 100)
        eventually(lambda: store.status().saved_blocks >= 6 * bench_of.ranks, "the commits")
        engine.add([*prompt, *range(10, 110)], params=hint(ELSEWHERE, 192))
        engine.run()
        assert engine.tier_total("loads") == 1 and engine.tier_total("tokens_loaded_host") == 6 * 16


def test_an_abort_while_it_waits_leaves_nothing(bench_of: Benches, store: RealStore) -> None:
    with bench(bench_of, store, **LONG) as engine:
        prompt, said = prefill(engine, 100)
        eventually(lambda: store.status().saved_blocks >= 6 * bench_of.ranks, "the commits")
        before = look_ups(store)
        engine.add([*prompt, *range(10, 110)], params=hint(said["raykv_tiers"]["store"], 192))
        engine.until(lambda: look_ups(store) >= before + 3)
        eventually(lambda: store.status().leases > 0, "the six blocks to be kept")
        engine.abort("r1")
        engine.step(3)
        eventually(lambda: store.status().leases == 0, "the lease to be given back")
        assert engine.status("r1") == "GONE" and not store.askers[-1]._hand_overs


def test_the_store_dies_while_it_is_waited_for(bench_of: Benches, store: RealStore) -> None:
    with bench(bench_of, store, **LONG) as engine:
        store.process.hang("settle")
        prompt, said = prefill(engine)
        before = look_ups(store)
        engine.add(prompt, params=said)
        engine.until(lambda: look_ups(store) >= before + 2)
        store.process.die()
        store.process.go_on()
        engine.run()  # its uncommitted blocks are gone
        assert engine.tier_total("loads") == 0 and len(engine.results["r1"].tokens) == 4


@pytest.mark.parametrize("why", ["nobody asked", "short", "adapter", "reset"])
def test_nothing_is_announced(bench_of: Benches, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody asked, and where no other engine could find it."""
    if why == "adapter":
        adapter = LoRARequest("adapter", 1, "/adapter")
        monkeypatch.setattr(fake_worker, "Request", functools.partial(Request, lora_request=adapter))
    with bench_of() as engine:
        if why == "reset":
            assert engine.scheduler.reset_connector_cache()
        engine.add(9 if why == "short" else 100, params=None if why == "nobody asked" else ASKED)
        engine.run()
        assert engine.results["r0"].params is None


def test_a_hint_is_for_requests_that_arrive_and_no_private_ones(
    bench_of: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = hint(ELSEWHERE, 96)
    with bench_of() as engine:
        engine.add(100, params=said)
        engine.run()
        assert engine.store.asked[0].hand_over == HandOver(6, ELSEWHERE)
        assert engine.scheduler.reset_connector_cache()
        engine.add(100, params=said, seed=1)
        engine.run()
        assert engine.store.asked[1].hand_over is None


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"raykv_tiers": None},
        {"raykv_tiers": []},
        {"raykv_tiers": {"store": ELSEWHERE}},
        hint(ELSEWHERE, 0),
        hint(ELSEWHERE, 15),
        hint(ELSEWHERE, -32),
        {"raykv_tiers": {"store": ELSEWHERE, "tokens": True}},
        {"raykv_tiers": {"store": ELSEWHERE, "tokens": "64"}},
        {"raykv_tiers": {"store": ELSEWHERE, "tokens": 64.0}},
        hint("raykv-controller", 64),
        hint("raykv-store-x-00\n", 64),
        hint("", 64),
        {**hint(ELSEWHERE, 64), "do_remote_prefill": True},  # another connector brings the prompt
    ],
)
def test_what_is_no_hint(params: Any) -> None:
    assert read_hint(params, 16, 100) is None
    assert read_hint(hint(ELSEWHERE, 64), 16, 100) == HandOver(4, ELSEWHERE)
    assert read_hint({**hint(ELSEWHERE, 6400), "do_remote_prefill": False}, 16, 10) == HandOver(10, ELSEWHERE)


def test_other_children_say_what_they_say(ranks: int, overlap: bool) -> None:
    """NIXL's parameters and these go together, and each child gets both back."""
    nixl = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1]]}
    others = [child("other", returns=nixl)]
    with TierBench(others, ranks=ranks, async_scheduling=overlap) as engine:
        engine.add(100, params=ASKED)
        engine.run()
        assert engine.results["r0"].params == {**nixl, "raykv_tiers": {"store": engine.store.store, "tokens": 96}}
