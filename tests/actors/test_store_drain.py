"""A store is emptied into other nodes' stores or a shared directory, with real bytes: all that had room is still found,
right, and nobody's request failed for it."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from raykv.actors import drain_targets, store_drain
from raykv.actors.node_store import NodeStore
from raykv.errors import DiskError
from raykv.peer_messages import Adopt, Adopted
from raykv.storage import nixl_transport
from raykv.storage.fs_header import HEADER_NBYTES, is_block
from raykv.storage.fs_pool import FsPool
from raykv.storage.nixl_transport import TransferState
from raykv.store_messages import Cascade, DrainReport, JobDone, LookedUp, Medium, Settle, StoreSpec, TierSpec
from raykv.types import EngineId, LeaseId
from tests.support.kv_rank import KVRank, load_job, look_up, save_job
from tests.support.peer_stores import Nodes, PeerCaller, find
from tests.support.waiting import eventually

pytestmark = pytest.mark.process

SLOT = 16384  # of KVRank's blocks
FILE = SLOT + HEADER_NBYTES
PATIENCE = 30.0


class Node:
    """A node's store with an engine of its own; `saved` has the bytes of each prompt that it saved."""

    def __init__(self, store: NodeStore, name: str, **options: Any) -> None:
        self.store, self.engine = store, EngineId(f"engine of {name}")
        self.rank = KVRank(self.engine, **options)
        self.jobs = 0
        self.saved: dict[str, list[bytes]] = {}
        store.attach(self.rank.attach)

    def put(self, prompt: str, block_ids: Sequence[int], *others: Sequence[int]) -> JobDone:
        self.jobs += 1
        job = save_job(self.jobs, prompt, block_ids, *others)
        _, (done,) = self.store.save(self.store.life, self.engine, self.rank.attach.rank, [job])
        self.store.settle(self.engine, Settle(commits=(job.job,)))
        self.saved[prompt] = self.rank.blocks(block_ids)
        return done

    def look(self, prompt: str, count: int = 24) -> LookedUp:
        return self.store.look_up(self.engine, look_up(prompt, count))

    def has(self, prompt: str, count: int = 24) -> int:
        """How many blocks of it are here."""
        found = self.look(prompt, count)
        if found.lease is not None:
            self.store.settle(self.engine, Settle(releases=(found.lease,)))
        return found.num_blocks

    def get(self, found: LookedUp, block_ids: Sequence[int]) -> JobDone:
        self.jobs += 1
        job = load_job(self.jobs, found.lease, block_ids)
        _, (done,) = self.store.load(self.store.life, self.engine, self.rank.attach.rank, [job])
        return done

    def loads(self, prompt: str, count: int) -> list[bytes]:
        """Blocks of a prompt, out of this store."""
        found = self.look(prompt, count)
        self.rank.wipe(range(count))
        done = self.get(found, list(range(count)))
        assert (done.ok, done.error) == (True, "")
        self.store.settle(self.engine, Settle(releases=(found.lease or LeaseId(-1),)))
        return self.rank.blocks(range(count))


