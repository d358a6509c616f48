"""Pins of slots against a plain count, also where many read one slot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.core.slot_pins import BASE, SlotPins
from raykv.errors import IntegrityError

SLOTS = 6
RUNS = st.tuples(st.integers(0, SLOTS - 1), st.integers(1, SLOTS)).map(
    lambda run: (run[0], min(run[1], SLOTS - run[0]))
)


@given(st.lists(st.tuples(RUNS, st.integers(1, BASE + 2), st.booleans()), max_size=12))
def test_pins_are_a_count_by_slot(steps: list[tuple[tuple[int, int], int, bool]]) -> None:
    pins, model = SlotPins(SLOTS), [0] * SLOTS
    for (slot, count), times, more in steps:
        run = range(slot, slot + count)
        for _ in range(times):
            if more:
                assert pins.add(slot, count) == sum(not model[one] for one in run)
            elif all(model[one] for one in run):
                assert pins.take(slot, count) == sum(model[one] == 1 for one in run)
            else:
                with pytest.raises(IntegrityError):
                    pins.take(slot, count)
                break
            for one in run:
                model[one] += 1 if more else -1
        assert [pins.count(one) for one in range(SLOTS)] == model
        assert [pins.none(one) for one in range(SLOTS)] == [not count for count in model]
        assert pins.all() == {one: count for one, count in enumerate(model) if count}
        pins.check_integrity()


def test_a_block_that_thousands_read_is_free_when_the_last_has_gone() -> None:
    pins = SlotPins(3)
    for number in range(3 * BASE + 7):
        assert pins.add(0, 3) == (3 if not number else 0)
    assert pins.count(1) == 3 * BASE + 7
    for number in reversed(range(3 * BASE + 7)):
        assert not pins.none(2)
        assert pins.take(0, 3) == (0 if number else 3)
    assert pins.all() == {}
    pins.check_integrity()


def test_check_integrity_sees_a_lost_digit() -> None:
    pins = SlotPins(2)
    for _ in range(BASE + 1):
        pins.add(1, 1)
    pins._low[1] = 0
    with pytest.raises(IntegrityError):
        pins.check_integrity()
