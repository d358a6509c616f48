"""What is left to move of a store that is drained, and what another one takes of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raykv.core.drain_book import FIRST_PLACE, HOPELESS
from raykv.core.eviction import LRU
from raykv.core.prefix import block_key
from raykv.core.slot_table import SlotTable
from raykv.core.store_book import Place, StoreBook
from raykv.errors import IntegrityError
from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES, Cascade, Medium
from raykv.types import EngineId, JobId, Rank, RequestId

E = EngineId("e")
FP = bytes(FINGERPRINT_NBYTES)
HASHES = [number.to_bytes(HASH_NBYTES, "big") for number in range(40)]
KEYS = [block_key(FP, 0, one) for one in HASHES]
B, C = FIRST_PLACE + 1, FIRST_PLACE + 2


def make(host: int, disk: int = 0, cascade: Cascade = Cascade.EVICT, low: float = 0.25) -> StoreBook:
    sizes = [host] + [disk] * (disk > 0)
    media = [Medium.HOST, Medium.DISK][: len(sizes)]
    book = StoreBook([SlotTable(n, LRU(n)) for n in sizes], media, cascade, lease_s=60.0, low=low)
    book.drain.start()
    return book


def save(book: StoreBook, job: int, *numbers: int) -> None:
    plan = book.begin_save(E, Rank(0), JobId(job), [KEYS[number] for number in numbers])
    book.end_write(plan, True)
    book.commit(E, JobId(job))


def order(book: StoreBook) -> list[int]:
    """The numbers of the blocks that are to be moved, in their order."""
    table = book._tiers.tables[0]
    return [KEYS.index(table.key(slot)) for slot in book.drain.order()]


@pytest.fixture
def book() -> Iterator[StoreBook]:
    book = make(8)
    save(book, 1, 0, 1, 2)
    save(book, 2, 10, 11)
    yield book
    book.check_integrity()


def test_what_was_used_last_goes_first_and_a_prompts_tail_last(book: StoreBook) -> None:
    assert order(book) == [10, 11, 0, 1, 2]
    lease = book.look_up(E, RequestId("r"), [FP], [0], b"".join(HASHES[:2]), 0.0)
    assert lease is not None
    assert sorted(order(book)[:2]) == [0, 1], "what is leased now was used last of all"
    assert order(book)[2:] == [10, 11, 2]
    book.release(lease.id)


def test_what_lies_elsewhere_is_not_moved_again(book: StoreBook) -> None:
    batch = book.drain.begin(book.drain.order()[:3])
    book.drain.settle(batch[:2], B)
    book.drain.settle(batch[2:], HOPELESS)
    book.drain.end([place for _, place in batch])
    assert (order(book), book.drain.settled, book.drain.left()) == ([1, 2], 2, 3)
    book.drain.settle(batch, C)
    assert book.drain.settled == 2, "once"


def test_a_place_that_fails_is_doubted_as_a_whole(book: StoreBook) -> None:
    batch = book.drain.begin(book.drain.order())
    book.drain.settle(batch[:2], B)
    book.drain.settle(batch[2:3], C)
    book.drain.end([place for _, place in batch])
    book.drain.doubt(B)
    assert (order(book), book.drain.settled) == ([10, 11, 1, 2], 1)


def test_another_block_in_a_settled_slot_is_to_be_moved(book: StoreBook) -> None:
    batch = book.drain.begin(book.drain.order())
    book.drain.settle(batch, B)
    book.drain.end([place for _, place in batch])
    assert order(book) == []
    book.clear()
    save(book, 3, 20, 21, 22, 23, 24, 25)
    assert order(book) == [20, 21, 22, 23, 24, 25]


def test_a_slot_that_is_read_for_a_move_is_not_evicted(book: StoreBook) -> None:
    batch = book.drain.begin(book.drain.order())
    book.check_integrity()
    save(book, 3, *range(20, 28))
    assert [key for key, place in batch if book.find(key) == place] == [key for key, _ in batch]
    book.drain.end([place for _, place in batch])
    save(book, 4, *range(30, 38))
    assert [key for key, _ in batch if book.find(key)] == []
    with pytest.raises(IntegrityError):
        book.drain.end([batch[0][1]])


def test_bad_bytes_are_quarantined_once(book: StoreBook) -> None:
    ((key, place),) = book.drain.begin(book.drain.order()[:1])
    assert book.drain.spoil(place) and not book.drain.spoil(place)
    assert book.find(key) is None
    book.drain.end([place])
    with pytest.raises(IntegrityError):
        book.drain.spoil(Place(0, 7))


def test_only_what_is_not_here_is_taken_and_nothing_is_lost_for_it(book: StoreBook) -> None:
    wanted = [KEYS[n] for n in (0, 20, 10, 21, 22, 23)]
    assert book.drain.lacking(wanted) == ([KEYS[20], KEYS[21], KEYS[22]], False), "three slots are free"
    assert book.drain.lacking(wanted[:4]) == ([KEYS[20], KEYS[21]], True)
    assert (book.drain.free, book.drain.makes_room) == (3, False)


def test_a_store_that_copies_on_keeps_half_of_its_free_slots_for_its_saves() -> None:
    book = make(16, 16)
    save(book, 1, *range(10))
    # 4 of 16 are kept free, by copies to the disk
    assert book.drain.lacking(KEYS[20:30]) == (KEYS[20:24], False)
    assert book.drain.makes_room
    book = make(4, 16, Cascade.WRITE)
    save(book, 1, 0, 1, 2, 3)
    for move in book.next_demotions(4).moves:
        book.end_move(move, True)
    lacking, complete = book.drain.lacking(KEYS[20:23])
    assert (lacking, complete) == (KEYS[20:23], True)
    places, clear = book.begin_fetch(lacking)
    assert None not in places and len(clear) == 3, "what is on the disk too makes way"
    book.end_fetch([place for place in places if place is not None])
    book.check_integrity()


def test_without_a_host_tier_there_is_nothing_to_move() -> None:
    book = StoreBook([SlotTable(4, LRU(4))], [Medium.DISK], Cascade.EVICT, lease_s=60.0)
    book.drain.start()
    save(book, 1, 0, 1)
    assert not book.drain.order() and book.drain.lacking(KEYS[2:3]) == ([], False)
