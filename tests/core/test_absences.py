"""Why blocks are not here: bounded, and right for what it remembers."""

from __future__ import annotations

import pytest

from raykv.core.absences import Absences
from raykv.engine_messages import Why
from raykv.errors import IntegrityError
from raykv.store_messages import KEY_NBYTES


def key(number: int) -> bytes:
    return number.to_bytes(8, "big") * 6 + bytes(KEY_NBYTES - 48)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_the_last_reason_counts() -> None:
    absences = Absences(clock=Clock())
    assert absences.find(key(1)) is None and len(absences) == 0
    absences.left(key(1))
    with absences.because(Why.CLEARED):
        absences.left(key(2))
        with absences.because(Why.CORRUPT):
            absences.left(key(3))
        absences.left(key(4))
    absences.note(key(5), Why.NO_ROOM)
    found = [absences.find(key(number)) for number in range(1, 6)]
    assert found == [(Why.EVICTED, 1.0), (Why.CLEARED, 2.0), (Why.CORRUPT, 3.0), (Why.CLEARED, 4.0), (Why.NO_ROOM, 5.0)]
    absences.left(key(5))
    assert absences.find(key(5)) == (Why.EVICTED, 6.0) and len(absences) == 5
    absences.check_integrity()


def test_what_a_pin_kept_has_expired_when_it_goes() -> None:
    absences = Absences(clock=Clock())
    absences.note(key(1), Why.EXPIRED)
    absences.left(key(1))
    assert absences.find(key(1)) == (Why.EXPIRED, 2.0)
    with absences.because(Why.CLEARED):
        absences.left(key(1))
    assert absences.find(key(1)) == (Why.CLEARED, 3.0)


def test_a_reason_is_taken_back_also_by_an_error() -> None:
    absences = Absences()
    with pytest.raises(ValueError), absences.because(Why.CLEARED):
        with pytest.raises(IntegrityError):
            absences.check_integrity()
        raise ValueError
    absences.left(key(1))
    found = absences.find(key(1))
    assert found is not None and found[0] is Why.EVICTED


def test_it_keeps_most_of_the_last_ones_and_none_for_ever() -> None:
    capacity = 4000
    absences = Absences(capacity, Clock())
    for number in range(10 * capacity):
        absences.left(key(number))
    last = sum(absences.find(key(number)) is not None for number in range(9 * capacity, 10 * capacity))
    first = sum(absences.find(key(number)) is not None for number in range(capacity))
    assert last > 0.6 * capacity and first < 0.01 * capacity and len(absences) <= 2 * capacity
    times = [found[1] for number in range(10 * capacity) if (found := absences.find(key(number))) is not None]
    assert times == sorted(times), "no key has another one's time"
