"""What a store says of itself: every figure is that of what was done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raykv.actors.node_store import NodeStore
from raykv.observe.samples import Bounded
from raykv.observe.store import store_samples
from raykv.store_messages import LookedUp, Medium, Settle, StoreSpec, TierSpec
from raykv.types import JobId
from tests.support.kv_rank import E, KVRank, load_job, look_up, save_job

pytestmark = pytest.mark.process

SLOT = 16384


class Small:
    """A store with a host tier of 8 blocks, and one rank."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.store = NodeStore(StoreSpec("test", (TierSpec(Medium.HOST, 8 * SLOT),)), "test", shm=folder, **options)
        self.rank = KVRank()
        self.store.attach(self.rank.attach)
        self.jobs = 0

    def put(self, prompt: str, count: int) -> None:
        self.jobs += 1
        self.store.save(self.store.life, E, self.rank.attach.rank, [save_job(self.jobs, prompt, list(range(count)))])
        self.store.settle(E, Settle(commits=(JobId(self.jobs),)))

    def ask(self, prompt: str, count: int) -> LookedUp:
        found = self.store.look_up(E, look_up(prompt, count))
        if found.lease is not None:
            self.store.settle(E, Settle(releases=(found.lease,)))
        return found

    def get(self, prompt: str, count: int) -> None:
        self.jobs += 1
        found = self.store.look_up(E, look_up(prompt, count))
        assert found.num_blocks == count and found.lease is not None
        self.store.load(
            self.store.life, E, self.rank.attach.rank, [load_job(self.jobs, found.lease, list(range(count)))]
        )
        self.store.settle(E, Settle(releases=(found.lease,)))

    def close(self) -> None:
        self.store.check_integrity()
        self.store.shutdown(remove_host=True)
        self.rank.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Small]:
    found = Small(tmp_path)
    yield found
    found.close()


def test_what_was_thrown_out_is_below_the_ceiling(small: Small) -> None:
    small.put("a", 8)
    assert small.ask("a", 8).num_blocks == 8
    small.put("b", 6)  # throws out 6 of a's
    small.ask("a", 8)
    small.ask("c", 8)  # never held
    found = small.store.metrics()
    assert (found["counts"]["look_ups"], found["asked_blocks"], found["counts"]["hit_blocks"]) == (3, 24, 8 + 2)
    assert found["reusable_blocks"] == 8 + 8
    tier = found["tiers"]["host"]
    assert (tier["evicted"], tier["never_read"], tier["age"].count) == (6, 0, 6)
    small.put("c", 8)  # throws out b, which nobody has read, and the rest of a
    tier = small.store.metrics()["tiers"]["host"]
    assert (tier["evicted"], tier["never_read"]) == (14, 6)


def test_bytes_and_times_are_those_of_the_copies(small: Small) -> None:
    small.put("a", 5)
    small.put("a", 5)  # it is there: nothing is copied
    small.get("a", 5)
    found = small.store.metrics()
    assert found["bytes"] == {("host", "write", "engine"): 5 * SLOT, ("host", "read", "engine"): 5 * SLOT}
    assert all(seconds > 0 for seconds in found["busy_s"].values()) and found["busy_s"].keys() == found["bytes"].keys()
    counts = {what: buckets.count for what, buckets in found["seconds"].items()}
    assert counts == {"look_up": 1, "load": 1, "save": 2, "reach": 0}
    assert (found["counts"]["saved_blocks"], found["counts"]["loaded_blocks"]) == (5, 5)


def test_bad_bytes_are_a_fault_and_no_bytes(small: Small) -> None:
    small.put("a", 4)
    rows = small.store._stock.tiers.rows(0)  # type: ignore[union-attr]
    assert rows is not None
    rows.fill_(7)
    small.get("a", 4)
    found = small.store.metrics()
    assert found["faults"] == {"load failed": 1} and found["tiers"]["host"]["bad_reads"] == 4
    assert ("host", "read", "engine") not in found["bytes"]
    samples = {(one.metric, *one.labels): one.value for one in store_samples("s", "n", 0.0, found)}
    assert samples["raykv_faults_total", "s", "n", "bad read"] == 4
    assert samples["raykv_tier_slots", "s", "n", "host", "quarantined"] == 4


def test_blocks_that_find_no_room_say_why(tmp_path: Path) -> None:
    small = Small(tmp_path, backlog_nbytes=3 * SLOT)
    try:
        small.put("a", 5)
        found = small.store.metrics()
        assert (found["counts"]["over_backlog"], found["counts"]["no_room"]) == (2, 0)
        assert found["gauges"]["backlog_nbytes"] == 0, "none is under way now"
    finally:
        small.close()


def test_a_store_that_no_engine_has_come_to_has_figures(tmp_path: Path) -> None:
    store = NodeStore(StoreSpec("test", (TierSpec(Medium.HOST, 8 * SLOT),)), "test", shm=tmp_path)
    try:
        points = Bounded().points(store_samples("s", "n", 0.0, store.metrics()))
        assert {point.value for point in points} == {0.0}
    finally:
        store.shutdown(remove_host=True)