class Harness:
    def __init__(self, folder: Path) -> None:
        self.nodes = Nodes(folder)
        self.stores: list[NodeStore] = []
        self.ranks: list[KVRank] = []

    def spec(
        self, host: int = 32, *, disk: str = "", disk_slots: int = 16, files: int = 0, **options: Any
    ) -> StoreSpec:
        tiers = [TierSpec(Medium.HOST, host * SLOT)] if host else []
        if disk:
            tiers.append(TierSpec(Medium.DISK, disk_slots * SLOT, str(self.nodes.folder / disk)))
        if files:
            tiers.append(TierSpec(Medium.FS, files * FILE, str(self.shared)))
        return StoreSpec("test", tuple(tiers), **options)

    @property
    def shared(self) -> Path:
        folder = self.nodes.folder / "shared"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def store(self, name: str, spec: StoreSpec | None = None) -> NodeStore:
        self.stores.append(self.nodes.add(name, spec or self.spec()))
        return self.stores[-1]

    def node(self, name: str, spec: StoreSpec | None = None, **options: Any) -> Node:
        node = Node(self.store(name, spec), name, **options)
        self.ranks.append(node.rank)
        return node

    def alone(self, spec: StoreSpec) -> Node:
        """A node that knows no other."""
        node = Node(NodeStore(spec, "test", shm=self.nodes.folder), "alone")
        self.stores.append(node.store)
        self.ranks.append(node.rank)
        return node

    def caller(self, name: str) -> PeerCaller:
        return self.nodes.callers[name]

    def close(self) -> None:
        for store in self.stores:
            store.check_integrity()
            store.shutdown(remove_host=True)
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def h(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    monkeypatch.setattr(drain_targets, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(drain_targets, "LOOK_S", 0.02)
    monkeypatch.setattr(store_drain, "LOOK_S", 0.01)
    harness = Harness(tmp_path)
    yield harness
    harness.close()


def counts(report: DrainReport) -> tuple[int, int]:
    return report.moved_blocks, report.left_blocks


# -- to other stores ----------------------------------------------------------------------------------------


def test_what_a_drained_store_had_is_a_hit_at_another_byte_for_byte(h: Harness) -> None:
    a, b = h.node("a"), h.node("b")
    a.put("p", [3, 1, 4, 5])
    a.put("q", [7, 8])
    report = a.store.drain(PATIENCE, ["a", "b"])
    assert (counts(report), report.moved_nbytes, report.problem) == ((6, 0), 6 * SLOT, "")
    assert not report.running
    a.store.check_integrity()
    a.store.shutdown(remove_host=True)
    assert b.look("p").media == (Medium.HOST,) * 4
    assert b.loads("p", 4) == a.saved["p"] and b.loads("q", 2) == a.saved["q"]


def test_all_kv_groups_move(h: Harness) -> None:
    a, b = h.node("a", windows=(0, 2)), h.node("b", windows=(0, 2))
    a.put("p", [0, 1, 2, 3], [0, 1, 2, 3])
    window = a.rank.blocks([2, 3], 1)
    assert counts(a.store.drain(PATIENCE, ["b"])) == (8, 0)
    found = b.look("p", 4)
    assert found.num_blocks == 4
    job = dataclasses.replace(load_job(9, found.lease, [9]), indices=((), (2, 3)), block_ids=((), (10, 11)))
    _, (done,) = b.store.load(b.store.life, b.engine, b.rank.attach.rank, [job])
    assert done.ok and b.rank.blocks([10, 11], 1) == window


def test_it_saves_nothing_new_and_serves_on_until_it_is_undone(h: Harness) -> None:
    a = h.node("a")
    h.node("b")
    a.put("p", [0, 1])
    a.store.drain(PATIENCE, ["b"])
    done = a.put("q", [2, 3, 4])
    assert (done.ok, done.skipped, done.error) == (True, 3, "")
    assert a.has("q") == 0 and a.loads("p", 2) == a.saved["p"]
    assert a.store.drain_report().skipped_blocks == 3
    assert "2 blocks moved" in a.store.status().drain
    a.store.undrain()
    assert a.put("q", [2, 3, 4]).skipped == 0 and a.has("q") == 3
    assert a.store.status().drain == ""


def test_a_drained_store_that_nobody_ends_takes_saves_again(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    a = h.node("a")
    monkeypatch.setattr(store_drain, "HOLD_S", 0.0)
    a.store.drain(0.0, [])
    assert a.put("p", [0]).skipped == 0


def test_the_store_with_the_most_room_is_asked_first(h: Harness) -> None:
    a, b, c = h.node("a"), h.node("b", h.spec(8)), h.node("c", h.spec(12))
    a.put("p", list(range(6)))
    assert counts(a.store.drain(PATIENCE, ["b", "c"])) == (6, 0)
    assert (b.has("p"), c.has("p")) == (0, 6)


def test_what_was_used_last_goes_until_there_is_no_room_and_nothing_is_lost_for_it(h: Harness) -> None:
    a, b, c = h.node("a"), h.node("b", h.spec(4)), h.node("c", h.spec(3))
    a.put("old", [0, 1, 2, 3, 4])
    a.put("new", [5, 6, 7])
    b.put("own", [0, 1])
    c.put("other", [0])
    report = a.store.drain(PATIENCE, ["b", "c"])
    assert counts(report) == (4, 4) and report.problem.count("it is full") == 2
    assert (b.has("own"), c.has("other")) == (2, 1)
    assert (b.store.status().tiers[0].used, c.store.status().tiers[0].used) == (4, 3)
    assert 2 in (b.has("new"), c.has("new"))
    assert (a.has("old"), a.has("new")) == (5, 3)


def test_a_store_with_a_disk_makes_room_and_keeps_all(h: Harness) -> None:
    a, b = h.node("a"), h.node("b", h.spec(4, disk="disk of b", disk_slots=40))
    a.put("p", list(range(12)))
    b.put("own", [0, 1, 2])
    assert counts(a.store.drain(PATIENCE, ["b"])) == (12, 0)
    assert b.has("own") == 3 and b.loads("p", 12) == a.saved["p"]


def test_what_lies_there_already_is_not_copied(h: Harness) -> None:
    a, b = h.node("a"), h.node("b")
    a.put("p", [0, 1, 2])
    assert b.get(find(b.store, b.engine, look_up("p", 3)), [0, 1, 2]).ok
    report = a.store.drain(PATIENCE, ["b"])
    assert (counts(report), report.moved_nbytes) == ((3, 0), 0)


def test_a_disk_stays_where_it_is(h: Harness) -> None:
    a, b = h.node("a", h.spec(16, disk="disk of a", cascade=Cascade.WRITE)), h.node("b")
    a.put("p", [0, 1, 2])
    eventually(lambda: a.store.status().tiers[1].used == 3)
    report = a.store.drain(PATIENCE, ["b"])
    assert (counts(report), report.disk_blocks) == ((3, 0), 3)
    assert "3 stay on its disk" in str(report) and b.has("p") == 3


def test_a_second_drain_goes_on(h: Harness) -> None:
    a, b = h.node("a"), h.node("b")
    a.put("p", [0, 1, 2])
    report = a.store.drain(0.0, ["b"])
    assert counts(report) == (0, 3) and "did not end in 0 s" in report.problem
    assert counts(a.store.drain(PATIENCE, ["b"])) == (3, 0)
    assert counts(a.store.drain(PATIENCE, ["b"])) == (3, 0) and h.caller("b").count("adopt") == 2
    assert b.has("p") == 3


def test_a_store_that_no_engine_uses_yet_takes_blocks(h: Harness) -> None:
    a, b = h.node("a"), h.store("b")
    a.put("p", [0, 1])
    assert counts(a.store.drain(PATIENCE, ["b"])) == (2, 0)
    later = Node(b, "b")
    h.ranks.append(later.rank)
    assert later.loads("p", 2) == a.saved["p"]


def test_who_can_not_take_blocks_says_why(h: Harness) -> None:
    a, b = h.node("a"), h.node("b")
    h.node("large", h.spec(8, slot_nbytes=2 * SLOT))
    h.node("unsure", h.spec(8, checksum=False))
    a.put("p", [0])
    b.store.drain(PATIENCE, [])
    report = a.store.drain(PATIENCE, ["b", "large", "unsure", "nobody"])
    assert counts(report) == (0, 1)
    assert "it is drained itself" in report.problem and "another size" in report.problem
    report = a.store.drain(PATIENCE, ["unsure", "nobody"])
    assert "no checksums" in report.problem and "there is no store nobody" in report.problem
    assert "no other store" in a.store.drain(PATIENCE, ["a"]).problem


@pytest.mark.parametrize("peer", [True, False])
def test_without_a_way_it_ends_at_once_and_says_what_will_be_lost(h: Harness, peer: bool) -> None:
    a = h.node("a", h.spec(checksum=False)) if peer else h.alone(h.spec())
    h.node("b")
    a.put("p", [0, 1, 2])
    report = a.store.drain(PATIENCE, ["b"])
    assert counts(report) == (0, 3) and "neither an fs tier nor a peer tier" in report.problem
    assert a.put("q", [4]).skipped == 1


def test_requests_go_on_while_it_is_drained(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_drain, "BATCH_BLOCKS", 2)
    a, b = h.node("a"), h.node("b")
    a.put("p", list(range(12)))
    monkeypatch.setattr("raykv.actors.store_adopt.PATIENCE_S", PATIENCE)
    h.caller("b").change = lambda result: (time.sleep(0.02), result)[1]
    draining = threading.Thread(target=a.store.drain, args=(PATIENCE, ["b"]))
    draining.start()
    rounds = 0
    while draining.is_alive() or not rounds:
        assert a.has("p") == 12 and a.loads("p", 12) == a.saved["p"]
        assert a.put("q", [0, 1]).ok
        found = find(b.store, b.engine, look_up("p", 12, f"r{rounds}"))
        b.rank.wipe(range(12))
        assert found.num_blocks == 12 and b.get(found, list(range(12))).ok
        assert b.rank.blocks(range(12)) == a.saved["p"]
        b.store.settle(b.engine, Settle(releases=(found.lease or LeaseId(-1),)))
        rounds += 1
    draining.join()
    assert counts(a.store.drain_report())[1] == 0
    a.store.shutdown(remove_host=True)
    assert b.loads("p", 12) == a.saved["p"]


def test_undo_ends_a_drain_that_runs(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    a = h.node("a")
    h.node("b")
    a.put("p", [0, 1])
    h.caller("b").hung = hung = threading.Event()
    draining = threading.Thread(target=a.store.drain, args=(PATIENCE, ["b"]))
    draining.start()
    eventually(lambda: a.store.drain_report().running and a.put("q", [4]).skipped == 1)
    a.store.undrain()
    draining.join()
    assert "undone" in a.store.drain_report().problem and a.put("r", [5]).skipped == 0
    hung.set()


def test_a_store_ends_in_the_middle_of_its_drain(h: Harness) -> None:
    a = h.node("a")
    h.node("b")
    a.put("p", [0, 1])
    h.caller("b").hung = hung = threading.Event()
    draining = threading.Thread(target=a.store.drain, args=(PATIENCE, ["b"]))
    draining.start()
    eventually(lambda: a.store.drain_report().running)
    a.store.shutdown(remove_host=True)
    draining.join()
    hung.set()


# -- targets that die, hang or lie --------------------------------------------------------------------------


def after_first(h: Harness, name: str, then: Callable[[], None]) -> None:
    """Once a store has answered its first offer, this happens."""
    left = [then]

    def change(result: Any) -> Any:
        if isinstance(result, Adopted) and left:
            left.pop()()
        return result

    h.caller(name).change = change


def test_a_target_that_is_killed_comes_back_and_has_all(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_drain, "BATCH_BLOCKS", 2)
    monkeypatch.setattr(drain_targets, "MOST_FAILURES", 10_000)
    a, b = h.node("a"), h.node("b")
    a.put("p", list(range(9)))
    back: list[NodeStore] = []
    h.caller("b").change = lambda result: [setattr(h.caller("b"), "dead", isinstance(result, Adopted)), result][1]
    draining = threading.Thread(target=a.store.drain, args=(PATIENCE, ["b"]))
    draining.start()
    eventually(lambda: h.caller("b").dead and a.store.drain_report().moved_blocks == 0)  # what it said is doubted
    b.store.shutdown(remove_host=False)
    back.append(h.store("b"))
    h.caller("b").change = lambda result: result
    h.caller("b").dead = False
    draining.join()
    assert counts(a.store.drain_report()) == (9, 0)
    a.store.shutdown(remove_host=True)
    again = Node(back[0], "b again")
    h.ranks.append(again.rank)
    assert again.loads("p", 9) == a.saved["p"]


def test_what_a_target_had_that_is_gone_goes_to_another(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_drain, "BATCH_BLOCKS", 2)
    a, c = h.node("a"), h.node("c", h.spec(10))
    h.node("b")
    a.put("p", list(range(6)))
    after_first(h, "b", lambda: setattr(h.caller("b"), "dead", True))
    report = a.store.drain(PATIENCE, ["b", "c"])
    assert counts(report) == (6, 0) and h.caller("b").count("adopt") == 1
    assert c.loads("p", 6) == a.saved["p"]


def test_a_target_that_hangs_is_left_for_another(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_targets, "ANSWER_S", 0.1)
    monkeypatch.setattr(drain_targets, "ASK_S", 0.1)
    a, c = h.node("a"), h.node("c", h.spec(10))
    h.node("b")
    a.put("p", [0, 1])
    h.caller("b").hung = hung = threading.Event()
    assert counts(a.store.drain(PATIENCE, ["b", "c"])) == (2, 0)
    hung.set()
    assert c.has("p") == 2


@pytest.mark.parametrize("answer", [None, Adopted("x", b"\2"), Adopted("x", b"\2" * 9)])
def test_an_answer_that_makes_no_sense_is_not_believed(h: Harness, answer: Any) -> None:
    a = h.node("a")
    h.node("b")
    a.put("p", [0, 1])
    h.caller("b").change = lambda result: answer if isinstance(result, Adopted) else result
    report = a.store.drain(PATIENCE, ["b"])
    assert counts(report) == (0, 2) and "something else" in report.problem


def rows_of(store: NodeStore) -> Any:
    assert store._stock is not None
    rows = store._stock.tiers.rows(0)
    assert rows is not None
    return rows


def test_rotten_bytes_are_found_out_of_use_here_and_never_taken_there(h: Harness) -> None:
    a, b = h.node("a"), h.node("b")
    a.put("p", [0, 1, 2, 3])
    rows_of(a.store)[2, 77] += 1
    report = a.store.drain(PATIENCE, ["b"])
    assert counts(report) == (3, 0) and a.store.status().tiers[0].quarantined == 1
    assert b.store.status().tiers[0].used == 3 and b.has("p") == 2


def offer(h: Harness, a: Node) -> Adopt:
    """What node "a" asked of node "b"."""
    a.store.drain(PATIENCE, ["b"])
    args: tuple[Adopt] = next(args for name, args in h.caller("b").calls if name == "adopt")
    return args[0]


def test_a_source_that_dies_costs_time_only(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raykv.actors.store_adopt.PATIENCE_S", 1.0)
    a, b = h.node("a"), h.node("b")
    a.put("p", [0, 1, 2])
    asked = offer(h, a)
    b.store.clear()
    a.store.shutdown(remove_host=False)
    answer = b.store.adopt(asked)
    assert answer.refused and not any(answer.blocks) and not answer.full
    eventually(lambda: (b.store.status().tiers[0].used, b.store.status().tiers[0].writing) == (0, 0))
    again = h.store("a")
    assert counts(again.drain(PATIENCE, ["b"])) == (3, 0)
    assert b.loads("p", 3) == a.saved["p"]


def test_a_read_that_does_not_end_keeps_its_slots(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = h.node("a"), h.node("b")
    a.put("p", [0, 1, 2])
    asked = offer(h, a)
    b.store.clear()
    released, poll = threading.Event(), nixl_transport.Transfer.poll
    monkeypatch.setattr(
        nixl_transport.Transfer, "poll", lambda one: poll(one) if released.is_set() else TransferState.RUNNING
    )
    monkeypatch.setattr("raykv.actors.store_adopt.PATIENCE_S", 0.1)
    answer = b.store.adopt(asked)
    assert "hangs" in answer.refused and b.store.status().tiers[0].writing == 3
    b.store.check_integrity()
    released.set()
    eventually(lambda: b.store.status().tiers[0].writing == 0)
    assert b.store.status().tiers[0].used == 0


@pytest.mark.parametrize(
    "change", [{"keys": b"x"}, {"slots": b"\xff" * 8}, {"sizes": b"\xff" * 8}, {"sizes": bytes(8)}, {"seals": b""}]
)
def test_an_offer_that_makes_no_sense_is_refused(h: Harness, change: dict[str, Any]) -> None:
    a, b = h.node("a"), h.node("b")
    a.put("p", [0, 1])
    asked = offer(h, a)
    b.store.clear()
    answer = b.store.adopt(dataclasses.replace(asked, **change))
    assert "no sense" in answer.refused and b.store.status().tiers[0].used == 0


# -- to a shared directory ----------------------------------------------------------------------------------


def files(h: Harness) -> int:
    return sum(is_block(path.name) for path in h.shared.rglob("*"))


def test_a_shared_directory_takes_all_that_memory_had(h: Harness) -> None:
    spec = h.spec(16, disk="disk of a", files=60)
    other = h.spec(16, files=60)
    a, b = h.node("a", spec), h.node("b", other)
    a.put("p", [0, 1, 2, 3])
    assert files(h) == 0
    report = a.store.drain(PATIENCE, ["b"])
    assert (counts(report), report.moved_nbytes, report.problem) == ((4, 0), 4 * SLOT, "")
    assert files(h) == 4 and h.caller("b").count("adopt") == 0
    a.store.shutdown(remove_host=True)
    (found,) = b.store.look_ups(b.engine, [look_up("p", 4)])
    b.rank.wipe(range(4))
    assert found.num_blocks == 4 and b.get(found, [0, 1, 2, 3]).ok and b.rank.blocks(range(4)) == a.saved["p"]


def test_what_the_directory_has_is_not_written_again(h: Harness) -> None:
    a = h.alone(h.spec(16, files=60, cascade=Cascade.WRITE))
    a.put("p", [0, 1, 2])
    eventually(lambda: files(h) == 3)
    report = a.store.drain(PATIENCE)
    assert (counts(report), report.moved_nbytes) == ((3, 0), 0)


def test_a_directory_that_fails_leaves_the_rest_to_other_stores(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = h.node("a", h.spec(16, files=60)), h.node("b")
    a.put("p", [0, 1, 2])

    def fail(*args: Any) -> bool:
        raise DiskError("it is gone", fatal=True)

    monkeypatch.setattr(FsPool, "write", fail)
    assert counts(a.store.drain(PATIENCE, ["b"])) == (3, 0)
    assert "gone" in a.store.status().tiers[1].off and b.loads("p", 3) == a.saved["p"]


def test_rotten_bytes_are_not_written_to_the_directory(h: Harness) -> None:
    a = h.alone(h.spec(16, files=60))
    a.put("p", [0, 1, 2])
    rows_of(a.store)[0, 5] += 1
    assert counts(a.store.drain(PATIENCE)) == (2, 0)
    assert files(h) == 2 and a.store.status().tiers[0].quarantined == 1


def test_a_directory_with_less_room_takes_what_was_used_last(h: Harness) -> None:
    a = h.alone(h.spec(16, files=3))
    a.put("old", [0, 1, 2])
    a.put("new", [3, 4])
    report = a.store.drain(PATIENCE)
    assert counts(report)[1] >= 2 and "its fs tier takes 3 blocks" in report.problem
