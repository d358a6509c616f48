"""The table of headers: what is found again, and that nothing wrong ever is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.admin_messages import NO_TENANT
from raykv.errors import StorageError
from raykv.storage.headers import PAGE, RECORD_NBYTES, Recovered, SlotHeaders, SlotState, read_geometry, table_nbytes
from raykv.store_messages import KEY_NBYTES
from tests.support.examples import examples

SLOTS, SLOT_NBYTES = 40, 8192


def key(number: int) -> bytes:
    return number.to_bytes(8, "big") + bytes(KEY_NBYTES - 8)


class Table:
    """A table in plain memory; `again` opens it as the next process would."""

    def __init__(self, slots: int = SLOTS) -> None:
        self.memory = bytearray(table_nbytes(slots))
        self.slots = slots
        self.headers, self.recovered = self.again()

    def again(self, slot_nbytes: int = SLOT_NBYTES) -> tuple[SlotHeaders, list[Recovered]]:
        headers = SlotHeaders(memoryview(self.memory), self.slots, slot_nbytes)
        return headers, headers.recover()


def test_a_new_table_is_empty() -> None:
    table = Table()
    assert table.headers.fresh and table.recovered == []
    assert table.headers.read(0).state is SlotState.FREE


def test_what_was_published_is_found_again() -> None:
    table = Table()
    table.headers.publish(3, key(1), 5000, 0xFFFF_FFFF_FFFF_FFFF)
    table.headers.publish(0, key(2), 0, 0)
    headers, recovered = table.again()
    assert not headers.fresh
    assert sorted(recovered) == [Recovered(0, key(2), 0, 0), Recovered(3, key(1), 5000, 0xFFFF_FFFF_FFFF_FFFF)]
    assert headers.read(3) == (SlotState.READY, key(1), 5000, 0xFFFF_FFFF_FFFF_FFFF, 1, NO_TENANT)


def test_a_slot_says_whose_it_is_and_a_table_of_before_is_as_good() -> None:
    table, whose = Table(), bytes(range(1, 9))
    table.headers.publish(3, key(1), 50, 7, whose)
    table.headers.publish(4, key(2), 50, 8)
    # A record as it was written when there were no tenants: the bytes are zeros, and the check covered them.
    start = PAGE + 4 * RECORD_NBYTES
    assert table.memory[start + 32 + KEY_NBYTES : start + 120] == bytes(120 - 32 - KEY_NBYTES)
    headers, recovered = table.again()
    assert sorted(recovered) == [Recovered(3, key(1), 50, 7, whose), Recovered(4, key(2), 50, 8, NO_TENANT)]
    assert headers.read(3).tenant == whose and headers.read(4).tenant == NO_TENANT
    table.memory[PAGE + 3 * RECORD_NBYTES + 90] ^= 1
    assert table.again()[0].read(3).state is SlotState.FREE, "a flipped tenant is no tenant"
    with pytest.raises(ValueError):
        headers.publish(5, key(3), 5, 7, b"short")


def test_a_cleared_slot_is_not_found() -> None:
    table = Table()
    table.headers.publish(3, key(1), 5, 7)
    table.headers.clear(3)
    assert table.headers.read(3).state is SlotState.FREE
    assert table.again()[1] == []


def test_a_quarantined_slot_stays_so_and_holds_nothing() -> None:
    table = Table()
    table.headers.publish(3, key(1), 5, 7)
    table.headers.quarantine(3)
    headers, recovered = table.again()
    assert recovered == [] and headers.quarantined() == [3]
    assert headers.read(3).state is SlotState.QUARANTINED


def test_without_a_checksum_nothing_is_recovered() -> None:
    table = Table()
    table.headers.publish(3, key(1), 5, None)
    assert table.headers.read(3).checksum is None and table.headers.read(3).state is SlotState.READY
    headers, recovered = table.again()
    assert recovered == [] and headers.read(3).state is SlotState.FREE


def test_of_two_slots_with_one_key_the_later_wins_also_over_lives() -> None:
    table = Table()
    table.headers.publish(9, key(1), 5, 7)
    table.headers.publish(2, key(1), 5, 8)
    headers, recovered = table.again()
    assert recovered == [Recovered(2, key(1), 5, 8)]
    assert headers.read(9).state is SlotState.FREE
    headers.publish(30, key(1), 5, 9)
    assert table.again()[1] == [Recovered(30, key(1), 5, 9)]


def test_a_record_in_another_slots_place_is_not_believed() -> None:
    table = Table()
    table.headers.publish(3, key(1), 5, 7)
    start = PAGE + 3 * RECORD_NBYTES
    table.memory[start + RECORD_NBYTES : start + 2 * RECORD_NBYTES] = table.memory[start : start + RECORD_NBYTES]
    assert table.again()[1] == [Recovered(3, key(1), 5, 7)]


def test_a_torn_record_is_a_free_slot() -> None:
    """A kill in the middle of the copy: any number of bytes of the new record over the old one."""
    table = Table()
    start = PAGE + 3 * RECORD_NBYTES
    table.headers.publish(3, key(1), 5, 7)
    old = bytes(table.memory[start : start + RECORD_NBYTES])
    table.headers.publish(3, key(2), 6, 8)
    new = bytes(table.memory[start : start + RECORD_NBYTES])
    whole = {Recovered(3, key(1), 5, 7), Recovered(3, key(2), 6, 8)}
    outcomes = set()
    for cut in range(RECORD_NBYTES + 1):
        table.memory[start : start + RECORD_NBYTES] = new[:cut] + old[cut:]
        recovered = table.again()[1]
        assert set(recovered) <= whole
        outcomes.update(recovered)
    assert outcomes == whole


@pytest.mark.parametrize("slots", [1, SLOTS])
def test_another_geometry_formats_the_table(slots: int) -> None:
    table = Table(slots)
    table.headers.publish(0, key(1), 5, 7)
    assert not table.again()[0].fresh
    headers, recovered = table.again(slot_nbytes=2 * SLOT_NBYTES)
    assert headers.fresh and recovered == []
    assert table.again(slot_nbytes=SLOT_NBYTES)[1] == [], "the records of the first geometry are gone for good"


def test_a_table_cut_in_its_geometry_is_none() -> None:
    table = Table()
    assert read_geometry(bytes(table.memory[:PAGE])) == (SLOTS, SLOT_NBYTES)
    for place in range(40):
        page = bytearray(table.memory[:PAGE])
        page[place] ^= 0x40
        assert read_geometry(bytes(page)) is None
    assert read_geometry(b"") is None


def test_a_thousand_flips_recover_nothing_wrong() -> None:
    """Bit flips and bursts all over the records: what is recovered is what was published, and it is missed less."""
    table, dice = Table(), random.Random(1)
    for slot in range(SLOTS):
        table.headers.publish(slot, key(slot), slot, slot * 31)
    whole, good = set(table.again()[1]), bytes(table.memory)
    assert len(whole) == SLOTS
    lost = 0
    for _ in range(1000):
        table.memory[:] = good
        slot, offset = dice.randrange(SLOTS), dice.randrange(RECORD_NBYTES)
        place = PAGE + slot * RECORD_NBYTES + offset
        if dice.random() < 0.5:
            table.memory[place] ^= 1 << dice.randrange(8)
        else:
            table.memory[place : place + 16] = dice.randbytes(len(table.memory[place : place + 16]))
        recovered = set(table.again()[1])
        assert recovered <= whole
        lost += len(whole) - len(recovered)
    assert lost >= 1000, "a record is checked in full, its padding too"


@settings(max_examples=examples(30))
@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["publish", "clear", "quarantine", "restart"]))))
def test_any_history_leaves_what_a_dictionary_would(history: list[tuple[int, str]]) -> None:
    table = Table(8)
    headers = table.headers
    slots: dict[int, Recovered] = {}
    bad: set[int] = set()
    for step, (slot, what) in enumerate(history):
        if what == "publish":
            headers.publish(slot, key(step), step, step * 3)
            slots[slot] = Recovered(slot, key(step), step, step * 3)
            bad.discard(slot)
        elif what == "restart":
            headers, recovered = table.again()
            assert sorted(recovered) == sorted(slots.values())
        else:
            getattr(headers, what)(slot)
            slots.pop(slot, None)
            (bad.add if what == "quarantine" else bad.discard)(slot)
    assert sorted(table.again()[1]) == sorted(slots.values())
    assert headers.quarantined() == sorted(bad)


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_slot_out_of_range_is_an_error(slot: int) -> None:
    headers = Table().headers
    for call in (headers.read, headers.clear, headers.quarantine, lambda s: headers.publish(s, key(1), 1, 1)):
        with pytest.raises(IndexError):
            call(slot)


def test_wrong_keys_and_sizes_are_errors() -> None:
    table = Table()
    with pytest.raises(ValueError):
        table.headers.publish(0, b"short", 5, 7)
    with pytest.raises(ValueError):
        table.headers.publish(0, key(1), SLOT_NBYTES + 1, 7)
    with pytest.raises(StorageError):
        SlotHeaders(memoryview(bytearray(PAGE)), SLOTS, SLOT_NBYTES)
    assert table.again()[1] == []
