"""Stores of different nodes over one directory: each serves what any of them wrote, and none depends on it."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raykv.actors import store_shared
from raykv.actors.node_store import NodeStore
from raykv.admin_messages import Selection, tenant_tag
from raykv.errors import DiskError, StoreError
from raykv.storage import fs_folder
from raykv.storage.fs_header import HEADER_NBYTES, is_block
from raykv.store_messages import Cascade, JobDone, LookedUp, Medium, Settle, StoreSpec, TierSpec
from raykv.types import EngineId, LeaseId
from tests.support.kv_rank import KVRank, load_job, look_up, save_job
from tests.support.waiting import eventually

pytestmark = pytest.mark.process

SLOT = 16384  # of KVRank's blocks
FILE = SLOT + HEADER_NBYTES
PATIENCE = 30.0
FS, HOST = Medium.FS, Medium.HOST


class Node:
    """A node: a store over the shared folder, and an engine with random blocks of its own."""

    def __init__(self, folder: Path, name: str, host: int, files: int, disk: int = 0, **options: Any) -> None:
        own = folder / name
        own.mkdir(exist_ok=True)
        tiers = [TierSpec(HOST, host * SLOT)] if host else []
        if disk:
            tiers.append(TierSpec(Medium.DISK, disk * SLOT, str(own / "disk")))
        tiers.append(TierSpec(FS, files * FILE, str(folder / "shared")))
        options.setdefault("cascade", Cascade.WRITE)
        spec = StoreSpec("test", tuple(tiers), **options)
        self.store = NodeStore(spec, "test", shm=own)
        self.ranks: list[KVRank] = []
        self.jobs = 0
        self.engine = EngineId(name)

    def join(self, *args: Any, **options: Any) -> KVRank:
        rank = KVRank(self.engine, *args, **options)
        self.ranks.append(rank)
        self.store.attach(rank.attach)
        return rank

    @property
    def rank(self) -> KVRank:
        return self.ranks[0] if self.ranks else self.join()

    def put(self, prompt: str, *block_ids: Any) -> JobDone:
        """Save and commit on all ranks."""
        self.jobs += 1
        job = save_job(self.jobs, prompt, *block_ids)
        for rank in self.ranks or [self.rank]:
            _, (done,) = self.store.save(self.store.life, self.engine, rank.attach.rank, [job])
            assert done.ok
        self.store.settle(self.engine, Settle(commits=(job.job,)))
        return done

    def look(self, prompt: str, count: int) -> LookedUp:
        assert self.ranks or self.rank
        return self.store.look_up(self.engine, look_up(prompt, count))

    def get(self, found: LookedUp, *block_ids: Any, rank: KVRank | None = None) -> JobDone:
        self.jobs += 1
        rank = rank or self.rank
        job = load_job(self.jobs, found.lease, *block_ids)
        _, (done,) = self.store.load(self.store.life, self.engine, rank.attach.rank, [job])
        return done

    def release(self, found: LookedUp) -> None:
        self.store.settle(self.engine, Settle(releases=(found.lease or LeaseId(-1),)))

    def tier(self, medium: Medium) -> Any:
        return next(tier for tier in self.store.status().tiers if tier.medium is medium)


class Nodes:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Node] = []
        (folder / "shared").mkdir(mode=0o700)

    def node(self, host: int = 16, files: int = 60, **options: Any) -> Node:
        self.nodes.append(Node(self.folder, f"n{len(self.nodes)}", host, files, **options))
        return self.nodes[-1]

    def files(self) -> list[Path]:
        return [path for path in (self.folder / "shared").rglob("*") if is_block(path.name)]

    def close(self) -> None:
        for node in self.nodes:
            node.store.check_integrity()
            node.store.shutdown(remove_host=True)
            for rank in node.ranks:
                rank.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.close()


# -- bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("disk", [0, 8])
def test_a_node_serves_what_another_has_saved(cluster: Nodes, disk: int, checksum: bool) -> None:
    a, b = cluster.node(disk=disk, checksum=checksum), cluster.node(disk=disk, checksum=checksum)
    blocks = [3, 1, 4, 5]
    a.put("p", blocks)
    before = a.rank.blocks(blocks)
    eventually(lambda: len(cluster.files()) == 4)
    found = b.look("p", 9)
    assert (found.num_blocks, found.media) == (4, (FS,) * 4)
    done = b.get(found, [20, 2, 9, 11])
    assert (done.ok, done.media, done.nbytes) == (True, {FS: 4}, 4 * SLOT)
    assert b.rank.blocks([20, 2, 9, 11]) == before
    b.release(found)
    # Read twice, it is promoted; and then it comes from there.
    found = b.look("p", 4)
    assert b.get(found, [0, 1, 2, 3]).media == {FS: 4}
    b.release(found)
    found = b.look("p", 4)
    assert found.media == (HOST,) * 4
    b.rank.wipe(range(24))
    assert b.get(found, [7, 8, 9, 10]).ok and b.rank.blocks([7, 8, 9, 10]) == before
    b.release(found)
    b.store.check_integrity()
    assert (a.tier(FS).used, b.tier(FS).hits, b.tier(FS).bad_reads) == (4, 8, 0)


def test_what_was_found_in_the_folder_is_its_askers(cluster: Nodes) -> None:
    """Files say nothing of tenants, requests do: in this node's tiers the block is his who asked."""
    a, b = cluster.node(), cluster.node()
    a.put("p", [3, 1, 4])
    a.put("q", [7])
    eventually(lambda: len(cluster.files()) == 4)
    tag = tenant_tag("alice")
    for _ in range(2):  # read twice, it is promoted
        found = b.store.look_up(b.engine, dataclasses.replace(look_up("p", 9), tenant=tag)) if b.rank else None
        assert found is not None and b.get(found, [20, 2, 9]).ok
        b.release(found)
    found = b.look("q", 1)
    b.release(found)
    eventually(lambda: b.tier(HOST).used == 3)
    [mine] = b.store.view().tenants
    assert (mine.tag, mine.blocks) == (tag.hex(), 3)
    assert b.store.forget(Selection(tenant=tag.hex())).blocks and not b.tier(HOST).used
    assert b.tier(FS).used == 1, "the other one is nobody's"


