"""The policies against plain models, and what is special to each."""

from __future__ import annotations

import tracemalloc
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.core.eviction import LRU, S3FIFO, STAY, Ghosts, Policy, make_policy
from raykv.core.slot_table import SlotTable
from raykv.errors import IntegrityError
from raykv.store_messages import KEY_NBYTES, Eviction

SLOTS = 12
POLICIES = pytest.mark.parametrize("kind", list(Eviction))


def key(number: int) -> bytes:
    return number.to_bytes(KEY_NBYTES, "little")


def fill(policy: Policy, slots: int) -> None:
    for slot in range(slots):
        policy.added(slot, key(slot))


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "add", "use", "use some", "evict", "drop"]), st.integers(0, SLOTS - 1)),
        max_size=60,
    ),
    st.sets(st.integers(0, SLOTS - 1)),
    st.integers(0, SLOTS),
)
def test_lru_is_the_order_of_use(steps: list[tuple[str, int]], pinned: set[int], n: int) -> None:
    policy, model = LRU(SLOTS), OrderedDict[int, None]()
    for step, slot in steps:
        if step == "add" and slot not in model:
            policy.added(slot, key(slot))
            model[slot] = None
        elif step == "use" and slot in model:
            policy.used(slot)
            model.move_to_end(slot)
        elif step == "use some":
            count = next((n for n in range(SLOTS - slot) if slot + n not in model), SLOTS - slot)
            if count:
                policy.used(slot, count)
            for one in reversed(range(slot, slot + count)):
                model.move_to_end(one)
        elif step in ("evict", "drop") and slot in model:
            policy.removed(slot, step == "evict")
            del model[slot]
    wanted = [slot for slot in model if slot not in pinned][:n]
    assert policy.victims(n, lambda slot: slot not in pinned) == wanted
    assert policy.victims(n, lambda slot: slot not in pinned) == wanted, "a look changes nothing"
    policy.check_integrity(set(model))


@POLICIES
@given(st.lists(st.tuples(st.integers(0, 59), st.integers(1, 60)), max_size=30), st.integers(0, 60))
def test_a_run_is_used_as_its_slots_one_by_one_from_its_tail(
    kind: Eviction, runs: list[tuple[int, int]], n: int
) -> None:
    together, alone = make_policy(kind, 60), make_policy(kind, 60)
    fill(together, 60)
    fill(alone, 60)
    for slot, count in runs:
        count = min(count, 60 - slot)
        together.used(slot, count)
        for one in reversed(range(slot, slot + count)):
            alone.used(one)
        assert together.victims(n, lambda slot: True) == alone.victims(n, lambda slot: True)
    together.check_integrity(set(range(60)))


@POLICIES
@given(
    steps=st.lists(st.tuples(st.sampled_from(["add", "use", "evict", "look"]), st.integers(0, 199)), max_size=300),
    pinned=st.sets(st.integers(0, 199)),
)
def test_victims_are_held_distinct_allowed_and_as_many_as_there_are(
    kind: Eviction, steps: list[tuple[str, int]], pinned: set[int]
) -> None:
    policy, held = make_policy(kind, 200), set[int]()
    for step, slot in steps:
        if step == "add" and slot not in held:
            policy.added(slot, key(slot))
            held.add(slot)
        elif step == "use" and slot in held:
            policy.used(slot)
        elif step == "look":
            found = policy.victims(slot, lambda s: s not in pinned)
            assert len(set(found)) == len(found) == min(slot, len(held - pinned))
            assert set(found) <= held - pinned
        elif step == "evict" and held - pinned:
            (victim,) = policy.victims(1, lambda s: s not in pinned)
            policy.removed(victim, True)
            held.remove(victim)
    policy.check_integrity(held)


@POLICIES
def test_a_scan_does_not_meet_the_same_pinned_slots_again_and_again(kind: Eviction) -> None:
    slots, asked = 1000, 0
    policy = make_policy(kind, slots)
    fill(policy, slots)

    def may(slot: int) -> bool:
        nonlocal asked
        asked += 1
        return slot >= 900

    for _ in range(100):
        (victim,) = policy.victims(1, may)
        policy.removed(victim, True)
    assert asked < 2 * 900 + 100 * (STAY + 2), "not 900 for each"
    policy.check_integrity(set(range(900)))


