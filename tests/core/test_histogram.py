"""Fixed buckets, and what a tier is told of the ages of its blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.core.eviction import make_policy
from raykv.core.histogram import SECONDS, Histogram
from raykv.core.slot_ages import SlotAges
from raykv.core.slot_table import SlotTable
from raykv.store_messages import KEY_NBYTES, Eviction


@given(st.lists(st.floats(0, 100)))
def test_each_value_is_in_the_first_bucket_that_takes_it(values: list[float]) -> None:
    histogram = Histogram(SECONDS)
    for value in values:
        histogram.add(value)
    read = histogram.read()
    assert (read.count, read.total) == (len(values), pytest.approx(sum(values)))
    for bound, count in zip(SECONDS, (count for _, count in read.up_to()), strict=False):
        assert count == sum(value <= bound for value in values)
    assert read.up_to()[-1] == ("+Inf", len(values))


@pytest.mark.parametrize("bounds", [(), (1.0, 1.0), (2.0, 1.0)])
def test_bounds_must_ascend(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        Histogram(bounds)


def key(number: int) -> bytes:
    return number.to_bytes(KEY_NBYTES, "big")


@pytest.mark.parametrize("eviction", list(Eviction))
def test_a_tier_knows_how_old_its_victims_were_and_which_were_never_read(eviction: Eviction) -> None:
    table = SlotTable(8, make_policy(eviction, 8))
    table.recovered(7, key(99))
    table.ages.tick(1000.0)
    slots = table.reserve([key(i) for i in range(4)]) or []
    for slot in slots:
        table.publish(slot)
    table.ages.tick(1010.0)
    table.read(slots[0], 1)
    table.unpin(slots[0])
    table.read(slots[1], 2)
    table.unpin(slots[1], 2)
    table.evict([slots[0], slots[2], slots[3]])
    table.ages.tick(1100.0)
    table.evict([7, slots[1]])
    ages = table.ages.evicted.read()
    assert table.ages.never_read == 2, "the last one, and the one of an earlier life"
    assert (ages.count, ages.total) == (5, 3 * 10 + 2 * 100), "what was there before the first tick came then"


def test_a_slot_that_is_used_again_is_a_new_block() -> None:
    table = SlotTable(1, make_policy(Eviction.LRU, 1))
    for number in range(2):
        (slot,) = table.reserve([key(number)]) or []
        table.publish(slot)
        if not number:
            table.read(slot, 1)
            table.unpin(slot)
        table.evict([slot])
    assert table.ages.never_read == 1


def test_ages_grow_and_shrink_with_their_tier() -> None:
    ages = SlotAges(4)
    ages.tick(5.0)
    ages.came(3)
    ages.was_read[3] = 1
    marks = ages.was_read
    ages.resize(8)
    ages.tick(9.0)
    ages.came(7)
    ages.tick(10.0)
    ages.went([3, 7])
    assert (ages.never_read, ages.evicted.read().total) == (1, 5 + 1)
    ages.resize(2)
    assert ages.was_read is marks and len(marks) == 2, "the table has it by reference"
