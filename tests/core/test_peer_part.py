"""The pure parts of the peer tier: which blocks lie where, what a seal ties, fetches and loans in the book."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raykv.admin_messages import NO_TENANT, tenant_tag
from raykv.core.eviction import make_policy
from raykv.core.peer_part import PeerPart, PeerParts, lacking, seal
from raykv.core.prefix import block_key
from raykv.core.slot_table import SlotTable
from raykv.core.store_book import StoreBook
from raykv.core.store_plans import Place
from raykv.errors import IntegrityError
from raykv.peer_messages import Lent, PeerMemory
from raykv.store_messages import HASH_NBYTES, KEY_NBYTES, Cascade, Eviction, Medium
from raykv.types import EngineId, JobId, LeaseId, Rank, RequestId, StoreLife

MEMORY = PeerMemory(base=1 << 40, slots=1000, slot_nbytes=4096, metadata=b"")
PEER, OTHER = EngineId("peer"), EngineId("other")


def digest(i: int) -> bytes:
    return struct.pack("<Q", i).ljust(HASH_NBYTES, b"\1")


def a_part(first: int, blocks: int, windows: Sequence[int], ranks: int, asked: int | None = None) -> PeerPart | None:
    """Slots count up from 0 in the order of the wire, seals from 10000."""
    count = ranks * sum(map(len, lacking(windows, first, blocks)))
    lent = Lent(
        StoreLife("life"),
        blocks,
        LeaseId(7),
        60.0,
        struct.pack(f"<{count}I", *range(count)),
        struct.pack(f"<{count}Q", *range(10000, 10000 + count)),
    )
    hashes = b"".join(digest(i) for i in range(blocks if asked is None else asked))
    fingerprints = [bytes([rank]) * 16 for rank in range(ranks)]
    return PeerPart.of(lent, MEMORY, "peer", 1.0, first, windows, fingerprints, hashes)


SHAPES = st.tuples(
    st.integers(0, 6), st.integers(1, 9), st.lists(st.integers(0, 4), min_size=1, max_size=3), st.integers(1, 3)
)


@given(SHAPES)
def test_each_block_of_a_prefix_is_here_or_there_and_has_a_slot_of_its_own(
    shape: tuple[int, int, list[int], int],
) -> None:
    first, more, windows, ranks = shape
    blocks = first + more
    part = a_part(first, blocks, windows, ranks)
    assert part is not None
    needed = [list(range(blocks - min(w, blocks), blocks)) if w else list(range(blocks)) for w in windows]
    here, there = part.split(needed)
    addresses = []
    for row in range(ranks):
        for group, wanted in enumerate(needed):
            assert sorted(here[group] + there[group]) == list(range(len(wanted)))
            near, far = ([wanted[place] for place in places[group]] for places in (here, there))
            assert all(i < first and not windows[group] for i in near)
            found = part.blocks(row, [(group, i) for i in far])
            assert found is not None
            assert [one.key for one in found] == [block_key(bytes([row]) * 16, group, digest(i)) for i in far]
            addresses += [one.address for one in found]
            assert all((one.address - MEMORY.base) // 4096 + 10000 == one.seal for one in found)
            for i in near:
                assert part.blocks(row, [(group, i)]) is None
    assert sorted(addresses) == [MEMORY.base + 4096 * slot for slot in range(len(part.slots))]


def test_what_a_peer_has_not_lent_has_no_slot() -> None:
    part = a_part(2, 5, (0, 2), 1)
    assert part is not None
    assert part.blocks(0, [(0, 2), (0, 4), (1, 3)]) is not None
    for wrong in [(0, 1), (0, 5), (0, -1), (1, 2)]:
        assert part.blocks(0, [wrong]) is None
    assert part.blocks(1, [(0, 2)]) is None and part.blocks(-1, [(0, 2)]) is None


@pytest.mark.parametrize(
    "change",
    [
        {"lease": None},
        {"num_blocks": 2},
        {"num_blocks": 6},
        {"num_blocks": -3},
        {"slots": b""},
        {"seals": b"1234567"},
        {"slots": struct.pack("<4I", 1, 2, 3, 1000)},
    ],
)
def test_an_answer_to_another_question_is_no_part(change: dict[str, Any]) -> None:
    good: dict[str, Any] = dict(
        store=StoreLife("life"), num_blocks=5, lease=LeaseId(0), slots=bytes(16), seals=bytes(32)
    )
    fixed = (MEMORY, "peer", 1.0, 3, (0, 2), (bytes(16),), b"".join(map(digest, range(5))))
    assert PeerPart.of(Lent(**good), *fixed) is not None
    assert PeerPart.of(Lent(**{**good, **change}), *fixed) is None


@given(st.binary(min_size=KEY_NBYTES, max_size=KEY_NBYTES), st.integers(0, 2**40), st.integers(0, 2**64 - 1))
def test_a_seal_ties_key_length_and_checksum(key: bytes, nbytes: int, checksum: int) -> None:
    good = seal(key, nbytes, checksum)
    assert 0 <= good < 2**64
    other = bytes([key[0] ^ 1]) + key[1:]
    assert good not in (seal(other, nbytes, checksum), seal(key, nbytes + 1, checksum), seal(key, nbytes, checksum ^ 1))


def test_parts_go_with_their_leases() -> None:
    parts, one = PeerParts(), a_part(0, 3, (0,), 1)
    assert one is not None
    parts.add(LeaseId(1), one)
    parts.add(LeaseId(2), one)
    with pytest.raises(IntegrityError):
        parts.add(LeaseId(1), one)
    assert parts.take([LeaseId(1), LeaseId(9)]) == [one] and parts.get(LeaseId(1)) is None
    assert parts.take_over(lambda lease: True) == [] and len(parts) == 1
    assert parts.take_over(lambda lease: False) == [one] and len(parts) == 0


# -- the book -----------------------------------------------------------------------------------------------


def a_book(*slots: int) -> StoreBook:
    tables = [SlotTable(count, make_policy(Eviction.LRU, count)) for count in slots]
    return StoreBook(tables, [Medium.HOST, Medium.DISK][: len(slots)], Cascade.EVICT, 60.0)


F = bytes(16)


def keys(*numbers: int) -> list[bytes]:
    return [block_key(F, 0, digest(i)) for i in numbers]


def save(book: StoreBook, *numbers: int, job: int = 0) -> None:
    plan = book.begin_save(OTHER, Rank(0), JobId(job), keys(*numbers))
    book.end_write(plan, ok=True)
    book.commit(OTHER, JobId(job))


def lend(book: StoreBook, number: str, count: int, first: int = 0, most: int = 99) -> Any:
    hashes = b"".join(digest(i) for i in range(count))
    return book.lend(PEER, RequestId(number), [F], [0], hashes, first, most, expires=10.0)


def test_a_loan_pins_what_the_borrower_lacks_until_its_time_is_over() -> None:
    book = a_book(4)
    save(book, 0, 1, 2, 3)
    lease = lend(book, "1", 6, first=1)
    assert (lease.num_blocks, lease.num_pins) == (4, 3)
    save(book, 10, 11, 12, 13, job=1)
    assert [book.find(key) is not None for key in keys(0, 1, 2, 3)] == [False, True, True, True]
    book.check_integrity()
    assert book.expire(9.0) == 0 and book.expire(10.0) == 1
    save(book, 20, 21, 22, job=2)
    assert not any(book.find(key) for key in keys(1, 2, 3))
    book.check_integrity()


def test_a_loan_is_refused_where_it_brings_nothing_or_pins_too_much() -> None:
    book = a_book(4, 4)
    save(book, 0, 1, 2)
    assert lend(book, "1", 3, first=3) is None
    assert lend(book, "2", 3, most=2) is None
    assert lend(book, "3", 3, most=3).num_blocks == 3
    book.check_integrity()


@given(SHAPES, st.sets(st.integers(0, 150), max_size=3), st.randoms())
def test_what_is_lent_lies_in_the_order_in_which_the_borrower_counts(
    shape: tuple[int, int, list[int], int], gaps: set[int], dice: Random
) -> None:
    first, more, windows, ranks = shape
    prints = [bytes([rank]) * 16 for rank in range(ranks)]
    held = [
        block_key(one, group, digest(i)) for one in prints for group in range(len(windows)) for i in range(first + more)
    ]
    if dice.random() < 0.5:
        dice.shuffle(held)
    table = SlotTable(200, make_policy(Eviction.LRU, 200))
    book = StoreBook([table], [Medium.HOST], Cascade.EVICT, 60.0)
    book.recovered(0, [(slot, key) for slot, key in enumerate(held) if slot not in gaps])
    hashes = b"".join(digest(i) for i in range(first + more))
    lease = book.lend(PEER, RequestId("1"), prints, windows, hashes, first, 200, expires=10.0)
    full = book.look_up(OTHER, RequestId("r"), prints, windows, hashes, 0.0)
    assert (lease is None) == (full is None or full.num_blocks <= first)
    if lease is not None:
        assert full is not None and lease.num_blocks == full.num_blocks == len(lease.media)
        wanted = [
            block_key(one, group, digest(i))
            for one in prints
            for group, numbers in enumerate(lacking(windows, first, lease.num_blocks))
            for i in numbers
        ]
        assert [table.key(place.slot) for run in lease.runs() for place in run.places()] == wanted
        assert lease.num_pins == len(wanted)
    book.check_integrity()


def test_a_lease_of_nothing_covers_nothing_and_ends_as_others_do() -> None:
    book = a_book(4)
    lease = book.lease_nothing(OTHER, RequestId("r"), 2, 3, now=0.0)
    assert book.holds(lease)
    assert book.begin_load(lease, 1, ((), (), ())) == ((), (), ())
    assert book.begin_load(lease, 2, ((), (), ())) is None
    assert book.begin_load(lease, 0, ((0,), (), ())) is None
    book.release(lease)
    assert not book.holds(lease)
    book.end_load(lease, 1)
    assert book.figures().leases == 0
    book.check_integrity()


LIMITED, QUOTA = tenant_tag("limited"), 2
TENANTS = [NO_TENANT, tenant_tag("a"), LIMITED]


class FetchMachine(RuleBasedStateMachine):
    """Fetches beside saves, loans and moves in a book of few slots: nothing is lost for one, a place has one writer."""

    def __init__(self) -> None:
        super().__init__()
        self.book = a_book(5, 5)
        self.open: list[Place] = []
        self.job = 0
        self.book.contents.tenants.set_quota(LIMITED, QUOTA)

    @rule(numbers=st.lists(st.integers(0, 9), min_size=1, max_size=4), tenant=st.sampled_from(TENANTS))
    def begin(self, numbers: list[int], tenant: bytes) -> None:
        wanted = keys(*numbers)
        held = {key for key in keys(*range(10)) if self.book.find(key) is not None}
        places, _ = self.book.begin_fetch(wanted, tenant)
        got = [place for place in places if place is not None]
        tenants = self.book.contents.tenants
        assert all(tenants.tag(place) == tenant for place in got)
        number = tenants.known(LIMITED)
        assert number is not None and (tenant != LIMITED or not tenants.over(number))
        assert len(places) == len(wanted) and len(set(got)) == len(got)
        assert not any(place is not None and key in held for key, place in zip(wanted, places, strict=True))
        assert held == {key for key in keys(*range(10)) if self.book.find(key) is not None}, "nothing was lost"
        self.open += got

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.open))
        self.open.remove(place)
        ok = data.draw(st.booleans())
        published = self.book.end_fetch([place] if ok else [], [] if ok else [place])
        assert [where for _, where in published] == ([place] if ok else [])
        with pytest.raises(IntegrityError):
            self.book.end_fetch([place])

    @rule(numbers=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True))
    def save(self, numbers: list[int]) -> None:
        self.job += 1
        save(self.book, *numbers, job=self.job)

    @rule(count=st.integers(1, 4), number=st.integers(0, 2))
    def loan(self, count: int, number: int) -> None:
        lend(self.book, str(number), count)

    @rule(ok=st.booleans())
    def demote(self, ok: bool) -> None:
        for move in self.book.next_demotions(2).moves:
            self.book.end_move(move, ok)

    @rule()
    def expire(self) -> None:
        self.book.expire(11.0)

    @invariant()
    def sound(self) -> None:
        self.book.check_integrity()


TestFetches = FetchMachine.TestCase
