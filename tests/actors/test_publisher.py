"""A store's publisher against a Directory in this process: whatever goes wrong, it comes to believe what is held."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from raykv.actors import publisher as module
from raykv.actors.publisher import BATCH_KEYS, HEARTBEAT_S, PERIOD_S, Publisher
from raykv.core.eviction import LRU
from raykv.core.prefix import block_key
from raykv.core.slot_table import SlotState, SlotTable
from raykv.core.store_book import StoreBook
from raykv.directory_messages import Locate, Publish
from raykv.errors import ClusterError
from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES, Cascade, Medium
from raykv.types import EngineId, JobId, Rank, StoreLife
from tests.support.in_process_directory import InProcessDirectory

pytestmark = pytest.mark.process

E = EngineId("e")
FP = bytes(FINGERPRINT_NBYTES)
HASHES = [random.Random(number).randbytes(HASH_NBYTES) for number in range(30_000)]


class Store:
    """A book, and its publisher, stepped by hand. `life` as of a node's store."""

    def __init__(self, directory: InProcessDirectory, slots: int = 64, life: str = "life") -> None:
        self.directory = directory
        self.table = SlotTable(slots, LRU(slots))
        self.book = StoreBook([self.table], [Medium.HOST], Cascade.EVICT, lease_s=60.0)
        self.lock = threading.Lock()
        self.publisher = Publisher(self.book.content, self.lock, directory, "node", "store", StoreLife(life))
        self.now = 1000.0
        self.jobs = 0

    def save(self, *numbers: int) -> None:
        self.jobs += 1
        keys = [block_key(FP, 0, HASHES[number]) for number in numbers]
        with self.lock:
            plan = self.book.begin_save(E, Rank(0), JobId(self.jobs), keys)
            self.book.end_write(plan, True)
            self.book.commit(E, plan.job)

    def clear(self) -> None:
        with self.lock:
            self.book.clear()

    def step(self) -> float:
        return self.publisher.step(self.now)

    def settle(self) -> None:
        """Step until there is nothing more to say."""
        for _ in range(50):
            if self.step() == PERIOD_S and not self.book.content.waiting:
                return
        raise AssertionError("it never comes to an end")

    def believed(self) -> bool:
        """Whether the Directory believes what is held, and no more."""
        assert self.directory.directory is not None
        (holder,) = self.directory.directory.status().holders
        held = {self.table.key(slot)[-HASH_NBYTES:] for slot in self.table.in_state(SlotState.READY)}
        found = {one for one in held if self.directory.directory.locate(Locate((FP,), (0,), one, "")).holders}
        return found == held and holder.blocks == len(held) and holder.whole


@pytest.fixture
def directory() -> Iterator[InProcessDirectory]:
    one = InProcessDirectory()
    yield one
    one.close()


@pytest.fixture
def store(directory: InProcessDirectory) -> Store:
    return Store(directory)


def batches(directory: InProcessDirectory) -> list[Publish]:
    return directory.of("publish")


def test_what_comes_and_goes_is_published(store: Store, directory: InProcessDirectory) -> None:
    store.save(0, 1, 2)
    assert store.step() == PERIOD_S and store.believed()
    store.save(*range(3, 90))  # more than there are slots: some are evicted
    assert store.step() == PERIOD_S and store.believed()
    store.clear()
    assert store.step() == PERIOD_S and store.believed()
    assert [(one.stream, one.number) for one in batches(directory)] == [(0, 0), (0, 1), (0, 2)]
    assert store.step() == PERIOD_S and len(batches(directory)) == 3, "nothing to say"


def test_a_sign_of_life_when_nothing_happens(store: Store, directory: InProcessDirectory) -> None:
    store.settle()
    store.now += HEARTBEAT_S + 1
    store.step()
    assert [(one.number, one.added, one.removed) for one in batches(directory)] == [(0, b"", b""), (1, b"", b"")]


def test_many_blocks_go_in_batches_of_less_than_ray_keeps_in_a_message(directory: InProcessDirectory) -> None:
    store = Store(directory, slots=25_000)
    for first in range(0, 25_000, 1000):
        store.save(*range(first, first + 1000))
    assert store.step() == 0.0, "at once, for there is more"
    store.save(*range(25_000, 25_100))
    store.settle()
    assert store.believed()
    sizes = [len(one.added) + len(one.removed) for one in batches(directory)]
    assert max(sizes) <= 8 * BATCH_KEYS < 100_000 and len(sizes) >= 3
    assert [one.whole for one in batches(directory)] == [False] * (len(sizes) - 1) + [True]


