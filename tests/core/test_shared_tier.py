"""The book of a store whose last tier all nodes share: entries come and go, blocks and saves are the other tiers'."""

from __future__ import annotations

import pytest

from raykv.core.eviction import LRU
from raykv.core.prefix import block_key
from raykv.core.slot_table import SlotTable
from raykv.core.store_book import Lease, Place, StoreBook
from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES, Cascade, Medium
from raykv.types import EngineId, JobId, Rank, RequestId

E = EngineId("e")
FP = bytes(FINGERPRINT_NBYTES)
HASHES = [number.to_bytes(HASH_NBYTES, "big") for number in range(8)]
KEYS = [block_key(FP, 0, one) for one in HASHES]
HOST, FS = 0, 1


@pytest.fixture
def book() -> StoreBook:
    return StoreBook(
        [SlotTable(4, LRU(4)), SlotTable(3, LRU(3))], [Medium.HOST, Medium.FS], Cascade.WRITE, lease_s=60.0
    )


def ask(book: StoreBook, count: int) -> Lease | None:
    return book.look_up(E, RequestId("r"), [FP], [0], b"".join(HASHES[:count]), 0.0)


def save(book: StoreBook, job: int, *numbers: int) -> None:
    plan = book.begin_save(E, Rank(0), JobId(job), [KEYS[number] for number in numbers])
    book.end_write(plan, True)
    book.commit(E, JobId(job))


def test_what_was_found_there_is_held_and_the_coldest_is_forgotten_for_it(book: StoreBook) -> None:
    added, forgotten = book.adopt(FS, KEYS[:2])
    assert [key for key, _ in added] == KEYS[:2] and forgotten == []
    assert book.adopt(FS, KEYS[:2]) == ([], [])
    lease = ask(book, 4)
    assert lease is not None and lease.media == (Medium.FS,) * 2
    added, forgotten = book.adopt(FS, KEYS[2:5])
    assert (len(added), forgotten) == (1, []), "two are leased, one entry is left"
    book.release(lease.id)
    added, forgotten = book.adopt(FS, KEYS[5:7])
    assert (len(added), len(forgotten)) == (2, 2)
    book.check_integrity()


def test_what_is_gone_is_forgotten_unless_somebody_holds_it(book: StoreBook) -> None:
    book.adopt(FS, KEYS[:1])
    lease = ask(book, 1)
    place = book.find(KEYS[0])
    assert lease is not None and place is not None and not book.forget(place)
    assert book.begin_load(lease.id, 0, [[0]]) == ((place,),)
    assert book.end_load(lease.id, 0, [place]) == [place]
    assert book.find(KEYS[0]) is None
    book.release(lease.id)
    (_, again), *_ = book.adopt(FS, KEYS[:1])[0]
    assert book.forget(again) and book.find(KEYS[0]) is None and not book.forget(again)
    figures = book.figures().tiers[FS]
    assert (figures.quarantined, figures.bad_reads, figures.used) == (0, 0, 0)
    book.check_integrity()


def test_no_save_goes_there_though_nothing_else_serves(book: StoreBook) -> None:
    book.adopt(FS, KEYS[:1])
    book.tier_off(HOST, "gone")
    plan = book.begin_save(E, Rank(0), JobId(1), KEYS[1:3])
    assert plan.write == () and plan.skipped == (0, 1)
    book.end_write(plan, True)
    lease = ask(book, 1)
    assert lease is not None and book.begin_promotion(lease.rows[0][0].places()).moves == ()
    book.release(lease.id)
    book.tier_off(FS, "gone")
    assert book.adopt(FS, KEYS[1:2]) == ([], []) and ask(book, 1) is None
    book.check_integrity()


def test_what_is_saved_moves_there_once(book: StoreBook) -> None:
    book.adopt(FS, KEYS[1:2])
    save(book, 1, 0, 2)
    moves = book.next_demotions(8).moves
    assert [(move.key, move.target.tier) for move in moves] == [(KEYS[0], FS), (KEYS[2], FS)]
    assert book.adopt(FS, KEYS[:1]) == ([], []), "it is on its way"
    for move in moves:
        book.end_move(move, True)
    assert book.next_demotions(8).moves == ()
    assert book.find(KEYS[0]) == Place(HOST, 0) or book.find(KEYS[0]) == Place(HOST, 1)
    book.check_integrity()


def test_a_directory_is_told_what_this_node_has_alone(book: StoreBook) -> None:
    book.adopt(FS, KEYS[1:2])
    book.content.begin()
    first = book.content.take(100)
    assert first.added == []
    save(book, 1, 0)
    book.adopt(FS, KEYS[3:4])
    (move,) = book.next_demotions(8).moves
    book.end_move(move, True)
    assert book.content.take(100).added == KEYS[:1]
    for place in book.clear(HOST):
        assert place.tier == HOST
    assert book.content.take(100).removed == KEYS[:1], "though its file is there"