def test_a_store_that_comes_back_finds_its_files(cluster: Nodes) -> None:
    a = cluster.node()
    a.put("p", [1, 2, 3])
    before = a.rank.blocks([1, 2, 3])
    eventually(lambda: len(cluster.files()) == 3)
    a.store.shutdown(remove_host=True)
    b = cluster.node()
    found = b.look("p", 3)
    assert found.media == (FS,) * 3 and b.get(found, [4, 5, 6]).ok and b.rank.blocks([4, 5, 6]) == before


def test_with_cascade_evict_blocks_go_there_as_room_is_needed(cluster: Nodes) -> None:
    a, b = cluster.node(host=8, cascade=Cascade.EVICT), cluster.node()
    before = a.rank.blocks(range(24))
    for number in range(24):  # no more at once than the tier keeps free
        a.put(f"p{number}", [number])
        eventually(lambda: a.tier(HOST).used <= 7)
    assert len(cluster.files()) >= 24 - 8
    for number in range(24 - 8):
        found = b.look(f"p{number}", 1)
        assert found.media == (FS,) and b.get(found, [0]).ok
        assert b.rank.blocks([0]) == before[number : number + 1]
        b.release(found)


def test_ranks_groups_and_windows(cluster: Nodes) -> None:
    a, b = cluster.node(host=64), cluster.node()
    for node in (a, b):
        for rank in range(2):
            node.join(rank, 2, windows=(0, 2))
    ids = [0, 1, 2, 3, 4, 5]
    a.put("p", ids, ids)
    eventually(lambda: len(cluster.files()) == 24)
    found = b.look("p", 8)
    assert found.num_blocks == 6
    for one, other in zip(a.ranks, b.ranks, strict=True):
        job_ids = [10, 11, 12, 13, 14, 15], [22, 23]
        b.jobs += 1
        job = load_job(b.jobs, found.lease, *job_ids)
        job = type(job)(job.job, job.lease, (tuple(range(6)), (4, 5)), job.block_ids)
        _, (done,) = b.store.load(b.store.life, b.engine, other.attach.rank, [job])
        assert done.ok
        assert other.blocks(job_ids[0]) == one.blocks(ids)
        assert other.blocks(job_ids[1], group=1) == one.blocks([4, 5], group=1)
    b.release(found)


