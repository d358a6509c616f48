"""The registry of operations: idempotent by number, bounded, and never of two minds."""

from __future__ import annotations

import threading

import pytest

from raykv.admin_messages import OperationKind
from raykv.core.operations import ENDED, RUNNING, OperationBook
from raykv.errors import IntegrityError, StoreError

VERIFY, PREFETCH = OperationKind.VERIFY, OperationKind.PREFETCH


class Clock:
    now = 100.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_a_number_is_begun_once_and_answers_ever_after() -> None:
    book = OperationBook(Clock())
    first, new = book.begin("1", VERIFY, 10)
    assert new and (first.done, first.total, first.running, first.began, first.ended) == (0, 10, True, 101.0, 0.0)
    assert book.begin("1", VERIFY, 99) == (first, False)
    assert book.advance("1", 4).done == 4 and book.advance("1", 0, total=6).total == 6
    assert book.advance("1", 5).total == 9, "never less than what is done"
    ended = book.end("1", "all well")
    assert (ended.running, ended.ended, ended.result, ended.done) == (False, 102.0, "all well", 9)
    assert book.begin("1", VERIFY) == (ended, False) and book.get("1") == ended and book.all() == (ended,)
    book.check_integrity()


def test_what_is_wrong_raises_and_changes_nothing() -> None:
    book = OperationBook()
    book.begin("1", VERIFY)
    before = book.all()
    for number, kind in (("1", PREFETCH), ("", VERIFY), ("x" * 129, VERIFY), (None, VERIFY), (7, VERIFY)):
        with pytest.raises(StoreError):
            book.begin(number, kind)  # type: ignore[arg-type]
    for unknown in ("2", None, []):
        with pytest.raises(StoreError, match="knows no operation"):
            book.get(unknown)  # type: ignore[arg-type]
    with pytest.raises(IntegrityError):
        book.advance("2")
    assert book.all() == before
    book.end("1")
    for call in (lambda: book.end("1"), lambda: book.advance("1")):
        with pytest.raises(IntegrityError):
            call()


def test_it_is_bounded_and_drops_only_what_has_ended() -> None:
    book = OperationBook()
    book.begin("long", VERIFY)
    for number in range(ENDED + 20):
        book.begin(str(number), VERIFY)
        book.end(str(number))
        book.check_integrity()
    numbers = [state.number for state in book.all()]
    assert len(numbers) == ENDED + 1 and numbers[0] == "long" and "19" not in numbers and "20" in numbers
    for number in range(RUNNING - 1):
        book.begin(f"r{number}", VERIFY)
    with pytest.raises(StoreError, match=f"{RUNNING} operations run already"):
        book.begin("more", VERIFY)
    book.end("long")
    assert book.begin("more", VERIFY)[1]


def test_close_stops_what_runs_and_lets_nothing_begin() -> None:
    book = OperationBook()
    book.begin("1", VERIFY)
    assert not book.stopped("1") and book.stopped("2")
    book.close()
    assert book.stopped("1")
    with pytest.raises(StoreError, match="shut down"):
        book.begin("2", VERIFY)
    book.end("1", error="it was stopped")
    assert book.get("1").error == "it was stopped"


def test_of_many_threads_one_begins() -> None:
    book, begun = OperationBook(), []
    barrier = threading.Barrier(8)

    def begin() -> None:
        barrier.wait()
        begun.append(book.begin("1", VERIFY)[1])

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(begun) == [False] * 7 + [True]
