"""Tiers that come, shrink, grow, are drained and go: each step and refusal, and all of them amid a store's life."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from raykv.core.eviction import make_policy
from raykv.core.slot_table import SlotState, SlotTable
from raykv.core.store_book import Move, Place, StoreBook, block_key
from raykv.core.tier_changes import position_of
from raykv.core.tier_stages import NEXT, Change, Stage
from raykv.core.tier_steps import Emptied
from raykv.errors import IntegrityError
from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES, Cascade, Eviction, Medium
from raykv.types import EngineId, JobId, Rank, RequestId
from tests.core.test_store_book_safety import BAD, GARBAGE, INDEX, MOSTLY, RARELY, BookMachine, pick
from tests.support.examples import examples, histories

PRINT = b"f" * FINGERPRINT_NBYTES
E = EngineId("e")
SETTLED = {Stage.SERVING, Stage.DRAINED}


def digest(n: int) -> bytes:
    return bytes([n]) * HASH_NBYTES


def key(n: int) -> bytes:
    return block_key(PRINT, 0, digest(n))


class Book(StoreBook):
    """With a block saved, and tiers emptied, in one call."""

    def __init__(self, *slots: int, media: Sequence[Medium] = (), cascade: Cascade = Cascade.EVICT) -> None:
        tables = [SlotTable(count, make_policy(Eviction.LRU, count)) for count in slots]
        super().__init__(tables, media or list(Medium)[: len(slots)], cascade, 10.0)
        self._numbers = itertools.count()

    def put(self, *blocks: int) -> None:
        job = JobId(next(self._numbers))
        plan = self.begin_save(E, Rank(0), job, [key(n) for n in blocks])
        self.end_write(plan, True)
        self.commit(E, job)

    def put_in(self, tier: int, *blocks: int) -> None:
        self.recovered(tier, list(enumerate(map(key, blocks))))

    def lease(self, *blocks: int) -> Any:
        hashes = b"".join(map(digest, blocks))
        return self.look_up(E, RequestId(str(blocks)), [PRINT], [0], hashes, 0.0)

    def empty(self, tier: int, ok: bool = True) -> Emptied:
        """All that one round does, its copies done."""
        done = lost = left = 0
        moves: list[Move] = []
        while True:
            step = self.changes.next_moves(tier, 4)
            done, lost, left = done + step.done, lost + step.lost, left + step.left
            moves += step.moves
            for move in step.moves:
                done += len(self.end_move(move, ok).publish)
            self.check_integrity()
            if step.round_over:
                return Emptied(tuple(moves), (), done, lost, left, True)

    def where(self, n: int) -> int | None:
        place = self.find(key(n))
        return place.tier if place is not None else None


# -- each step ----------------------------------------------------------------------------------------------


def test_a_tier_grows_with_all_that_it_has() -> None:
    book = Book(2)
    book.put(1, 2)
    lease = book.lease(1, 2)
    book.changes.grow(0, 5)
    book.put(3, 4, 5)
    assert [book.where(n) for n in range(1, 6)] == [0] * 5
    assert book.lease(1, 2).num_blocks == 2 and lease is not None
    assert book.figures().tiers[0].slots == 5
    book.check_integrity()


@pytest.mark.parametrize("eviction", Eviction)
@pytest.mark.parametrize("slots", [1, 3, 4, 7, 40])
def test_a_table_keeps_its_order_over_a_change_of_size(eviction: Eviction, slots: int) -> None:
    table = SlotTable(4, make_policy(eviction, 4))
    places = table.reserve([key(1), key(2), key(3)]) or []
    for place in places:
        table.publish(place)
    for slot in range(slots, 3):
        table.retire(slot)
    table.resize(slots)
    table.check_integrity()
    assert table.evictable(9) == [place for place in places if place < slots]
    assert (table.slots, table.free) == (slots, slots - min(slots, 3))
    more = table.reserve([key(n) for n in range(10, 10 + table.free)])
    for place in more or []:
        table.publish(place)
    table.check_integrity()


def test_what_lies_beyond_the_new_end_moves_to_free_slots() -> None:
    book = Book(8)
    book.put_in(0, 1, 2, 3, 4, 5, 6)
    assert book.clear() and book.figures().tiers[0].used == 0
    book.recovered(0, [(1, key(1)), (6, key(6)), (7, key(7))])
    assert book.changes.shrink(0, 3) == 2
    step = book.empty(0)
    assert [(move.source.slot, move.target.slot) for move in step.moves] == [(6, 0), (7, 2)]
    assert (step.done, step.lost, book.changes.is_empty(0)) == (2, 0, True)
    book.changes.settle(0)
    assert [book.where(n) for n in (1, 6, 7)] == [0, 0, 0] and book.figures().tiers[0].slots == 3
    book.check_integrity()


def test_without_free_slots_it_goes_to_the_next_tier_and_without_one_it_is_lost() -> None:
    book = Book(4, 8)
    book.put_in(0, 1, 2, 3, 4)
    book.changes.shrink(0, 2)
    assert (book.empty(0).lost, [book.where(n) for n in (1, 2, 3, 4)]) == (0, [0, 0, 1, 1])
    alone = Book(4)
    alone.put_in(0, 1, 2, 3, 4)
    alone.changes.shrink(0, 2)
    step = alone.empty(0)
    assert (step.lost, step.moves, [alone.where(n) for n in (1, 2, 3, 4)]) == (2, (), [0, 0, None, None])
    alone.changes.settle(0)
    alone.check_integrity()


def test_a_leased_slot_is_read_on_and_waited_for() -> None:
    book = Book(4, 8)
    book.put_in(0, 1, 2, 3, 4)
    lease = book.lease(1, 2, 3, 4)
    assert lease is not None
    book.changes.shrink(0, 2)
    book.empty(0)
    assert book.where(4) == 1, "new look-ups find the copy"
    assert not book.changes.is_empty(0)
    with pytest.raises(IntegrityError):
        book.changes.settle(0)
    assert book.begin_load(lease.id, 0, [[3]]) == ((Place(0, 3),),), "who was promised the old place has it"
    book.end_load(lease.id, 0)
    book.release(lease.id)
    assert book.changes.is_empty(0)
    book.changes.settle(0)
    book.check_integrity()


@pytest.mark.parametrize("slots", [(8,), (8, 8)])
def test_what_an_operator_keeps_is_kept_where_it_goes(slots: tuple[int, ...]) -> None:
    book = Book(*slots)
    book.recovered(0, [(1, key(1)), (6, key(6)), (7, key(7))])
    book.contents.pins.begin("p", 100.0, "")
    book.contents.pins.add("p", [(key(n), Place(0, n)) for n in (1, 6, 7)])
    book.changes.shrink(0, 3) if len(slots) == 1 else book.changes.drain(0)
    book.empty(0)
    assert book.changes.is_empty(0), "no pin is left there"
    pin = book.contents.pins.get("p")
    assert pin is not None and {place.tier for place in pin.places.values()} == {len(slots) - 1}
    assert len(pin.places) == 3
    book.check_integrity()


def test_a_save_under_way_is_waited_for_and_then_moved() -> None:
    book = Book(4)
    plan = book.begin_save(E, Rank(0), JobId(99), [key(n) for n in range(4)])
    book.changes.shrink(0, 3)
    assert book.empty(0).done == 0 and not book.changes.rests(0)
    book.end_write(plan, True)
    assert len(book.commit(E, JobId(99))) == 4
    assert book.clear(0) and book.empty(0).done == 0 and book.changes.is_empty(0)


def test_nothing_new_goes_to_a_tier_that_is_drained_and_what_it_has_is_found() -> None:
    book = Book(4, 4)
    book.put_in(0, 1, 2, 3)
    assert book.changes.drain(0) == 3
    book.put(7)
    assert [book.where(n) for n in (1, 2, 3, 7)] == [0, 0, 0, 1]
    assert book.empty(0).done == 3
    assert [book.where(n) for n in (1, 2, 3, 7)] == [1, 1, 1, 1]
    assert book.changes.settle(0) == [Place(0, slot) for slot in range(4)]
    assert book.changes.stage(0) is Stage.DRAINED
    assert book.figures().tiers[0].shut
    assert book.changes.drain(0) == 0 and book.empty(0).done == 0, "again: nothing to do"


def test_the_slowest_tier_drains_upwards_and_loses_nothing_for_it() -> None:
    book = Book(3, 4)
    book.put_in(0, 1)
    book.put_in(1, 2, 3, 4)
    book.changes.drain(1)
    step = book.empty(1)
    assert (step.done, step.left) == (2, 1), "two slots were free, and 1 lies nowhere else"
    assert [book.where(n) for n in (1, 2, 3, 4)] == [0, 0, 0, 1]
    book.changes.settle(1)
    assert book.lease(4) is not None, "it is left where it is, and found"


def test_a_copy_that_fails_leaves_the_block_where_it_is() -> None:
    book = Book(4, 4)
    book.put_in(0, 1)
    book.changes.drain(0)
    assert book.empty(0, ok=False).done == 0
    assert book.where(1) == 0
    assert book.empty(0).done == 1 and book.where(1) == 1


def test_a_bad_source_is_quarantined() -> None:
    book = Book(4, 4)
    book.put_in(0, 1)
    book.changes.drain(0)
    (move,) = book.changes.next_moves(0, 4).moves
    assert book.end_move(move, False, bad_source=True).publish == ()
    assert book.where(1) is None and book.figures().tiers[0].quarantined == 1
    assert book.changes.rests(0) and book.changes.is_empty(0)
    book.check_integrity()


def test_of_a_tier_that_is_off_nothing_is_read() -> None:
    book = Book(4, 4)
    book.put_in(1, 1, 2)
    book.tier_off(1, "dead")
    book.changes.leave(1)
    step = book.empty(1)
    assert (step.moves, step.lost) == ((), 2)
    book.changes.remove(1)


def test_a_drained_tier_is_opened_again() -> None:
    book = Book(2, 4)
    book.put_in(0, 1)
    book.changes.drain(0)
    book.empty(0)
    book.changes.settle(0)
    assert book.changes.reopen(0) == [Place(0, 0), Place(0, 1)]
    book.put(5)
    assert book.where(5) == 0
    book.check_integrity()


def test_a_tier_leaves_with_what_finds_no_room() -> None:
    book = Book(1, 4)
    book.put_in(0, 1)
    book.put_in(1, 2, 3)
    book.changes.drain(1)
    assert book.empty(1).left == 2
    book.changes.settle(1)
    assert book.changes.leave(1) == 2
    assert book.empty(1).lost == 2
    book.changes.remove(1)
    assert [tier.medium for tier in book.figures().tiers] == [Medium.HOST]
    assert [book.where(n) for n in (1, 2, 3)] == [0, None, None]
    book.check_integrity()


def test_a_number_is_used_again_and_the_order_is_that_of_the_media() -> None:
    book = Book(2, 4)
    book.changes.leave(0)
    book.empty(0)
    book.changes.remove(0)
    assert book.changes.add(SlotTable(3, make_policy(Eviction.LRU, 3)), Medium.HOST, 0) == 0
    assert book.changes.add(SlotTable(3, make_policy(Eviction.LRU, 3)), Medium.FS, 2) == 2
    assert [(tier.medium, tier.tier) for tier in book.figures().tiers] == [
        (Medium.HOST, 0),
        (Medium.DISK, 1),
        (Medium.FS, 2),
    ]
    book.put(1)
    assert book.where(1) == 0
    book.check_integrity()


def test_a_new_tier_in_front_is_where_saves_go_and_reads_come_up_to() -> None:
    book = Book(4, media=[Medium.DISK])
    book.put(1)
    tier = book.changes.add(SlotTable(4, make_policy(Eviction.LRU, 4)), Medium.HOST, 0)
    book.put(2)
    assert (book.where(1), book.where(2)) == (0, tier)
    for _ in range(2):
        lease = book.lease(1)
        (places,) = book.begin_load(lease.id, 0, [[0]]) or ((),)
        for move in book.begin_promotion(places).moves:
            book.end_move(move, True)
        book.end_load(lease.id, 0)
        book.release(lease.id)
    assert book.where(1) == tier
    book.check_integrity()


def test_what_was_saved_before_goes_to_a_new_tier_too_where_saves_do() -> None:
    book = Book(4, cascade=Cascade.WRITE)
    book.put(1, 2, 3)
    book.changes.add(SlotTable(4, make_policy(Eviction.LRU, 4)), Medium.DISK, 1)
    assert book.next_demotions(9).moves == ()
    assert book.changes.queue_again(0, 0, 2) == 2
    assert book.changes.queue_again(0, 2, 2) is None
    assert [move.key for move in book.next_demotions(9).moves] == [key(1), key(2), key(3)]


def test_of_a_shared_tier_the_files_stay() -> None:
    book = Book(2, 4, media=[Medium.HOST, Medium.FS])
    book.adopt(1, [key(1), key(2)])
    book.changes.drain(1)
    assert book.empty(1).done == 0 and (book.where(1), book.where(2)) == (1, 1), "all nodes have it"
    book.put(3)
    assert not book.next_demotions(9).moves
    book.changes.settle(1)
    book.changes.leave(1)
    step = book.empty(1)
    assert (step.moves, step.done) == ((), 2)
    book.changes.remove(1)
    book.check_integrity()


@pytest.mark.parametrize(("medium", "position"), [(Medium.HOST, 0), (Medium.DISK, 1), (Medium.FS, 2)])
def test_the_place_of_a_medium(medium: Medium, position: int) -> None:
    assert position_of(medium, [one for one in (Medium.HOST, Medium.DISK, Medium.FS) if one is not medium]) == position


# -- refusals -----------------------------------------------------------------------------------------------


STEPS: dict[Change, Callable[[Book], object]] = {
    Change.SHRINK: lambda book: book.changes.shrink(0, 2),
    Change.DRAIN: lambda book: book.changes.drain(0),
    Change.SETTLE: lambda book: book.changes.settle(0),
    Change.REOPEN: lambda book: book.changes.reopen(0),
    Change.LEAVE: lambda book: book.changes.leave(0),
}
WAYS: dict[Stage, list[Change]] = {
    Stage.SERVING: [],
    Stage.SHRINKING: [Change.SHRINK],
    Stage.DRAINING: [Change.DRAIN],
    Stage.DRAINED: [Change.DRAIN, Change.SETTLE],
    Stage.LEAVING: [Change.LEAVE],
}


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("change", Change)
def test_each_step_of_the_table_and_no_other(stage: Stage, change: Change) -> None:
    book = Book(4, 4)
    for way in WAYS[stage]:
        STEPS[way](book)
    assert book.changes.stage(0) is stage
    before = (book.figures(), list(book._tiers.serving), set(book._tiers.shut))
    after = NEXT.get((stage, change))
    if after is None:
        with pytest.raises(IntegrityError):
            STEPS[change](book)
        assert (book.figures(), list(book._tiers.serving), set(book._tiers.shut)) == before
    else:
        STEPS[change](book)
        assert book.changes.stage(0) is after
    book.check_integrity()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda book: book.changes.shrink(0, 0),
        lambda book: book.changes.shrink(0, 4),
        lambda book: book.changes.grow(0, 3),
        lambda book: book.changes.remove(0),
        lambda book: book.changes.next_moves(0, 4),
        lambda book: book.changes.leave(0),
        lambda book: book.changes.end(Move(key(1), Place(0, 0), Place(0, 1)), True, False),
        lambda book: book._tiers.tables[0].shut(5),
        lambda book: book._tiers.tables[0].resize(1),
        lambda book: book._tiers.tables[0].retire(3),
        lambda book: book._tiers.remove(0),
    ],
)
def test_a_wrong_step_raises_and_changes_nothing(wrong: Callable[[Book], object]) -> None:
    book = Book(4, 4, media=[Medium.HOST, Medium.FS])
    book.put(1, 2)
    before = book.figures()
    with pytest.raises(IntegrityError):
        wrong(book)
    assert book.figures() == before
    book.check_integrity()


def test_the_last_tier_does_not_leave() -> None:
    book = Book(4)
    with pytest.raises(IntegrityError):
        book.changes.leave(0)


# -- amid all that a store does -----------------------------------------------------------------------------


class ChangingMachine(BookMachine):
    """The book's machine, and tiers that change. `stale`: headers that are still on the media, of retired slots."""

    @initialize(
        slots=st.lists(st.integers(3, 12), min_size=1, max_size=2),
        cascade=st.sampled_from(Cascade),
        eviction=st.sampled_from(Eviction),
        windows=st.sampled_from([[0], [0, 2]]),
        recovered=st.sets(st.integers(0, 23)),
    )
    def start(self, slots: Any, cascade: Any, eviction: Any, windows: Any, recovered: Any) -> None:
        super().start(slots, cascade, eviction, windows, recovered)
        self.cascade, self.eviction = cascade, eviction
        self.stale: dict[Place, bytes] = {}
        self.emptying: list[Move] = []

    @property
    def order(self) -> list[int]:
        return self.book._tiers.order

    def stage(self, tier: int) -> Stage:
        return self.book.changes.stage(tier)

    def follow(self) -> None:
        """Headers of slots that were retired are stale."""
        for place in list(self.headers):
            table = self.book._tiers.tables[place.tier]
            if place.slot >= table.limit and table.state(place.slot) in (SlotState.RETIRED, SlotState.FREE):
                self.stale[place] = self.headers.pop(place)

    def overwrite(self, places: Any) -> None:
        places = list(places)
        assert not self.stale.keys() & set(places), "a slot is overwritten under a header that is still there"
        for place in places:
            assert place.slot < self.book._tiers.tables[place.tier].limit, "a slot that is shut is written"
        super().overwrite(places)

    def forget(self, tier: int, first: int = 0) -> None:
        for held in (self.stale, self.headers, self.bytes):
            for place in [place for place in held if place.tier == tier and place.slot >= first]:
                del held[place]

    # -- steps ----------------------------------------------------------------------------------------------

    @rule(tier=INDEX, slots=st.integers(1, 14))
    def resize(self, tier: int, slots: int) -> None:
        tier = pick(self.order, tier)
        if self.stage(tier) is not Stage.SERVING:
            return
        if slots < self.book._tiers.tables[tier].slots:
            self.book.changes.shrink(tier, slots)
        else:
            self.book.changes.grow(tier, slots)

    @rule(tier=INDEX)
    def drain(self, tier: int) -> None:
        tier = pick(self.order, tier)
        if self.stage(tier) in (Stage.SERVING, Stage.DRAINED, Stage.DRAINING):
            self.book.changes.drain(tier)

    @rule(tier=INDEX, really=RARELY)
    def leave(self, tier: int, really: bool) -> None:
        tier = pick(self.order, tier)
        stays = any(other != tier and self.stage(other) is not Stage.LEAVING for other in self.order)
        if really and self.stage(tier) in SETTLED and stays:
            self.book.changes.leave(tier)

    @rule(tier=INDEX)
    def reopen(self, tier: int) -> None:
        tier = pick(self.order, tier)
        if self.stage(tier) is Stage.DRAINED:
            for place in self.book.changes.reopen(tier):
                self.stale.pop(place, None)

    @rule(slots=st.integers(2, 12), position=INDEX, medium=st.sampled_from([Medium.HOST, Medium.DISK]))
    def add(self, slots: int, position: int, medium: Medium) -> None:
        if len(self.order) < 4:
            table = SlotTable(slots, make_policy(self.eviction, slots))
            tier = self.book.changes.add(table, medium, position % (len(self.order) + 1))
            self.off.discard(tier)
            for above in self.order:
                self.book.changes.queue_again(above, 0, 99)

    @rule(tier=INDEX, most=st.integers(1, 4))
    def empty(self, tier: int, most: int) -> None:
        tier = pick(self.order, tier)
        if self.stage(tier) in SETTLED:
            return
        if self.stage(tier) is Stage.LEAVING:
            self.off.add(tier)
        step = self.book.changes.next_moves(tier, most)
        self.follow()
        self.clear(step.clear)
        self.overwrite(move.target for move in step.moves)
        self.emptying += step.moves

    @precondition(lambda self: self.emptying)
    @rule(index=INDEX, ok=MOSTLY)
    def end_emptying(self, index: int, ok: bool) -> None:
        move = self.emptying.pop(index % len(self.emptying))
        source = self.bytes[move.source]
        inside = move.source.tier == move.target.tier
        found_bad = move.source not in self.headers and not inside
        assert source in (move.key, BAD) and self.bytes[move.target] == GARBAGE
        self.bytes[move.target] = source if ok else GARBAGE
        bad = source == BAD and not found_bad
        end = self.book.end_move(move, ok and not bad, bad_source=bad)
        assert not (found_bad and end.publish)
        if bad and not inside:
            self.clear([move.source])
        self.publish(end.publish)
        self.follow()

    @rule(tier=INDEX)
    def settle_tier(self, tier: int) -> None:
        tier, changes = pick(self.order, tier), self.book.changes
        if self.stage(tier) is Stage.SHRINKING and changes.is_empty(tier):
            first = self.book._tiers.tables[tier].limit
            changes.settle(tier)
            self.forget(tier, first)
        elif self.stage(tier) is Stage.DRAINING and changes.rests(tier):
            for place in changes.settle(tier):
                self.stale.pop(place, None)
        elif self.stage(tier) is Stage.LEAVING and changes.is_empty(tier):
            changes.remove(tier)
            self.forget(tier)
            self.off.discard(tier)

    @rule(really=RARELY)
    def kill(self, really: bool) -> None:
        """A kill -9, and the next life with the tiers as they are: the media hold headers, stale ones too."""
        if not really:
            return
        tiers, old = self.book._tiers, self.order
        number = {tier: at for at, tier in enumerate(old)}
        drained = [number[tier] for tier in old if tier in tiers.shut]
        self.tables = [SlotTable(n, make_policy(self.eviction, n)) for n in (tiers.tables[tier].slots for tier in old)]
        media = [tiers.media[tier] for tier in old]
        headers = {place: key for place, key in {**self.stale, **self.headers}.items() if place.tier in number}
        assert all(self.bytes[place] in (key, BAD) for place, key in headers.items()), "a header over wrong bytes"
        self.book = StoreBook(self.tables, media, self.cascade, 10.0, low=0.3)
        renamed = {
            Place(number[tier], slot): self.bytes.get(Place(tier, slot), GARBAGE)
            for tier, slot in self.bytes
            if tier in number
        }
        self.headers, self.stale, self.bytes = {}, {}, renamed
        for at in range(len(old)):
            found = {key: place.slot for place, key in headers.items() if number[place.tier] == at}
            self.book.recovered(at, [(slot, key) for key, slot in found.items()])
            self.headers.update({Place(at, slot): key for key, slot in found.items()})
        for at in drained:
            self.book.changes.be_drained(at)
        for gone in (self.plans, self.jobs, self.settled, self.loads, self.moves, self.checks, self.emptying):
            gone.clear()
        self.leases, self.begun, self.off = {}, set(), set()

    # -- the rules that know the tiers ----------------------------------------------------------------------

    @rule(tier=INDEX, really=RARELY)
    def tier_off(self, tier: int, really: bool) -> None:
        if really:
            tier = pick(self.order, tier)
            self.off.add(tier)
            self.book.tier_off(tier, "off")

    @rule(tier=INDEX)
    def begin_check(self, tier: int) -> None:
        found = self.book.begin_check(pick(self.order, tier))
        if found is not None:
            assert self.headers[found[1]] == found[0]
            self.checks.append(found[1])

    @invariant()
    def the_book_is_sound(self) -> None:
        self.book.check_integrity()
        tables = self.book._tiers.tables
        for figures in self.book.figures().tiers:
            table = tables[figures.tier]
            ready = {Place(figures.tier, slot): table.key(slot) for slot in table.in_state(SlotState.READY)}
            assert ready == {place: key for place, key in self.headers.items() if place.tier == figures.tier}

    def teardown(self) -> None:
        if not hasattr(self, "book"):
            return
        self.tables = self.book._tiers.tables
        while self.emptying:
            self.end_emptying(0, True)
        super().teardown()
        for tier in list(self.order):  # nothing keeps what is under way from its end
            for _ in range(100):
                if tier not in self.order or self.stage(tier) in SETTLED:
                    break
                self.empty(self.order.index(tier), 4)
                while self.emptying:
                    self.end_emptying(0, True)
                self.settle_tier(self.order.index(tier))
            else:
                raise AssertionError(f"tier {tier} is {self.stage(tier)} for ever")
        self.the_book_is_sound()