def test_another_models_blocks_are_not_found(cluster: Nodes) -> None:
    a, b = cluster.node(), cluster.node()
    b.join(model="another")
    a.put("p", [1, 2])
    eventually(lambda: len(cluster.files()) == 2)
    assert b.look("p", 2).num_blocks == 0


def test_a_damaged_file_is_never_loaded(cluster: Nodes) -> None:
    a, b = cluster.node(), cluster.node()
    a.put("p", [1, 2, 3])
    eventually(lambda: len(cluster.files()) == 3)
    found = b.look("p", 3)
    assert found.num_blocks == 3
    for path in cluster.files():
        with path.open("r+b") as file:
            file.seek(HEADER_NBYTES + 100)
            file.write(b"\xff\xfe\xfd")
    before = b.rank.blocks([4, 5, 6])
    done = b.get(found, [4, 5, 6])
    assert (done.ok, sorted(done.bad_blocks)) == (False, [4, 5, 6]) and b.rank.blocks([4, 5, 6]) == before
    b.release(found)
    assert cluster.files() == [] and b.look("p", 3).num_blocks == 0
    tier = b.tier(FS)
    assert (tier.bad_reads, tier.quarantined, tier.used) == (3, 0, 0)


def test_files_that_others_evict_are_misses_and_leave_no_entry(cluster: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = cluster.node(), cluster.node()
    a.put("p", [1, 2, 3])
    eventually(lambda: len(cluster.files()) == 3)
    found = b.look("p", 3)
    assert found.num_blocks == 3
    for path in cluster.files():
        path.unlink()
    done = b.get(found, [4, 5, 6])
    assert not done.ok and len(done.bad_blocks) == 3
    b.release(found)
    tier = b.tier(FS)
    assert (tier.used, tier.quarantined, tier.bad_reads) == (0, 0, 0)
    # What was seen long ago is asked for again before it is promised.
    eventually(lambda: a.tier(FS).used == 3)
    a.store.clear(HOST)
    assert a.look("p", 3).num_blocks == 3, "it was there a moment ago"
    a.release(a.look("p", 3))
    monkeypatch.setattr(store_shared, "FRESH_S", 0.0)
    assert a.look("p", 3).num_blocks == 0 and a.tier(FS).used == 0


def test_knowing_little_is_enough(cluster: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """More files than entries: what is forgotten is found again."""
    monkeypatch.setattr("raykv.storage.fs_pool.MAX_KNOWN", 4)
    a, b = cluster.node(), cluster.node()
    before = a.rank.blocks(range(12))
    for number in range(3):
        a.put(f"p{number}", list(range(4 * number, 4 * number + 4)))
        eventually(lambda number=number: len(cluster.files()) == 4 * number + 4)
    assert a.tier(FS).slots == 4
    for _ in range(2):
        for number in range(3):
            found = b.look(f"p{number}", 4)
            assert found.num_blocks == 4 and b.get(found, [20, 21, 22, 23]).ok
            assert b.rank.blocks([20, 21, 22, 23]) == before[4 * number : 4 * number + 4]
            b.release(found)


def test_long_prompts_are_found_whole(cluster: Nodes) -> None:
    a = cluster.node(host=256, files=300)
    a.join(blocks=200)
    a.put("p", list(range(200)))
    eventually(lambda: len(cluster.files()) == 200)
    b = cluster.node(host=256, files=300)
    eventually(lambda: b.look("p", 250).num_blocks == 200)  # in one look-up, on a machine with time to spare


# -- a directory that fails ---------------------------------------------------------------------------------


def test_look_ups_do_not_wait_for_a_slow_directory(cluster: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = cluster.node(), cluster.node()
    a.put("p", [1, 2])
    b.put("mine", [1, 2])
    eventually(lambda: len(cluster.files()) == 4)
    go, look = threading.Event(), fs_folder.SharedFolder.look

    def hanging(*args: Any) -> Any:
        go.wait(PATIENCE)
        return look(*args)

    monkeypatch.setattr(fs_folder.SharedFolder, "look", hanging)
    assert b.look("p", 2).num_blocks == 0
    shared = b.store._look_ups.shared
    assert shared is not None and shared._slow_until > time.monotonic()
    found = b.look("mine", 4)
    assert found.num_blocks == 2 and b.get(found, [5, 6]).ok, "its own tiers serve on"
    go.set()
    eventually(lambda: all(asked.future.done() for asked in shared._asked.values()))
    b.look("mine", 2)
    assert b.look("p", 2).num_blocks == 2, "late answers are used, without a wait"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EROFS])
def test_a_broken_directory_switches_the_tier_off_with_one_message(
    cluster: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    a = cluster.node()
    a.put("p", [1, 2])
    eventually(lambda: len(cluster.files()) == 2)

    def failing(*args: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fs_folder.SharedFolder, "write", failing)
    monkeypatch.setattr(fs_folder.SharedFolder, "check", failing)
    caplog.set_level(logging.ERROR)
    a.put("q", [3, 4])
    eventually(lambda: a.tier(FS).off != "")
    assert os.strerror(number) in a.tier(FS).off
    a.put("r", [5, 6])
    for prompt in ("p", "q", "r"):
        found = a.look(prompt, 2)
        assert found.media == (HOST, HOST) and a.get(found, [10, 11]).ok
        a.release(found)
    eventually(lambda: len(caplog.records) > 0)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "fs tier" in message and str(cluster.folder / "shared") in message


def test_a_directory_that_breaks_under_a_look_up_or_a_load(cluster: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **options: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    a, b, c = cluster.node(), cluster.node(), cluster.node()
    a.put("p", [1, 2])
    eventually(lambda: len(cluster.files()) == 2)
    found = b.look("p", 2)
    with monkeypatch.context() as patch:
        patch.setattr(fs_folder.SharedFolder, "read", failing)
        done = b.get(found, [5, 6])
        assert not done.ok and len(done.bad_blocks) == 2 and "Input/output" in b.tier(FS).off
        patch.setattr(fs_folder.SharedFolder, "look", failing)
        assert c.look("p", 2).num_blocks == 0 and "Input/output" in c.tier(FS).off
    b.release(found)
    assert b.look("p", 2).num_blocks == 0 and c.look("p", 2).num_blocks == 0, "off stays off"


def test_a_disk_that_fails_above_it_leaves_no_saves_to_it(cluster: Nodes) -> None:
    """A save is seen after its commit only, and a file is seen at once."""
    a = cluster.node(host=0, disk=8)
    a.put("p", [1])
    eventually(lambda: len(cluster.files()) == 1)
    stock = a.store._stock
    assert stock is not None
    stock.switch_off(0, DiskError("gone", fatal=True))
    done = a.put("q", [2, 3])
    assert done.skipped == 2
    found = a.look("p", 1)
    assert found.media == (FS,) and a.get(found, [4]).ok and a.look("q", 2).num_blocks == 0
    assert len(cluster.files()) == 1


def test_a_missing_directory_is_an_error_with_a_fix(cluster: Nodes) -> None:
    (cluster.folder / "shared").rmdir()
    node = cluster.node()
    with pytest.raises(StoreError, match="Mount the shared file system"):
        node.join()


def test_a_directory_that_is_broken_at_the_start_leaves_the_others(
    cluster: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: Any) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("raykv.storage.fs_folder.open_base", failing)
    a = cluster.node()
    a.put("p", [1, 2])
    found = a.look("p", 2)
    assert found.media == (HOST, HOST) and a.get(found, [3, 4]).ok
    assert "Stale file handle" in a.tier(FS).off