@POLICIES
def test_a_few_pinned_slots_keep_their_place(kind: Eviction) -> None:
    policy = make_policy(kind, 10)
    fill(policy, 10)
    assert policy.victims(3, lambda slot: slot not in (0, 1)) == [2, 3, 4]
    assert policy.victims(3, lambda slot: True) == [0, 1, 2]


def test_s3fifo_keeps_what_is_used_from_a_scan() -> None:
    """Ten blocks in use, then 200 that come once: LRU forgets the ten, S3-FIFO does not."""
    kept = {}
    for kind in Eviction:
        policy, where, free = make_policy(kind, 40), dict[int, int](), list(range(40))
        for number in [*range(10), *range(10), *range(1000, 1200)]:
            if number in where:
                policy.used(where[number])
                continue
            if not free:
                (slot,) = policy.victims(1, lambda slot: True)
                policy.removed(slot, True)
                where = {n: s for n, s in where.items() if s != slot}
                free.append(slot)
            where[number] = free.pop()
            policy.added(where[number], key(number))
        kept[kind] = sum(number in where for number in range(10))
    assert kept == {Eviction.LRU: 0, Eviction.S3FIFO: 10}


def test_s3fifo_takes_an_evicted_block_that_comes_again_for_one_in_use() -> None:
    policy = S3FIFO(20)
    fill(policy, 10)
    for slot in policy.victims(2, lambda slot: True):
        policy.removed(slot, True)
    policy.added(11, key(11))  # new: small
    policy.removed(2, False)  # not for want of room: no ghost
    policy.added(2, key(2))
    policy.added(0, key(0))  # comes again: main
    order = [*range(3, 10), 0, 11, 2]
    assert policy.victims(20, lambda slot: True) == order, "the small queue is cut to its share, then the main one goes"


def test_s3fifo_counts_a_block_down_round_by_round() -> None:
    policy = S3FIFO(10)
    fill(policy, 3)
    for slot in (0, 1, 2):
        policy.used(slot)
    for _ in range(9):
        policy.used(1)
    assert policy.victims(1, lambda slot: True) == [0], "used once: into the main queue, and first there"
    policy.used(0)
    policy.used(0)
    policy.used(2)
    assert policy.victims(3, lambda slot: True) == [1, 0, 2], "the small queue is within its share"


def test_ghosts_are_bounded_and_taken_once() -> None:
    ghosts = Ghosts(4)
    for mark in range(1, 9):
        ghosts.add(mark)
    assert [ghosts.take(mark) for mark in range(1, 9)] == [False] * 4 + [True] * 4
    assert not ghosts.take(8)
    assert not Ghosts(4).take(0), "an empty place is no mark 0"


@POLICIES
def test_check_integrity_sees_a_lost_slot(kind: Eviction) -> None:
    policy = make_policy(kind, 4)
    fill(policy, 3)
    with pytest.raises(IntegrityError):
        policy.check_integrity({0, 1})
    with pytest.raises(IntegrityError):
        policy.check_integrity({0, 1, 2, 3})
    policy._rings.colder[1] = 2  # type: ignore[attr-defined]
    with pytest.raises(IntegrityError):
        policy.check_integrity({0, 1, 2})


def test_a_block_costs_less_than_400_bytes_of_index() -> None:
    """Keys, index and policy. With 200,000 blocks: 247 bytes each (S3-FIFO), 230 with LRU; 12,500 fill a dict alike."""
    blocks = 12_500
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        table = SlotTable(blocks, S3FIFO(blocks))
        keys = [key(number) for number in range(blocks)]
        for slot in table.reserve(keys) or []:
            table.publish(slot)
        del keys
        per_block = (tracemalloc.get_traced_memory()[0] - before) / blocks
    finally:
        tracemalloc.stop()
    assert table.used == blocks
    print(f"{per_block:.0f} bytes a block")
    assert per_block < 400