def test_a_block_that_comes_and_goes_while_a_batch_is_made(
    store: Store, directory: InProcessDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told of twice within one batch, in which removals come first: the last word counts."""
    monkeypatch.setattr(module, "LOCK_KEYS", 2)
    store.settle()
    store.save(0, 1, 2, 3)
    really, changed = store.book.content.take, []

    def take(limit: int) -> object:
        changes = really(limit)
        if not changed:
            changed.append(True)
            store.book.clear()
            store.book.content.touch(b"")
        return changes

    monkeypatch.setattr(store.book.content, "take", take)
    store.settle()
    assert store.believed()


def test_a_stream_that_begins_while_a_batch_is_made(
    store: Store, directory: InProcessDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was gathered for the stream before is not held any more."""
    monkeypatch.setattr(module, "LOCK_KEYS", 2)
    store.settle()
    store.save(0, 1, 2, 3)
    really, changed = store.book.content.take, []

    def take(limit: int) -> object:
        changes = really(limit)
        if not changed:
            changed.append(True)
            store.book.clear()
            store.book.content.begin()
        return changes

    monkeypatch.setattr(store.book.content, "take", take)
    store.settle()
    assert changed and store.believed()


def test_a_lost_answer_is_asked_for_again_without_harm(store: Store, directory: InProcessDirectory) -> None:
    store.save(0)
    store.settle()
    directory.lost_answers = 2
    store.save(1)
    assert store.step() > 0 and store.step() > 0
    store.save(2)
    store.settle()
    assert store.believed()
    assert [one.number for one in batches(directory)] == [0, 1, 1, 1, 2]
    assert {one.stream for one in batches(directory)} == {0}


def test_a_directory_that_comes_back_empty_is_filled_again(store: Store, directory: InProcessDirectory) -> None:
    store.save(0, 1)
    store.settle()
    directory.die()
    store.save(2)
    store.step()
    assert store.publisher._caller is None and store.book.content.waiting == 0
    store.save(3)
    assert store.book.content.waiting == 0, "nothing is logged while nobody listens"
    store.step()
    directory.come_back()
    store.settle()
    assert store.believed()


def test_a_directory_restarted_behind_its_handle_is_filled_again(store: Store, directory: InProcessDirectory) -> None:
    """As Ray restarts an actor: the handle goes on, and what is behind it knows nothing."""
    store.save(0, 1)
    store.settle()
    assert directory.directory is not None
    directory.directory.forget_node("node")
    store.save(2)
    store.settle()
    assert store.believed()
    assert batches(directory)[-1].stream == 1


def test_the_next_life_of_a_store_replaces_it(store: Store, directory: InProcessDirectory) -> None:
    store.save(0, 1, 2)
    store.settle()
    second = Store(directory, life="next")
    second.save(5)
    second.settle()
    assert second.believed()


def test_without_a_directory_it_asks_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> None:
        asked.append(True)
        if len(asked) % 2:
            raise ClusterError("the head is away")

    asked: list[bool] = []
    store = Store(InProcessDirectory())
    monkeypatch.setattr(store.publisher, "_find", find)
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    pauses = [store.step() for _ in range(12)]
    assert pauses == sorted(pauses) and pauses[-1] == module.LONGEST_PAUSE_S and pauses[0] < 1 < pauses[4]
    assert len(asked) == 12
    store.directory.close()


def test_a_batch_that_the_directory_can_not_take_is_a_new_beginning(
    store: Store, directory: InProcessDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.settle()
    with monkeypatch.context() as patch:
        patch.setattr(module, "pack_keys", lambda keys: b"".join(keys)[:5])
        store.save(0)
        assert store.step() > 0
    store.settle()
    assert store.believed()


def test_its_thread_publishes_and_tells_of_its_end(store: Store, directory: InProcessDirectory) -> None:
    assert directory.directory is not None
    store.save(0, 1)
    store.publisher.start()
    done = threading.Event()
    for _ in range(600):
        if directory.directory.status().keys == 2:
            break
        done.wait(0.05)
    store.publisher.close()
    assert directory.directory.status().added == 2
    assert directory.directory.status().holders == ()
    assert not store.publisher._thread.is_alive()
