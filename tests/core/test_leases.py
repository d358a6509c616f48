"""Single cases of the leases; `test_store_book` has them in any order and together with the tiers."""

from __future__ import annotations

import pytest

from raykv.core.leases import LeaseBook
from raykv.core.store_plans import Lease, Place, Row, Run
from raykv.errors import IntegrityError
from raykv.store_messages import Medium
from raykv.types import EngineId, LeaseId, RequestId

E, OTHER = EngineId("e"), EngineId("other")
A, B = Run(0, 1, 1), Run(1, 2, 3)


def grant(book: LeaseBook, request: str = "r", pins: tuple[Run, ...] = (A, B), **fields: object) -> LeaseId:
    lease = Lease(
        id=book.next_id(),
        engine=fields.get("engine", E),  # type: ignore[arg-type]
        request=RequestId(request),
        expires=fields.get("expires", 10.0),  # type: ignore[arg-type]
        num_blocks=sum(run.length for run in pins),
        rows=((Row(0, pins),),),
        media=(Medium.HOST,) * sum(run.length for run in pins),
    )
    book.grant(lease)
    book.check_integrity()
    return lease.id


def test_a_released_lease_gives_its_pins_back_once() -> None:
    book = LeaseBook()
    lease = grant(book)
    assert book.get(lease) is not None
    assert book.pinned() == {Place(0, 1): 1, Place(1, 2): 1, Place(1, 3): 1, Place(1, 4): 1}
    assert book.release(lease) == [A, B]
    assert book.release(lease) == []
    assert book.release(LeaseId(77)) == []
    assert (len(book), book.unknown_releases, book.get(lease)) == (0, 2, None)


def test_ids_count_up() -> None:
    book = LeaseBook()
    assert [grant(book, "a"), grant(book, "a"), grant(book, "b")] == [0, 1, 2]


def test_a_load_holds_its_lease_past_release_and_expiry() -> None:
    book = LeaseBook()
    lease = grant(book)
    assert book.begin_use(lease, 0) is not None
    assert book.begin_use(lease, 0) is not None
    assert book.begin_use(lease, 1) is not None
    assert book.release(lease) == []
    assert book.expire(99.0) == (0, []), "it is over already"
    assert book.begin_use(lease, 0) is None, "no new load under a lease that is over"
    assert book.release(lease) == []
    assert book.end_use(lease, 0) == []
    assert book.end_use(lease, 1) == []
    book.check_integrity()
    assert book.in_use(lease, 0) is not None and book.in_use(lease, 1) is None
    assert book.end_use(lease, 0) == [A, B]
    assert len(book) == 0
    with pytest.raises(IntegrityError):
        book.end_use(lease, 0)


def test_a_load_that_ends_before_leaves_the_lease() -> None:
    book = LeaseBook()
    lease = grant(book)
    book.begin_use(lease, 0)
    assert book.end_use(lease, 0) == []
    with pytest.raises(IntegrityError):
        book.end_use(lease, 0)
    assert book.release(lease) == [A, B]


def test_leases_expire_at_their_time_and_not_before() -> None:
    book = LeaseBook()
    early, late = grant(book, "early", (A,), expires=5.0), grant(book, "late", (B,), expires=6.0)
    assert book.expire(4.999) == (0, [])
    assert book.expire(5.0) == (1, [A])
    assert (book.get(early), book.get(late) is not None) == (None, True)
    book.begin_use(late, 0)
    assert book.expire(7.0) == (1, [])
    assert book.end_use(late, 0) == [B]


def test_a_request_that_asks_again_has_the_new_lease_only() -> None:
    book = LeaseBook()
    first = grant(book, pins=(A,))
    second = book.next_id()
    freed = book.grant(Lease(second, E, RequestId("r"), 10.0, 3, ((Row(0, (B,)),),), (Medium.DISK,) * 3))
    assert freed == [A]
    assert (book.get(first), book.pinned()) == (None, dict.fromkeys(B.places(), 1))
    assert book.drop_request(E, RequestId("r")) == [B]
    assert book.drop_request(E, RequestId("r")) == []
    book.check_integrity()


def test_an_older_lease_in_use_does_not_end_the_newer_one() -> None:
    book = LeaseBook()
    first = grant(book, pins=(A,))
    book.begin_use(first, 0)
    second = grant(book, pins=(A,))
    assert book.pinned() == {Place(0, 1): 2}
    assert book.end_use(first, 0) == [A]
    assert book.get(second) is not None
    assert book.release(second) == [A]


def test_an_engine_that_is_gone_has_no_leases() -> None:
    book = LeaseBook()
    mine, in_use = grant(book, "a", (A,)), grant(book, "b", (B,))
    book.begin_use(in_use, 0)
    theirs = grant(book, "a", (A,), engine=OTHER)
    assert book.end_engine(E) == [A]
    assert (book.get(mine), book.get(in_use), book.get(theirs) is not None) == (None, None, True)
    assert book.end_use(in_use, 0) == [B]
    assert book.end_engine(E) == []


def test_a_lease_is_granted_once() -> None:
    book = LeaseBook()
    lease = book.get(grant(book))
    assert lease is not None
    with pytest.raises(IntegrityError):
        book.grant(lease)


def test_check_integrity_sees_a_lease_without_end() -> None:
    book = LeaseBook()
    lease = grant(book)
    book._held[lease].ending = True
    with pytest.raises(IntegrityError):
        book.check_integrity()
