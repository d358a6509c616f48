"""Which reports of a child settle a send."""

from __future__ import annotations

from raykv.core.owed_sends import REMEMBERED, OwedSends
from raykv.types import RequestId

R, S = RequestId("r"), RequestId("s")


def test_only_what_is_owed_settles() -> None:
    sends = OwedSends(pulled_by_peers=False)
    assert sends.done([R]) == (set(), {R}), "too early: it proves nothing"
    sends.owe([R])
    assert sends.done([R, S]) == ({R}, {S})
    assert sends.done([R]) == (set(), {R}), "once"


def test_a_peers_read_settles_before_the_debt_is_known() -> None:
    sends = OwedSends(pulled_by_peers=True)
    assert sends.done([R]) == ({R}, set())
    sends.owe([R, S])
    assert sends.done([S]) == ({S}, set())
    sends.owe([R])
    assert sends.done([R]) == ({R}, set()), "the same id again is another request"


def test_what_never_becomes_owed_is_forgotten() -> None:
    sends = OwedSends(pulled_by_peers=True)
    sends.done([R])
    for number in range(REMEMBERED):
        sends.done([RequestId(str(number))])
    sends.owe([R])
    assert R in sends._owed and len(sends._done_early) == REMEMBERED
