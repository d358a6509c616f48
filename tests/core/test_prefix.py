"""What a look-up does with runs of slots; `test_store_book` has the longest prefix against a search through all."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from raykv.core.eviction import LRU
from raykv.core.prefix import CHUNK, block_key, longest_prefix, tail_first
from raykv.core.slot_table import SlotTable
from raykv.core.store_plans import Place, Row, Run, runs_of
from raykv.core.tiers import Tiers
from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES, Medium

FP, OTHER = bytes(FINGERPRINT_NBYTES), b"\1" * FINGERPRINT_NBYTES
HOST, DISK = 0, 1


def digest(number: int) -> bytes:
    return number.to_bytes(HASH_NBYTES, "big")


def prompt(*numbers: int) -> bytes:
    return b"".join(map(digest, numbers))


def key(number: int, fingerprint: bytes = FP) -> bytes:
    return block_key(fingerprint, 0, digest(number))


HEAD = block_key(FP, 0, b"")


@given(
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=6),
    first=st.integers(0, 20),
    evicted=st.sets(st.integers(0, 200), max_size=3),
    writing=st.booleans(),
)
def test_a_run_ends_where_the_next_block_is_not_ready_behind_it(
    lengths: list[int], first: int, evicted: set[int], writing: bool
) -> None:
    """Blocks 0, 1, ... in runs of these lengths, with a slot between two of them."""
    slots = [at + gap for gap, at in enumerate(sum(lengths[:number]) for number in range(len(lengths)))]
    slot_of = dict(enumerate(slot for at, count in zip(slots, lengths, strict=True) for slot in range(at, at + count)))
    table = SlotTable(600, LRU(600))
    for number, slot in slot_of.items():
        table.recovered(slot, key(number))
    gone = {number for number in evicted if number in slot_of}
    table.evict(slot_of[number] for number in gone)
    if writing and gone:
        table.reserve([key(min(gone))])  # not to be seen, though its hash may lie where it was
    expected = 0
    while (n := first + expected) in slot_of and n not in gone and slot_of[n] == slot_of[first] + expected:
        expected += 1
    found = table.run(HEAD, prompt(*range(len(slot_of) + 3)), first)
    assert found == ((slot_of[first], expected) if expected else None)


def test_a_run_is_of_one_row() -> None:
    table = SlotTable(8, LRU(8))
    for slot, fingerprint in enumerate([FP, FP, OTHER, FP]):
        table.recovered(slot, key(slot, fingerprint))
    table.recovered(4, key(2))
    assert table.run(HEAD, prompt(0, 1, 2, 3), 0) == (0, 2)
    assert table.run(HEAD, prompt(0, 1, 2, 3), 2) == (4, 1)


def test_every_block_comes_from_the_fastest_tier_that_has_it() -> None:
    tables = [SlotTable(20, LRU(20)) for _ in range(3)]
    for number in range(10):
        tables[2].recovered(number, key(number))
    for number in (0, 4, 5, 8):
        tables[HOST].recovered(number, key(number))
    tables[HOST].reserve([key(9)])
    tables[DISK].recovered(7, key(6))
    tiers = Tiers(tables, [Medium.HOST, Medium.DISK, Medium.DISK])
    n, ((row,),) = longest_prefix(tiers, [FP], [0], prompt(*range(12)))
    assert n == 10
    assert [place.tier for place in row.places()] == [0, 2, 2, 2, 0, 0, 1, 2, 0, 2]
    disk, host = Medium.DISK, Medium.HOST
    assert tiers.slowest(n, [row]) == (host, disk, disk, disk, host, host, disk, disk, host, disk)
    tiers.off(HOST, "gone")
    _, ((row,),) = longest_prefix(tiers, [FP], [0], prompt(*range(12)))
    assert [place.tier for place in row.places()] == [2] * 6 + [1] + [2] * 3


def test_the_tails_of_all_rows_are_used_before_their_heads() -> None:
    n = 2 * CHUNK + 10
    one, two = Row(0, (Run(0, 0, n),)), Row(CHUNK + 5, (Run(0, 1000, 20), Run(1, 0, n - CHUNK - 25)))
    used = [place for run in tail_first([one, two]) for place in reversed(list(run.places()))]
    assert sorted(used) == sorted([*one.places(), *two.places()])
    block = {place: i for row in (one, two) for i, place in enumerate(row.places(), row.first)}
    chunks = [block[place] // CHUNK for place in used]
    assert chunks == sorted(chunks, reverse=True)
    for row in (one, two):
        mine = [block[place] for place in used if place in row.places()]
        assert mine == sorted(mine, reverse=True)
    assert tail_first([two]) == [*reversed(two.runs)]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5)), max_size=12))
def test_runs_are_the_places_in_their_order(places: list[tuple[int, int]]) -> None:
    wanted = [Place(*place) for place in places]
    runs = runs_of(wanted)
    assert [place for run in runs for place in run.places()] == wanted
    assert not any((a.tier, a.slot + a.length) == (b.tier, b.slot) for a, b in itertools.pairwise(runs))


def test_a_row_is_cut_from_its_tail() -> None:
    row = Row(3, (Run(0, 10, 2), Run(1, 5, 3)))
    assert row.end == 8
    for end in range(3, 10):
        assert row.cut(end).places() == row.places()[: end - 3]
        assert all(run.length for run in row.cut(end).runs)


def test_a_row_is_cut_from_its_head() -> None:
    row = Row(3, (Run(0, 10, 2), Run(1, 5, 3)))
    for first in range(0, 11):
        rest = row.past(first)
        assert rest.places() == row.places()[max(0, first - 3) :]
        assert rest.first == max(3, first) and all(run.length for run in rest.runs)
