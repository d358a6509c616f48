"""What is told to a Directory, put together again, is what the store holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.core.content_log import Changes
from raykv.core.eviction import LRU
from raykv.core.prefix import block_key
from raykv.core.slot_table import SlotState, SlotTable
from raykv.core.store_book import StoreBook
from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES, Cascade, Medium
from raykv.types import EngineId, JobId, Rank

E = EngineId("e")


def key(number: int) -> bytes:
    return block_key(bytes(FINGERPRINT_NBYTES), 0, number.to_bytes(HASH_NBYTES, "big"))


class Store:
    """A book of two tiers, and a listener who believes what he is told."""

    def __init__(self, *slots: int, limit: int = 1000) -> None:
        self.tables = [SlotTable(count, LRU(count)) for count in slots]
        media = [Medium.HOST, Medium.DISK][: len(slots)]
        self.book = StoreBook(self.tables, media, Cascade.EVICT, lease_s=60.0, low=0.5)
        self.log = self.book.content
        self.log._log._limit = limit
        self.jobs = 0
        self.off: set[int] = set()
        self.believed: set[bytes] = set()

    def save(self, *numbers: int) -> None:
        self.jobs += 1
        plan = self.book.begin_save(E, Rank(0), JobId(self.jobs), [key(number) for number in numbers])
        self.book.end_write(plan, True)
        self.book.commit(E, plan.job)

    def demote(self, ok: bool = True, bad: bool = False) -> None:
        for move in self.book.next_demotions(2).moves:
            self.book.end_move(move, ok, bad)

    def switch_off(self, tier: int) -> None:
        self.off.add(tier)
        self.book.tier_off(tier, "test")

    def check(self, tier: int) -> None:
        """The scrubber finds rot."""
        found = self.book.begin_check(tier)
        if found is not None:
            self.book.end_check(found[1], False)

    def take(self, limit: int = 1000) -> Changes:
        changes = self.log.take(limit)
        if changes.fresh:
            self.believed.clear()
        assert not set(changes.added) & set(changes.removed)
        self.believed = (self.believed - set(changes.removed)) | set(changes.added)
        return changes

    def take_all(self, limit: int) -> None:
        while self.take(limit).more:
            pass

    @property
    def held(self) -> set[bytes]:
        return {
            table.key(slot)
            for tier, table in enumerate(self.tables)
            if tier not in self.off
            for slot in table.in_state(SlotState.READY)
        }


def test_off_until_somebody_listens() -> None:
    store = Store(4)
    store.save(1)
    assert store.log.waiting == 0
    assert store.take() == Changes(False, [], [], True, False)
    store.log.begin()
    assert store.take() == Changes(True, [key(1)], [], True, False)
    store.save(2)
    store.log.stop()
    store.save(3)
    assert store.log.waiting == 0


def test_what_comes_and_goes_is_not_told() -> None:
    store = Store(4)
    store.log.begin()
    store.take()
    store.save(1)
    store.book.clear()
    assert store.take() == Changes(False, [], [], True, False)
    store.save(2)
    assert store.take().added == [key(2)]
    store.book.clear()
    store.save(2)
    assert store.take() == Changes(False, [], [], True, False)


def test_a_block_is_gone_with_its_last_copy() -> None:
    store = Store(4, 4)
    store.log.begin()
    for number in range(4):
        store.save(number)
    store.take()
    store.demote()
    assert store.take()[1:3] == ([], [])
    store.book.clear(0)
    assert set(store.take().removed) == {key(2), key(3)}, "0 and 1 lie on disk too"
    store.book.clear(1)
    assert set(store.take().removed) == {key(0), key(1)}


def test_the_first_walk_is_in_parts_and_misses_nothing_that_moves() -> None:
    store = Store(8, 8)
    for number in range(8):
        store.save(number)
    store.log.begin()
    first = store.take(3)
    assert (first.fresh, len(first.added), first.whole, first.more) == (True, 3, False, True)
    store.demote()  # behind the walk, and away before it
    store.demote()
    store.book.clear(0)
    store.save(20)
    while not store.take(3).whole:
        pass
    store.take_all(3)
    assert store.believed == store.held


def test_a_block_that_moves_to_where_the_walk_has_been() -> None:
    store = Store(4)
    store.save(0, 1, 2, 3)
    store.log.begin()
    store.take(2)
    last = store.tables[0].key(3)
    store.book.clear()
    store.save(int.from_bytes(last[-HASH_NBYTES:], "big"))
    assert store.tables[0].find(last) == 0
    store.take_all(2)
    assert store.believed == store.held == {last}


def test_too_much_that_waits_begins_anew() -> None:
    store = Store(16, limit=4)
    store.log.begin()
    store.take()
    for number in range(5):
        store.save(number)
    assert store.log.dropped == 1 and store.log.waiting <= 4
    assert store.take().fresh
    store.take_all(2)
    assert store.believed == store.held


@pytest.mark.parametrize("tier", [0, 1])
def test_a_tier_that_goes_off_is_not_held(tier: int) -> None:
    store = Store(4, 4)
    for number in range(4):
        store.save(number)
    store.demote()
    store.log.begin()
    store.take_all(100)
    store.switch_off(tier)
    store.take_all(100)
    assert store.believed == store.held


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("save", "demote", "bad move", "clear", "off", "rot", "take", "begin")), st.integers(0, 12)
        ),
        max_size=60,
    ),
    st.integers(1, 4),
    st.integers(2, 30),
)
def test_whatever_happens_is_told(steps: list[tuple[str, int]], limit: int, waiting: int) -> None:
    store = Store(4, 6, limit=waiting)
    store.log.begin()
    for what, number in steps:
        if what == "save":
            store.save(number, number + 1)
        elif what == "demote":
            store.demote()
        elif what == "bad move":
            store.demote(ok=False, bad=True)
        elif what == "clear":
            store.book.clear(number % 2)
        elif what == "off" and number == 0:
            store.switch_off(1)
        elif what == "rot":
            store.check(number % 2)
        elif what == "begin" and number == 0:
            store.log.begin()
        else:
            store.take(limit)
        store.book.check_integrity()
    store.take_all(limit)
    assert store.believed == store.held
    assert store.log.waiting == 0


def test_the_walk_ends_behind_the_last_slot_of_a_full_tier() -> None:
    store = Store(3)
    store.save(0, 1, 2)
    store.log.begin()
    assert store.take(3).more
    assert store.take(3) == Changes(False, [], [], True, False)
