"""KV events of a TierConnector on vLLM's real scheduler: what was saved, as vLLM tells of its own cache."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from raykv.actors import event_wire
from raykv.connector.events import TierEvents
from raykv.connector.tier_known import block_key
from raykv.types import JobId
from tests.support import fake_worker
from tests.support.tier_bench import BENCHES, Benches, TierBench

pytestmark = pytest.mark.vllm


@pytest.fixture(params=BENCHES, ids=str)
def bench_of(request: pytest.FixtureRequest) -> Benches:
    return request.param


def with_events(bench: TierBench, enabled: bool = True) -> TierBench:
    """vLLM publishes its events in this bench."""
    make = bench._make

    def made(*args: Any, **options: Any) -> Any:
        config = make(*args, **options)
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=enabled, publisher="null")
        return config

    bench._make = made  # type: ignore[assignment]
    return bench


def told(bench: TierBench) -> list[BlockStored]:
    return [one for one in bench.events if isinstance(one, BlockStored) and one.medium != "GPU"]


@pytest.mark.parametrize("window", [None, 64])
def test_what_is_saved_is_told_as_vllm_tells_of_its_own(bench_of: Benches, window: int | None) -> None:
    with with_events(bench_of(window=window, batched_tokens=96)) as bench:
        name = bench.add(150, max_tokens=12)
        bench.run()
        prompt = bench.results[name].prompt
        mine, own = told(bench), [one for one in bench.events if isinstance(one, BlockStored) and one.medium == "GPU"]
        assert mine and {one.medium for one in mine} == {"CPU"} and {one.locality for one in mine} == {"LOCAL"}
        saved = {
            (group, key) for job in bench.store.saved for group, keys in enumerate(job.hashes) for key in cut(keys)
        }
        hashes = [one.block_hashes for one in mine]
        assert sum(map(len, hashes)) == len(saved) and sum(
            len(ids) for job in bench.store.saved for ids in job.block_ids
        )
        assert {(one.group_idx, h) for one in mine for h in one.block_hashes} == {
            (group, event_wire.external(key, int_hashes=True)) for group, key in saved
        }
        chain = {
            h: (parent, tuple(one.token_ids[16 * i : 16 * (i + 1)]))
            for one in own
            if one.group_idx == 0
            for i, (h, parent) in enumerate(
                zip(one.block_hashes, [one.parent_block_hash, *one.block_hashes], strict=False)
            )
        }
        for one in mine:
            assert one.block_size == 16 and len(one.token_ids) == 16 * len(one.block_hashes)
            assert (one.lora_id, one.lora_name) == (None, None) and one.extra_keys == [None] * len(one.block_hashes)
            parents = [one.parent_block_hash, *one.block_hashes]
            for i, h in enumerate(one.block_hashes):
                assert chain[h] == (parents[i], tuple(one.token_ids[16 * i : 16 * (i + 1)]))
        first = next(one for one in mine if one.parent_block_hash is None)
        assert list(first.token_ids) == list(prompt[: len(first.token_ids)])
        assert not [one for one in bench.events if isinstance(one, BlockRemoved) and one.medium != "GPU"]


def cut(keys: bytes) -> list[bytes]:
    return [keys[at : at + 32] for at in range(0, len(keys), 32)]


def test_the_owner_is_the_store_and_not_the_child(bench_of: Benches) -> None:
    """Where the stores' own stream tells that a block is gone, the reader must find the same owner."""
    with with_events(bench_of()) as bench:
        bench.add(40)
        bench.run()
        assert {one.ownership for one in told(bench)} == {bench.tier._asker.store} != {""}


@pytest.mark.parametrize("enabled", [False, None])
def test_nothing_is_kept_where_vllm_publishes_nothing(bench_of: Benches, enabled: bool | None) -> None:
    bench = bench_of()
    with bench if enabled is None else with_events(bench, enabled):
        bench.add(40)
        bench.run()
        assert bench.tier._events is None and bench.tier.take_events() == [] and not told(bench)


def test_what_only_this_engine_can_find_is_not_told(bench_of: Benches, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other engine knows an adapter's blocks, or those after a reset, by the hash that would be told; and the
    store's own stream could never say that they are gone."""
    with with_events(bench_of()) as bench:
        with monkeypatch.context() as patch:
            patch.setattr(fake_worker, "Request", functools.partial(Request, lora_request=LoRARequest("a", 1, "/a")))
            bench.add(40)
        bench.run()
        assert not told(bench) and bench.store.saved
        assert bench.connector.reset_cache()
        bench.add(40, seed=3)
        bench.run()
        assert not told(bench)


def test_a_save_of_which_something_was_skipped_or_failed_is_not_told() -> None:
    events = TierEvents(16, "CPU")
    for job, ok in ((0, False), (1, True)):
        events._planned = [BlockStored([job], None, [], 16, None, "CPU", None)]
        events.begun(JobId(job))
        events.ended(JobId(job), ok, "store")
    assert [one.block_hashes for one in events.take()] == [[1]] and not events._open and events.take() == []


def test_a_key_is_vllms_hash_unless_it_is_private() -> None:
    assert block_key(b"h" * 32) == b"h" * 32