@pytest.mark.parametrize("cascade", Cascade)
@pytest.mark.parametrize("eviction", Eviction)
@pytest.mark.parametrize("seed", range(2))
def test_a_long_day_of_changes(cascade: Cascade, eviction: Eviction, seed: int) -> None:
    dice, machine = random.Random(seed), ChangingMachine()
    machine.start([[9, 12], [12]][seed], cascade, eviction, dice.choice([[0], [0, 2]]), set(range(9)))

    def index() -> int:
        return dice.randrange(12)

    def engine() -> EngineId:
        return EngineId(dice.choice("ab"))

    def ok() -> bool:
        return dice.random() < 0.9

    steps: list[Callable[[], object]] = []

    def step(weight: int, run: Callable[[], object]) -> None:
        steps.extend([run] * weight)

    step(8, lambda: machine.save_prompt(engine(), dice.randrange(4), dice.randint(1, 4)))
    step(4, lambda: machine.begin_save(engine(), dice.randint(0, 1), index(), [index() for _ in range(index())]))
    step(8, lambda: machine.plans and machine.end_write(index(), ok()))
    step(4, lambda: machine.jobs and machine.settle(index(), ok()))
    step(
        12,
        lambda: machine.look_up(
            engine(), dice.choice("qrs"), dice.randrange(4), dice.randint(1, 2), dice.randint(1, 4), ok(), ok()
        ),
    )
    step(10, lambda: machine.loads and machine.end_load(index(), dice.random() < 0.03))
    step(3, lambda: machine.leases and machine.release(index()))
    step(3, lambda: machine.expire(dice.randint(1, 3)))
    step(6, lambda: machine.demote(dice.randint(1, 3)))
    step(10, lambda: machine.moves and machine.end_move(index(), ok()))
    step(2, lambda: machine.begin_check(index()))
    step(3, lambda: machine.checks and machine.end_check(dice.random() < 0.02))
    step(3, lambda: machine.resize(index(), dice.randint(2, 14)))
    step(1, lambda: machine.drain(index()))
    step(1, lambda: machine.leave(index(), True))
    step(2, lambda: machine.reopen(index()))
    step(2, lambda: machine.add(dice.randint(2, 12), index(), dice.choice([Medium.HOST, Medium.DISK])))
    step(14, lambda: machine.empty(index(), dice.randint(1, 4)))
    step(14, lambda: machine.emptying and machine.end_emptying(index(), ok()))
    step(12, lambda: machine.settle_tier(index()))
    for number in range(examples(250)):
        dice.choice(steps)()
        machine.the_book_is_sound()
        machine.what_is_held_has_its_bytes()
        if number % 100 == 99:
            machine.kill(True)
    machine.teardown()


LIGHT = histories(15)


class TestChanges(ChangingMachine.TestCase):
    settings = LIGHT


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestChangesAtLength(ChangingMachine.TestCase):
    settings = settings(LIGHT, max_examples=3_000, derandomize=False)
