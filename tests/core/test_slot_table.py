"""One tier: legal steps, illegal ones that change nothing, and where free slots are taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.core.eviction import LRU
from raykv.core.slot_table import SlotState, SlotTable
from raykv.errors import IntegrityError
from raykv.store_messages import KEY_NBYTES


def key(number: int) -> bytes:
    return number.to_bytes(KEY_NBYTES, "little")


def table_of(slots: int, ready: int = 0) -> SlotTable:
    """Slots 0 to ready - 1 hold keys of their number, in that order of age."""
    table = SlotTable(slots, LRU(slots))
    for slot in table.reserve([key(number) for number in range(ready)]) or []:
        table.publish(slot)
    return table


def test_a_block_is_found_from_its_publication_to_its_eviction() -> None:
    table = table_of(4)
    assert table.reserve([key(7)]) == [0]
    assert (table.find(key(7)), table.holds(key(7)), table.writing) == (None, True, 1)
    table.publish(0)
    assert (table.find(key(7)), table.key(0), table.used) == (0, key(7), 1)
    table.evict([0])
    assert (table.find(key(7)), table.holds(key(7)), table.free, table.evicted) == (None, False, 4, 1)
    table.check_integrity()


def test_a_discarded_block_was_never_there() -> None:
    table = table_of(1)
    table.reserve([key(1)])
    assert table.reserve([key(2)]) is None
    table.discard(0)
    assert not table.holds(key(1))
    assert table.reserve([key(2)]) == [0]
    table.check_integrity()


def test_reserve_is_all_or_nothing() -> None:
    table = table_of(3, ready=1)
    assert table.reserve([key(11), key(12), key(13)]) is None
    assert (table.free, table.writing) == (2, 0)
    for wrong in ([key(0)], [key(11), key(11)]):
        with pytest.raises(IntegrityError):
            table.reserve(wrong)
    assert (table.free, table.writing) == (2, 0)
    assert table.reserve([]) == []


def test_reserve_prefers_runs() -> None:
    table = table_of(12, ready=12)
    table.evict([1, 4, 5, 6, 9, 10])
    assert table.reserve([key(n) for n in range(20, 23)]) == [4, 5, 6]
    assert table.reserve([key(n) for n in range(23, 26)]) == [1, 9, 10], "a run of two and the rest"
    assert table.reserve([key(30)]) is None
    table.check_integrity()


@given(st.sets(st.integers(0, 39)), st.lists(st.integers(1, 9), max_size=12))
def test_reserve_finds_every_free_slot_once(evicted: set[int], wishes: list[int]) -> None:
    table, number, free = table_of(40, ready=40), 100, set(evicted)
    table.evict(evicted)
    for wish in wishes:
        keys = [key(number + i) for i in range(wish)]
        number += wish
        slots = table.reserve(keys)
        assert (slots is None) == (wish > len(free))
        if slots is not None:
            assert slots == sorted(set(slots)) and set(slots) <= free and len(slots) == wish
            assert [table.key(slot) for slot in slots] == keys
            free -= set(slots)
    table.check_integrity()


def test_pinned_slots_are_not_evictable() -> None:
    table = table_of(4, ready=4)
    table.pin(0)
    table.pin(0)
    table.use(1)
    assert (table.evictable(9), table.num_evictable) == ([2, 3, 1], 3)
    table.unpin(0)
    assert table.evictable(1) == [2]
    table.unpin(0)
    assert table.evictable(1) == [0]
    table.check_integrity()


def test_a_pinned_slot_can_be_quarantined_and_stays_so() -> None:
    table = table_of(2, ready=2)
    table.pin(1)
    table.quarantine(1)
    assert (table.find(key(1)), table.pins(1), table.quarantined, table.num_evictable) == (None, 1, 1, 1)
    table.check_integrity()
    table.unpin(1)
    assert table.state(1) is SlotState.QUARANTINED
    assert table.reserve([key(1)]) is None, "its slot is out of use, the block may be written anew elsewhere"
    table.evict([0])
    assert table.reserve([key(1)]) == [0]
    table.check_integrity()


def test_a_table_is_filled_by_what_was_recovered() -> None:
    table = table_of(4)
    table.recovered(2, key(5))
    table.recovered_quarantined(0)
    assert (table.find(key(5)), table.free, table.quarantined) == (2, 2, 1)
    for wrong in (lambda: table.recovered(2, key(6)), lambda: table.recovered(3, key(5))):
        with pytest.raises(IntegrityError):
            wrong()
    assert table.reserve([key(8), key(9)]) == [1, 3]
    table.check_integrity()


def test_runs_are_pinned_and_given_back_whole_or_not_at_all() -> None:
    table = table_of(8, ready=6)
    table.read(1, 4)
    table.pin(2, 2)
    table.quarantine(3)
    assert (table.pinned(), table.num_evictable) == ({1: 1, 2: 2, 3: 2, 4: 1}, 2)
    for wrong in (
        lambda: table.unpin(0, 2),
        lambda: table.unpin(4, 2),
        lambda: table.unpin(-1, 2),
        lambda: table.unpin(7, 2),
        lambda: table.pin(2, 2),
        lambda: table.read(5, 2),
        lambda: table.use(7, 3),
    ):
        with pytest.raises(IntegrityError):
            wrong()
        assert table.pinned() == {1: 1, 2: 2, 3: 2, 4: 1}
    table.unpin(1, 4)
    table.check_integrity()
    assert (table.pinned(), table.evictable(9)) == ({2: 1, 3: 1}, [0, 5, 4, 1])
    table.unpin(2, 2)
    assert table.evictable(9) == [0, 5, 4, 2, 1]
    table.check_integrity()


def test_a_key_has_its_size() -> None:
    table = table_of(2)
    for wrong in (b"", key(1)[1:], key(1) + b"1"):
        with pytest.raises(IntegrityError):
            table.reserve([key(2), wrong])
        with pytest.raises(IntegrityError):
            table.recovered(0, wrong)
    assert (table.free, table.holds(key(2))) == (2, False)
    table.check_integrity()


# Slot 0 is FREE, 1 WRITING, 2 READY, 3 READY and pinned, 4 QUARANTINED, 5 quarantined and pinned; 6 does not exist.
STEPS: dict[str, tuple[Callable[[SlotTable, int], object], set[int]]] = {
    "publish": (SlotTable.publish, {1}),
    "discard": (SlotTable.discard, {1}),
    "use": (SlotTable.use, {2, 3}),
    "pin": (SlotTable.pin, {2, 3}),
    "unpin": (SlotTable.unpin, {3, 5}),
    "evict": (lambda table, slot: table.evict([slot]), {2}),
    "evict_two": (lambda table, slot: table.evict([2, slot]), set()),
    "quarantine": (SlotTable.quarantine, {2, 3}),
    "recovered": (lambda table, slot: table.recovered(slot, key(99)), {0}),
    "recovered_quarantined": (SlotTable.recovered_quarantined, {0}),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("slot", [*range(6), -1, 6])
def test_an_illegal_step_raises_and_changes_nothing(step: str, slot: int) -> None:
    table = table_of(6)
    for number in range(2, 6):
        table.recovered(number, key(number))
    table.reserve([key(0), key(1)])
    table.discard(0)
    table.pin(3)
    table.pin(5)
    table.quarantine(4)
    table.quarantine(5)
    run, legal = STEPS[step]

    def state() -> object:
        slots = [(table.state(s), table.pins(s), table._keys.get(s)) for s in range(6)]
        return slots, dict(table._index), list(table._counts), table.evicted, table.evictable(6)

    before = state()
    if slot in legal:
        run(table, slot)
        assert state() != before or step == "use"
    else:
        with pytest.raises(IntegrityError):
            run(table, slot)
        assert state() == before
    table.check_integrity()


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t._counts.__setitem__(0, 9),
        lambda t: t._pins.add(0, 1),
        lambda t: t._pins.add(3, 1),
        lambda t: t._pins._high.__setitem__(0, 1),
        lambda t: t._index.pop(key(1)),
        lambda t: t._keys._hashes.__setitem__(33, 1),
        lambda t: t._keys._heads.__setitem__(0, 1),
        lambda t: t._policy.removed(1, True),
    ],
)
def test_check_integrity_sees_damage(damage: Callable[[SlotTable], object]) -> None:
    table = table_of(4, ready=2)
    table.check_integrity()
    damage(table)
    with pytest.raises(IntegrityError):
        table.check_integrity()


def test_a_table_without_slots_is_an_error() -> None:
    with pytest.raises(ValueError):
        SlotTable(0, LRU(0))


def test_an_entry_that_was_lost_comes_free_with_its_last_pin() -> None:
    """A table of entries is no medium: nothing is out of use for ever."""
    table = table_of(6, ready=6)
    table.entries_only = True
    table.pin(0, 5)
    table.pin(1, 3)
    for lost in (1, 2, 4, 5):
        table.quarantine(lost)
    assert (table.free, table.quarantined, table.find(key(1))) == (1, 3, None)
    table.unpin(1)
    table.check_integrity()
    assert table.quarantined == 3 and table.reserve([key(1), key(9)]) is None
    table.unpin(0, 5)  # free: 1 and 4; lost and still read: 2; READY and still read: 3
    table.check_integrity()
    assert (table.free, table.quarantined, table.pinned()) == (3, 1, {2: 1, 3: 1})
    assert table.evictable(9) == [0]
    table.unpin(2, 2)
    table.check_integrity()
    assert (table.free, table.quarantined, table.num_evictable) == (4, 0, 2)
    assert table.reserve([key(1), key(2), key(4), key(5)]) == [1, 2, 4, 5]
    table.check_integrity()


def test_a_lost_entry_without_a_pin_is_damage() -> None:
    table = table_of(2, ready=1)
    table.entries_only = True
    table.recovered_quarantined(1)
    with pytest.raises(IntegrityError):
        table.check_integrity()
