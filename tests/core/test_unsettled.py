"""What is settled reaches the store once it can: nothing is lost or overtaken while there is room."""

from __future__ import annotations

import pytest

from raykv.core import unsettled
from raykv.core.unsettled import MAX_SETTLE, Unsettled
from raykv.store_messages import Settle
from raykv.types import JobId, LeaseId


def settle(*jobs: int, releases: tuple[int, ...] = ()) -> Settle:
    return Settle(commits=tuple(map(JobId, jobs)), releases=tuple(map(LeaseId, releases)))


def test_what_was_lost_comes_first_again() -> None:
    queue = Unsettled()
    assert queue.take() == Settle() and not queue
    queue.add(settle(1, releases=(7,)))
    queue.add(settle(2))
    assert queue.take() == settle(1, 2, releases=(7,)) and not queue
    queue.add(settle(3))
    queue.lost()
    assert queue.take() == settle(1, 2, 3, releases=(7,))
    queue.confirmed()
    queue.lost()
    assert queue.take() == Settle()


def test_a_sign_of_life_is_not_sent_again() -> None:
    queue = Unsettled()
    queue.add(Settle())
    queue.take()
    queue.lost()
    assert not queue


def test_batches_are_bounded_and_one_is_never_cut() -> None:
    queue = Unsettled()
    queue.add(settle(*range(MAX_SETTLE + 5)))
    queue.add(settle(*range(MAX_SETTLE - 1)))
    queue.add(settle(1))
    queue.add(settle(2))
    sizes = []
    while queue:
        sizes.append(len(queue.take().commits))
        queue.confirmed()
    assert sizes == [MAX_SETTLE + 5, MAX_SETTLE, 1]


def test_the_oldest_go_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsettled, "MAX_UNSETTLED", MAX_SETTLE + 50)
    queue = Unsettled()
    for job in range(MAX_SETTLE + 60):
        queue.add(settle(job))
    assert len(queue) == MAX_SETTLE + 50 and queue.take().commits[0] == 10
