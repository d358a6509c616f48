"""How a child's reports, in pieces and out of order, become one end for each load."""

from __future__ import annotations

import pytest

from raykv.core.open_loads import OpenLoads
from raykv.messages import NO_ATTEMPT, EventKind, LoadOrder
from raykv.types import Attempt, RequestId

R, S = RequestId("r"), RequestId("s")
DONE, FAILED = EventKind.RECV_DONE, EventKind.RECV_FAILED


def order(request: RequestId, attempt: int = 0, blocks: tuple[int, ...] = ()) -> LoadOrder:
    return LoadOrder(request, Attempt(attempt), blocks)


@pytest.fixture
def loads() -> OpenLoads:
    """R fills blocks 1 and 2 in its attempt 3, S block 4."""
    loads = OpenLoads()
    loads.begin([order(R, 3, (1, 2)), order(S, 0, (4,))], deadline=10.0)
    return loads


def test_each_load_ends_once(loads: OpenLoads) -> None:
    assert list(loads.end([R], [], [])) == [(DONE, R, 3)]
    assert list(loads.end([R], [], [])) == [(DONE, R, NO_ATTEMPT)]
    assert len(loads) == 1


def test_a_failure_in_the_same_report(loads: OpenLoads) -> None:
    assert list(loads.end([R, S], [R], [])) == [(FAILED, R, 3), (DONE, S, 0)]
    assert not loads


def test_a_failure_that_is_reported_before_the_end(loads: OpenLoads) -> None:
    assert list(loads.end([], [R], [])) == []
    assert len(loads) == 2, "it may still write"
    assert list(loads.end([R, S], [], [])) == [(FAILED, R, 3), (DONE, S, 0)]


def test_invalid_blocks_fail_the_load_that_fills_them(loads: OpenLoads) -> None:
    assert list(loads.end([], [], [2, 9])) == []
    assert sorted(loads.end([S, R], [], []), key=str) == sorted([(DONE, S, 0), (FAILED, R, 3)], key=str)


def test_a_later_try_is_not_failed_by_the_earlier_one(loads: OpenLoads) -> None:
    list(loads.end([R], [R], []))
    loads.begin([order(R, 4, (1, 2))], deadline=10.0)
    assert list(loads.end([R], [], [])) == [(DONE, R, 4)]


def test_what_nobody_asked_for_has_no_attempt(loads: OpenLoads) -> None:
    nobody = RequestId("nobody")
    assert list(loads.end([nobody], [], [])) == [(DONE, nobody, NO_ATTEMPT)]
    assert list(loads.end([nobody], [nobody], [])) == [(FAILED, nobody, NO_ATTEMPT)]


def test_death_fails_all_that_is_open(loads: OpenLoads) -> None:
    assert sorted(loads.lose(), key=str) == sorted([(FAILED, R, 3), (FAILED, S, 0)], key=str)
    assert not loads and list(loads.lose()) == []


def test_overdue(loads: OpenLoads) -> None:
    loads.begin([order(RequestId("long"))], deadline=20.0)
    assert loads.overdue(10.0) is None
    assert loads.overdue(10.1) == R
    list(loads.end([R, S], [], []))
    assert loads.overdue(10.1) is None
    assert loads.overdue(20.1) == "long"
