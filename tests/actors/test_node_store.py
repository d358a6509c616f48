"""The store as the plain class it is, over real memory: bytes in, bytes out, and nothing else is ever served."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raykv.actors import store_files
from raykv.actors.node_store import NodeStore
from raykv.errors import StoreError
from raykv.store_messages import Cascade, JobDone, LookedUp, Medium, Settle, StoreSpec, TierSpec
from raykv.types import EngineId, JobId, LeaseId, Rank, StoreLife
from tests.support.kv_rank import E, KVRank, load_job, look_up, save_job
from tests.support.waiting import eventually

pytestmark = pytest.mark.process

SLOT = 16384  # of KVRank's blocks: 2 layers x 4 heads x 8 tokens x 64 floats
R0, R1 = Rank(0), Rank(1)


class Harness:
    """Stores and ranks that end with the test. Every store is checked at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stores: list[NodeStore] = []
        self.ranks: list[KVRank] = []
        self.jobs = 0

    def spec(self, host: int = 16, disk: int = 0, **options: Any) -> StoreSpec:
        """Capacities in slots; 0 leaves a tier out."""
        tiers = [TierSpec(Medium.HOST, host * SLOT)] if host else []
        if disk:
            tiers.append(TierSpec(Medium.DISK, disk * SLOT, str(self.folder / "disk")))
        return StoreSpec("test", tuple(tiers), **options)

    def store(self, spec: StoreSpec | None = None, **options: Any) -> NodeStore:
        self.stores.append(NodeStore(spec or self.spec(), "test", shm=self.folder, **options))
        return self.stores[-1]

    def rank(self, store: NodeStore | None, *args: Any, **options: Any) -> KVRank:
        self.ranks.append(KVRank(*args, **options))
        if store is not None:
            store.attach(self.ranks[-1].attach)
        return self.ranks[-1]

    def put(self, store: NodeStore, rank: KVRank, prompt: str, *block_ids: Any, commit: bool = True) -> JobDone:
        """Save the first blocks of a prompt, and commit them."""
        self.jobs += 1
        attach = rank.attach
        job = save_job(self.jobs, prompt, *block_ids)
        _, (done,) = store.save(store.life, attach.engine, attach.rank, [job])
        if commit and done.ok:
            store.settle(attach.engine, Settle(commits=(job.job,)))
        return done

    def get(self, store: NodeStore, rank: KVRank, found: LookedUp, *block_ids: Any) -> JobDone:
        self.jobs += 1
        attach = rank.attach
        _, (done,) = store.load(store.life, attach.engine, attach.rank, [load_job(self.jobs, found.lease, *block_ids)])
        return done

    def close(self) -> None:
        for store in self.stores:
            store.check_integrity()
            store.shutdown(remove_host=True)
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def h(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    harness.close()


# -- bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "disk"), [(16, 0), (0, 16), (16, 16)])
@pytest.mark.parametrize("checksum", [True, False])
def test_what_was_saved_comes_back_byte_for_byte(h: Harness, host: int, disk: int, checksum: bool) -> None:
    store = h.store(h.spec(host, disk, checksum=checksum))
    rank = h.rank(store)
    before = rank.blocks([3, 1, 4, 5])
    done = h.put(store, rank, "p", [3, 1, 4, 5], commit=False)
    assert (done.ok, done.skipped, done.nbytes) == (True, 0, 4 * SLOT)
    assert store.look_up(E, look_up("p", 4)).num_blocks == 0, "not before it is committed"
    store.settle(E, Settle(commits=(JobId(h.jobs),)))
    rank.wipe(range(24))
    found = store.look_up(E, look_up("p", 9))
    medium = Medium.HOST if host else Medium.DISK
    assert (found.num_blocks, found.media) == (4, (medium,) * 4)
    done = h.get(store, rank, found, [20, 2, 9, 11])
    assert (done.ok, done.bad_blocks, done.media, done.nbytes) == (True, (), {medium: 4}, 4 * SLOT)
    assert rank.blocks([20, 2, 9, 11]) == before
    store.settle(E, Settle(releases=(found.lease or LeaseId(0),)))
    assert store.status().leases == 0


def test_a_block_is_stored_once(h: Harness) -> None:
    store = h.store()
    rank = h.rank(store)
    h.put(store, rank, "p", [0, 1])
    done = h.put(store, rank, "p", [5, 6, 7])
    assert (done.ok, done.nbytes) == (True, SLOT)
    assert store.status().tiers[0].used == 3


def test_engines_share_what_has_one_fingerprint_and_nothing_else(h: Harness) -> None:
    store = h.store()
    one, two = h.rank(store), h.rank(store, EngineId("two"))
    stranger = h.rank(store, EngineId("stranger"), model="another")
    before = one.blocks([0, 1, 2])
    h.put(store, one, "p", [0, 1, 2])
    found = store.look_up(EngineId("two"), look_up("p", 3))
    assert h.get(store, two, found, [8, 9, 10]).ok
    assert two.blocks([8, 9, 10]) == before
    assert store.look_up(EngineId("stranger"), look_up("p", 3)).num_blocks == 0
    assert not h.get(store, stranger, dataclasses.replace(found, lease=LeaseId(7)), [1, 2, 3]).ok


def test_two_ranks_are_found_together_only(h: Harness) -> None:
    store = h.store()
    ranks = [h.rank(store, E, rank, 2) for rank in (0, 1)]
    before = [rank.blocks([4, 5]) for rank in ranks]
    job = save_job(1, "p", [4, 5])
    store.save(store.life, E, R0, [job])
    store.save(store.life, E, R1, [save_job(2, "q", [4, 5])])
    store.settle(E, Settle(commits=(JobId(1), JobId(2))))
    assert store.look_up(E, look_up("p", 2)).num_blocks == 0, "rank 1 has none of p"
    store.save(store.life, E, R1, [save_job(3, "p", [4, 5])])
    store.settle(E, Settle(commits=(JobId(3),)))
    found = store.look_up(E, look_up("p", 2))
    assert found.num_blocks == 2
    for rank, bytes_before in zip(ranks, before, strict=True):
        assert h.get(store, rank, found, [10, 11]).ok
        assert rank.blocks([10, 11]) == bytes_before


def test_a_rank_that_does_not_write_loads_what_another_has_written(h: Harness) -> None:
    store = h.store()
    ranks = [h.rank(store, E, rank, 2, model="mla", writes=rank == 0) for rank in (0, 1)]
    before = ranks[0].blocks([4, 5])
    for rank in (R0, R1):
        _, (done,) = store.save(store.life, E, rank, [save_job(1, "p", [4, 5])])
        assert done.ok and done.nbytes == (2 * SLOT if rank == 0 else 0)
    store.settle(E, Settle(commits=(JobId(1),)))
    found = store.look_up(E, look_up("p", 2))
    assert found.num_blocks == 2
    assert h.get(store, ranks[1], found, [0, 1]).ok
    assert ranks[1].blocks([0, 1]) == before


def test_groups_with_blocks_of_their_own_sizes_and_a_window(h: Harness) -> None:
    store = h.store()
    rank = h.rank(store, windows=(0, 2))
    full, window = rank.blocks([0, 1, 2, 3], 0), rank.blocks([12, 13, 14, 15], 1)
    h.put(store, rank, "p", [0, 1, 2, 3], [12, 13, 14, 15])
    found = store.look_up(E, look_up("p", 4))
    assert found.num_blocks == 4
    job = dataclasses.replace(
        load_job(99, found.lease, [5, 6, 7, 8]), indices=((0, 1, 2, 3), (2, 3)), block_ids=((5, 6, 7, 8), (20, 21))
    )
    _, (done,) = store.load(store.life, E, R0, [job])
    assert done.ok
    assert rank.blocks([5, 6, 7, 8], 0) == full and rank.blocks([20, 21], 1) == window[2:]


# -- what is never served -----------------------------------------------------------------------------------


def test_an_aborted_job_is_never_served_and_its_slots_come_back(h: Harness) -> None:
    store = h.store()
    rank = h.rank(store)
    h.put(store, rank, "p", [0, 1], commit=False)
    assert store.status().tiers[0].writing == 2
    store.settle(E, Settle(aborts=(JobId(h.jobs),)))
    assert store.look_up(E, look_up("p", 2)).num_blocks == 0
    assert (store.status().tiers[0].writing, store.status().tiers[0].used) == (0, 0)


@pytest.mark.parametrize(("host", "disk", "medium"), [(16, 0, 0), (0, 16, 0)])
def test_rotten_bytes_are_quarantined_and_recomputed(h: Harness, host: int, disk: int, medium: int) -> None:
    store = h.store(h.spec(host, disk))
    rank = h.rank(store)
    before = rank.blocks([0, 1, 2])
    h.put(store, rank, "p", [0, 1, 2])
    rot(h, store, slot=1)
    found = store.look_up(E, look_up("p", 3))
    done = h.get(store, rank, found, [10, 11, 12])
    assert (done.ok, done.bad_blocks) == (False, (11,))
    assert rank.block(10) == before[0] and rank.block(12) == before[2]
    store.settle(E, Settle(releases=(found.lease or LeaseId(0),)))
    assert store.look_up(E, look_up("p", 3)).num_blocks == 1
    status = store.status().tiers[0]
    assert (status.quarantined, status.bad_reads) == (1, 1)


def rot(h: Harness, store: NodeStore, slot: int) -> None:
    """Flip one bit of a slot's bytes behind the store's back."""
    stock = store._stock
    assert stock is not None
    rows = stock.tiers.rows(0)
    if rows is not None:
        rows[slot, 100] ^= 4
        return
    with (h.folder / "disk" / "raykv.slots").open("r+b") as file:
        file.seek(slot * SLOT + 100)
        byte = file.read(1)[0]
        file.seek(slot * SLOT + 100)
        file.write(bytes([byte ^ 4]))
        file.flush()
        os.fsync(file.fileno())


def test_a_job_for_another_life_touches_nothing(h: Harness) -> None:
    store = h.store()
    rank = h.rank(store)
    h.put(store, rank, "p", [0])
    found = store.look_up(E, look_up("p", 1))
    before = rank.block(9)
    _, (done,) = store.load(StoreLife("former"), E, R0, [load_job(5, found.lease, [9])])
    assert (done.ok, done.bad_blocks) == (False, (9,)) and rank.block(9) == before
    _, (saved,) = store.save(StoreLife("former"), E, R0, [save_job(6, "q", [1])])
    assert not saved.ok and store.status().tiers[0].writing == 0


def test_a_lease_of_another_life_means_nothing(h: Harness) -> None:
    first = h.store()
    rank = h.rank(first)
    h.put(first, rank, "p", [0])
    old = first.look_up(E, look_up("p", 1))
    first.shutdown(remove_host=False)
    second = h.store()
    second.attach(rank.attach)
    assert second.look_up(E, look_up("p", 1, "other")).num_blocks == 1, "the same number inside, if counted alike"
    done = h.get(second, rank, old, [9])
    assert not done.ok and "lease" in done.error
    second.settle(E, Settle(releases=(old.lease or LeaseId(0),)))
    assert second.status().leases == 1


# -- tiers --------------------------------------------------------------------------------------------------


def test_what_the_host_needs_room_for_goes_to_the_disk_and_comes_back(h: Harness) -> None:
    store = h.store(h.spec(host=16, disk=64))
    rank = h.rank(store)
    before = rank.blocks(range(24))
    for block in range(24):
        h.put(store, rank, f"p{block}", [block])
        eventually(lambda: store.status().tiers[0].used <= 15)  # one slot is kept free
    rank.wipe(range(24))
    media = set()
    for block in range(24):
        found = store.look_up(E, look_up(f"p{block}", 1))
        assert h.get(store, rank, found, [block]).ok, block
        media |= set(found.media)
    assert rank.blocks(range(24)) == before
    assert media == {Medium.HOST, Medium.DISK}


def test_a_block_read_twice_from_disk_is_promoted(h: Harness) -> None:
    store = h.store(h.spec(host=16, disk=64, cascade=Cascade.WRITE))
    rank = h.rank(store)
    before = rank.blocks([0, 1, 2])
    h.put(store, rank, "p", [0, 1, 2])
    eventually(lambda: store.status().tiers[1].used == 3)
    store.clear(Medium.HOST)
    for medium, blocks in ((Medium.DISK, [10, 11, 12]), (Medium.DISK, [13, 14, 15]), (Medium.HOST, [16, 17, 18])):
        found = store.look_up(E, look_up("p", 3))
        assert set(found.media) == {medium}
        done = h.get(store, rank, found, blocks)
        assert done.ok and done.media == {medium: 3}
        assert rank.blocks(blocks) == before
    assert store.status().tiers[0].used == 3


def test_a_prefix_over_two_tiers(h: Harness) -> None:
    store = h.store(h.spec(host=16, disk=64, cascade=Cascade.WRITE))
    rank = h.rank(store)
    before = rank.blocks([0, 1, 2, 3])
    h.put(store, rank, "p", [0, 1])
    eventually(lambda: store.status().tiers[1].used == 2)
    store.clear(Medium.HOST)
    h.put(store, rank, "p", [0, 1, 2, 3])
    found = store.look_up(E, look_up("p", 4))
    assert found.media == (Medium.DISK, Medium.DISK, Medium.HOST, Medium.HOST)
    done = h.get(store, rank, found, [10, 11, 12, 13])
    assert done.media == {Medium.DISK: 2, Medium.HOST: 2} and rank.blocks([10, 11, 12, 13]) == before


def test_a_save_larger_than_the_store_keeps_its_beginning(h: Harness) -> None:
    store = h.store(h.spec(host=4))
    rank = h.rank(store)
    done = h.put(store, rank, "p", range(10))
    assert (done.ok, done.skipped) == (True, 6)
    assert store.look_up(E, look_up("p", 10)).num_blocks == 4


def test_a_backlog_is_bounded_by_skipping(h: Harness) -> None:
    store = h.store(backlog_nbytes=3 * SLOT)
    rank = h.rank(store)
    done = h.put(store, rank, "p", range(10))
    assert (done.ok, done.skipped) == (True, 7)
    assert not h.put(store, rank, "q", range(3)).skipped, "what has ended no longer counts"


def test_a_disk_that_fails_is_switched_off_and_the_host_serves_on(
    h: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = h.store(h.spec(host=16, disk=16, cascade=Cascade.WRITE))
    rank = h.rank(store)

    def refuse(*_: Any) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "pwrite", refuse)
    h.put(store, rank, "p", [0, 1])
    eventually(lambda: bool(store.status().tiers[1].off))
    assert len([record for record in caplog.records if "switched off" in record.message]) == 1
    h.put(store, rank, "p", [0, 1, 2])
    found = store.look_up(E, look_up("p", 3))
    assert found.num_blocks == 3 and h.get(store, rank, found, [5, 6, 7]).ok


def test_a_disk_that_fails_in_a_load_costs_the_load_only(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    store = h.store(h.spec(host=16, disk=16, cascade=Cascade.WRITE))
    rank = h.rank(store)
    h.put(store, rank, "p", [0, 1])
    eventually(lambda: store.status().tiers[1].used == 2)
    store.clear(Medium.HOST)
    found = store.look_up(E, look_up("p", 2))

    def refuse(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", refuse)
    done = h.get(store, rank, found, [8, 9])
    assert (done.ok, set(done.bad_blocks)) == (False, {8, 9})
    assert store.status().tiers[1].off and store.status().tiers[1].quarantined == 0
    assert store.look_up(E, look_up("p", 2)).num_blocks == 0


# -- lives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "disk"), [(16, 0), (0, 16), (16, 16)])
def test_the_next_life_serves_what_was_committed(h: Harness, host: int, disk: int) -> None:
    first = h.store(h.spec(host, disk))
    rank = h.rank(first)
    before = rank.blocks([0, 1, 2])
    h.put(first, rank, "p", [0, 1, 2])
    h.put(first, rank, "q", [3], commit=False)
    first.shutdown(remove_host=False)
    second = h.store(h.spec(host, disk))
    assert second.life != first.life
    assert second.status().tiers[0].used == 3, "opened before anybody attaches"
    second.attach(rank.attach)
    assert second.look_up(E, look_up("q", 1)).num_blocks == 0
    found = second.look_up(E, look_up("p", 3))
    assert h.get(second, rank, found, [9, 10, 11]).ok
    assert rank.blocks([9, 10, 11]) == before


def test_without_checksums_the_next_life_serves_nothing_old(h: Harness) -> None:
    first = h.store()
    rank = h.rank(first)
    h.put(first, rank, "p", [0])
    first.shutdown(remove_host=False)
    second = h.store(h.spec(checksum=False))
    second.attach(rank.attach)
    assert second.look_up(E, look_up("p", 1)).num_blocks == 0


def test_rot_between_two_lives_is_found(h: Harness) -> None:
    first = h.store()
    rank = h.rank(first)
    h.put(first, rank, "p", [0, 1])
    first.shutdown(remove_host=False)
    second = h.store()
    rot(h, second, slot=0)
    second.attach(rank.attach)
    found = second.look_up(E, look_up("p", 2))
    assert h.get(second, rank, found, [9, 10]).bad_blocks == (9,)


def test_the_scrubber_finds_rot_that_nobody_reads(h: Harness) -> None:
    store = h.store()
    rank = h.rank(store)
    h.put(store, rank, "p", [0, 1])
    rot(h, store, slot=1)
    assert store._works is not None
    for _ in range(4):
        store._works.mover.scrub(0)
    assert store.status().tiers[0].quarantined == 1
    assert store.look_up(E, look_up("p", 2)).num_blocks == 1


# -- engines ------------------------------------------------------------------------------------------------


def test_an_engine_that_dies_gives_everything_back(h: Harness) -> None:
    store = h.store()
    worker = subprocess.Popen(["sleep", "1000"])
    try:
        dying = h.rank(store, EngineId("dying"), pid=worker.pid)
        h.put(store, dying, "p", [0, 1])
        h.put(store, dying, "q", [0, 1], commit=False)
        assert store.look_up(EngineId("dying"), look_up("p", 2)).num_blocks == 2
        status = store.status()
        assert (status.leases, status.tiers[0].writing, status.engines) == (1, 2, ("dying",))
    finally:
        worker.kill()
        worker.wait()
    eventually(lambda: store.status().engines == ())
    status = store.status()
    assert (status.leases, status.tiers[0].writing, status.tiers[0].used) == (0, 0, 2)
    assert not h.put(store, dying, "r", [3]).ok


def test_a_lease_expires(h: Harness) -> None:
    store = h.store(h.spec(lease_s=0.05))
    rank = h.rank(store)
    h.put(store, rank, "p", [0])
    found = store.look_up(E, look_up("p", 1))
    eventually(lambda: store.status().leases == 0)
    done = h.get(store, rank, found, [5])
    assert (done.ok, done.bad_blocks) == (False, (5,))


def test_detached_is_detached(h: Harness) -> None:
    store = h.store()
    rank = h.rank(store)
    h.put(store, rank, "p", [0], commit=False)
    store.detach(E, R0)
    store.detach(E, R0)
    assert store.status().engines == () and store.status().tiers[0].writing == 0
    assert not h.put(store, rank, "p", [0]).ok
    store.attach(rank.attach)
    assert h.put(store, rank, "p", [0]).ok


def test_a_rank_that_attaches_again_replaces_itself(h: Harness) -> None:
    store = h.store()
    ranks = [h.rank(store, E, rank, 2) for rank in (0, 1)]
    store.attach(ranks[0].attach)  # its first answer was lost
    for rank in ranks:
        h.put(store, rank, "p", [0])
    assert store.look_up(E, look_up("p", 1)).num_blocks == 1


def test_an_engine_id_in_use_is_refused(h: Harness) -> None:
    store = h.store()
    worker = subprocess.Popen(["sleep", "1000"])
    try:
        h.rank(store)
        other = h.rank(None, pid=worker.pid)
        with pytest.raises(StoreError, match="engine_id"):
            store.attach(other.attach)
    finally:
        worker.kill()
        worker.wait()
    with pytest.raises(StoreError, match="has died"):
        store.attach(other.attach)


def test_an_incomplete_engine_has_no_hits(h: Harness) -> None:
    store = h.store()
    one = h.rank(store, E, 0, 2)
    h.put(store, one, "p", [0])
    assert store.look_up(E, look_up("p", 1)).num_blocks == 0
    assert store.look_up(EngineId("unknown"), look_up("p", 1)).num_blocks == 0


def test_larger_blocks_than_the_slots_are_refused(h: Harness) -> None:
    store = h.store()
    h.rank(store)
    with pytest.raises(StoreError, match="another `store` name"):
        h.rank(store, EngineId("large"), width=128)
    h.rank(store, EngineId("small"), width=32)


def test_a_tier_without_room_for_one_block_is_refused(h: Harness) -> None:
    store = h.store(dataclasses.replace(h.spec(), tiers=(TierSpec(Medium.HOST, 5000),)))
    with pytest.raises(StoreError, match="capacity"):
        h.rank(store)


def test_a_full_disk_is_said_to_the_engine_and_no_tier_is_left_open(
    h: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.posix_fallocate

    def full(fd: int, start: int, nbytes: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("raykv.slots"):
            raise OSError(errno.ENOSPC, "No space left on device")
        really(fd, start, nbytes)

    store = h.store(h.spec(host=16, disk=16))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StoreError, match="smaller capacity"):
            h.rank(store)
    assert h.put(store, h.rank(store), "p", [0]).ok, "the next one finds room"


def test_a_pool_in_use_is_refused(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raykv.actors.store_pools.LOCK_WAIT_S", 0.1)
    h.rank(h.store())
    second = h.store()
    with pytest.raises(StoreError, match="in use"):
        h.rank(second, EngineId("two"))


def test_only_host_tiers_that_nobody_holds_are_stale(h: Harness) -> None:
    store = h.store()
    h.rank(store)
    mine = f"raykv-{os.getuid()}-"
    (h.folder / f"{mine}raykv-left.host").write_bytes(b"of a killed store")
    (h.folder / f"{mine}raykv-left").write_bytes(b"something else")
    (h.folder / f"raykv-{os.getuid() + 1}-raykv-theirs.host").write_bytes(b"of another user")
    assert store_files.remove_stale(h.folder) == [f"{mine}raykv-left.host"]
    assert store_files.host_path("test", "test", h.folder).exists()
