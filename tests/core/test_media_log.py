"""What is told to the event stream, put together again, is where the store's blocks lie."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raykv.core.eviction import LRU
from raykv.core.media_log import Lying
from raykv.core.prefix import block_key
from raykv.core.slot_table import SlotState, SlotTable
from raykv.core.store_book import StoreBook
from raykv.event_messages import MEDIUM_BIT
from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES, Cascade, Medium
from raykv.types import EngineId, JobId, Rank

HOST, DISK = MEDIUM_BIT[Medium.HOST], MEDIUM_BIT[Medium.DISK]


def key(number: int) -> bytes:
    return block_key(bytes(FINGERPRINT_NBYTES), 0, number.to_bytes(HASH_NBYTES, "big"))


class Store:
    """A book of a host and a disk tier, and a listener who believes what he is told."""

    def __init__(self, *slots: int, limit: int = 1000) -> None:
        self.tables = [SlotTable(count, LRU(count)) for count in slots]
        self.book = StoreBook(self.tables, [Medium.HOST, Medium.DISK], Cascade.EVICT, lease_s=60.0, low=0.5)
        self.log = self.book.content.media
        self.log._log._limit = limit
        self.jobs = 0
        self.off: set[int] = set()
        self.believed: dict[bytes, int] = {}
        self.said: list[bytes] = []

    def save(self, *numbers: int) -> None:
        self.jobs += 1
        plan = self.book.begin_save(EngineId("e"), Rank(0), JobId(self.jobs), [key(number) for number in numbers])
        self.book.end_write(plan, True)
        self.book.commit(plan.engine, plan.job)

    def demote(self, ok: bool = True, bad: bool = False) -> None:
        for move in self.book.next_demotions(2).moves:
            self.book.end_move(move, ok, bad)

    def switch_off(self, tier: int) -> None:
        self.off.add(tier)
        self.book.tier_off(tier, "test")

    def take(self, limit: int = 1000) -> Lying:
        lying = self.log.take(limit)
        if lying.fresh:
            self.believed.clear()
        self.said = list(lying.now)
        for one, media in lying.now.items():
            if media:
                self.believed[one] = media
            else:
                self.believed.pop(one, None)
        return lying

    def take_all(self, limit: int) -> None:
        while self.take(limit).more:
            pass

    @property
    def held(self) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for tier, (table, bit) in enumerate(zip(self.tables, (HOST, DISK), strict=True)):
            for slot in table.in_state(SlotState.READY) if tier not in self.off else ():
                found[table.key(slot)] = found.get(table.key(slot), 0) | bit
        return found


def test_nothing_is_noted_until_somebody_listens() -> None:
    store = Store(4, 4)
    store.save(1)
    assert store.log.waiting == 0 and store.take() == Lying(False, {}, True, False)
    store.log.begin()
    assert store.take() == Lying(True, {key(1): HOST}, True, False)
    store.log.stop()
    store.save(2)
    assert store.log.waiting == 0


def test_a_block_is_told_where_it_lies_and_where_no_longer() -> None:
    store = Store(4, 4)
    store.log.begin()
    store.take()
    store.save(0, 1, 2, 3)
    assert set(store.take().now.values()) == {HOST}
    store.demote()
    moved = store.take().now
    assert moved and store.believed == store.held and set(store.held.values()) > {HOST}
    store.book.clear(0)
    store.take()
    assert store.believed == store.held and set(store.held.values()) == {DISK}
    store.book.clear(1)
    assert set(store.take().now.values()) == {0} and store.believed == {}


def test_what_comes_and_goes_is_not_told() -> None:
    store = Store(4, 4)
    store.log.begin()
    store.take()
    store.save(1)
    store.book.clear()
    assert store.take() == Lying(False, {}, True, False)


def test_too_much_that_waits_begins_anew() -> None:
    store = Store(16, 4, limit=4)
    store.log.begin()
    store.take()
    for number in range(5):
        store.save(number)
    assert store.log.dropped == 1 and store.take(2).fresh
    store.take_all(2)
    assert store.believed == store.held and len(store.held) == 5


@given(
    st.lists(
        st.tuples(st.sampled_from(("save", "demote", "bad move", "clear", "off", "take", "begin")), st.integers(0, 12)),
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
        elif what == "begin" and number == 0:
            store.log.begin()
        else:
            store.take(limit)
    store.take_all(limit)
    assert store.believed == store.held
    assert store.log.waiting == 0
