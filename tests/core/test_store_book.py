"""Single cases of the book; `test_store_book_safety` has everything in any order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.core.eviction import LRU
from raykv.core.prefix import CHUNK, longest_prefix
from raykv.core.slot_table import SlotState, SlotTable
from raykv.core.store_book import Lease, Move, Place, SavePlan, StoreBook, block_key
from raykv.core.store_plans import Row, Run
from raykv.core.tiers import Tiers
from raykv.errors import IntegrityError
from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES, KEY_NBYTES, Cascade, Medium
from raykv.types import EngineId, JobId, LeaseId, Rank, RequestId

E, OTHER = EngineId("e"), EngineId("other")
FP = bytes(FINGERPRINT_NBYTES)
FP1 = b"\1" * FINGERPRINT_NBYTES


def digest(number: int) -> bytes:
    return number.to_bytes(HASH_NBYTES, "big")


def keys(*numbers: int, fingerprint: bytes = FP, group: int = 0) -> list[bytes]:
    return [block_key(fingerprint, group, digest(number)) for number in numbers]


def places_of(lease: Lease, rank: int = 0) -> list[Place]:
    return [place for row in lease.rows[rank] for place in row.places()]


class Store:
    """A StoreBook with names for what tests do often."""

    def __init__(self, *slots: int, cascade: Cascade = Cascade.EVICT, low: float = 0.25, **options: int) -> None:
        media = [Medium.HOST, Medium.DISK, Medium.DISK][: len(slots)]
        self.tables = [SlotTable(count, LRU(count)) for count in slots]
        self.book = StoreBook(self.tables, media, cascade, lease_s=60.0, low=low, **options)
        self.jobs = 0

    def begin(self, *numbers: int, engine: EngineId = E, rank: int = 0, job: int | None = None) -> SavePlan:
        if job is None:
            self.jobs += 1
            job = self.jobs
        plan = self.book.begin_save(engine, Rank(rank), JobId(job), keys(*numbers))
        self.book.check_integrity()
        return plan

    def save(self, *numbers: int) -> SavePlan:
        """Save and commit."""
        plan = self.begin(*numbers)
        self.book.end_write(plan, True)
        self.book.commit(E, plan.job)
        self.book.check_integrity()
        return plan

    def save_each(self, *numbers: int) -> None:
        """One after the other: the first is the coldest."""
        for number in numbers:
            self.save(number)

    def ask(self, *numbers: int, request: str = "r", engine: EngineId = E, now: float = 0.0) -> Lease | None:
        lease = self.book.look_up(engine, RequestId(request), [FP], [0], b"".join(map(digest, numbers)), now)
        self.book.check_integrity()
        return lease

    def held(self, tier: int = 0) -> set[int]:
        """The numbers that are READY in a tier."""
        table = self.tables[tier]
        return {int.from_bytes(table.key(slot)[-HASH_NBYTES:], "big") for slot in table.in_state(SlotState.READY)}

    def demote(self, limit: int = 99) -> list[Move]:
        """Carry out what is to be moved down now."""
        plan = self.book.next_demotions(limit)
        for move in plan.moves:
            self.book.end_move(move, True)
        self.book.check_integrity()
        return list(plan.moves)


def test_a_key_has_the_size_of_the_messages() -> None:
    assert len(keys(1)[0]) == KEY_NBYTES


# -- saves -----------------------------------------------------------------------------------------------------


def test_a_block_is_found_from_its_commit_on() -> None:
    store = Store(4)
    plan = store.begin(1, 2)
    assert [i for i, _ in plan.write] == [0, 1]
    assert store.ask(1) is None
    store.book.end_write(plan, True)
    assert store.ask(1) is None
    assert store.book.commit(E, plan.job) == list(zip(keys(1, 2), [place for _, place in plan.write], strict=True))
    assert store.book.commit(E, plan.job) == []
    lease = store.ask(1, 2, 3)
    assert lease is not None
    assert (lease.num_blocks, lease.media) == (2, (Medium.HOST, Medium.HOST))
    assert places_of(lease) == [place for _, place in plan.write]


def test_blocks_that_are_held_or_on_their_way_are_known() -> None:
    store = Store(6)
    store.save(1)
    writing = store.begin(2, engine=OTHER)
    plan = store.begin(1, 2, 3, 3)
    assert (plan.known, [i for i, _ in plan.write], plan.skipped) == ((0, 1, 3), [2], ())
    store.book.end_write(writing, False)
    store.book.abort(OTHER, writing.job)
    assert store.tables[0].writing == 1


def test_blocks_of_one_row_lie_together_though_they_are_saved_by_position() -> None:
    store = Store(8)
    by_position = [key for n in range(3) for group in (0, 1) for key in keys(n, group=group)]
    plan = store.book.begin_save(E, Rank(0), JobId(1), by_position)
    assert [i for i, _ in plan.write] == list(range(6))
    assert [place.slot for _, place in plan.write] == [0, 3, 1, 4, 2, 5]
    store.book.end_write(plan, True)
    store.book.commit(E, JobId(1))
    lease = store.book.look_up(E, RequestId("r"), [FP], [0, 0], b"".join(map(digest, range(3))), 0.0)
    assert lease is not None
    assert lease.rows == ((Row(0, (Run(0, 0, 3),)), Row(0, (Run(0, 3, 3),))),)


def test_what_was_recovered_goes_oldest_prompt_first_and_tail_first() -> None:
    store = Store(2 * CHUNK)
    store.book.recovered(0, [(2 * CHUNK - 1 - n, keys(n)[0]) for n in range(2 * CHUNK)])
    coldest = [store.tables[0].key(slot) for slot in store.tables[0].evictable(2 * CHUNK)]
    assert coldest == keys(*reversed(range(CHUNK)), *reversed(range(CHUNK, 2 * CHUNK)))


def test_a_commit_needs_every_part_that_began() -> None:
    store = Store(8)
    first, second = store.begin(1, rank=0, job=7), store.begin(2, rank=1, job=7)
    store.book.end_write(first, True)
    assert store.book.commit(E, JobId(7)) == [], "rank 1 still writes: an abort"
    assert store.tables[0].writing == 2, "and no slot is free while it does"
    store.book.end_write(second, True)
    assert (store.tables[0].writing, store.tables[0].free) == (0, 8)

    first, second = store.begin(1, rank=0, job=8), store.begin(2, rank=1, job=8)
    store.book.end_write(first, True)
    store.book.end_write(second, False)
    assert store.book.commit(E, JobId(8)) == []
    assert (store.tables[0].writing, store.tables[0].free) == (0, 8)


def test_parts_begin_and_end_once() -> None:
    store = Store(4)
    plan = store.begin(1, job=3)
    with pytest.raises(IntegrityError):
        store.begin(2, job=3)
    assert store.tables[0].writing == 1
    store.book.end_write(plan, True)
    with pytest.raises(IntegrityError):
        store.book.end_write(plan, True)
    assert store.book.commit(E, JobId(99)) == []
    store.book.abort(E, JobId(99))


def test_a_part_that_begins_after_the_end_of_its_job_writes_nothing() -> None:
    store = Store(4)
    store.book.abort(E, JobId(5))
    plan = store.begin(1, 2, job=5)
    assert (plan.write, plan.skipped) == ((), (0, 1))
    store.book.end_write(plan, True)
    assert store.book.commit(E, JobId(5)) == []
    assert store.book.figures().open_jobs == 0


def test_what_finds_no_room_is_skipped_from_the_tail() -> None:
    store = Store(4)
    store.save(1, 2)
    lease = store.ask(1)
    plan = store.begin(2, 3, 4, 5, 6)
    assert (plan.known, [i for i, _ in plan.write], plan.skipped) == ((0,), [1, 2], (3, 4)), "2 is not evicted for 5"
    assert plan.clear == ()
    assert lease is not None and store.held() == {1, 2}
    assert store.book.figures().skipped_blocks == 2


def test_room_is_made_from_the_cold_end_and_that_is_the_tail_of_a_prompt() -> None:
    store = Store(4)
    first = store.save(1, 2, 3)
    store.save(4)
    plan = store.save(5)
    assert plan.clear == (first.write[2][1],)
    store.ask(1, 2)
    store.book.release(LeaseId(0))
    store.save(6, 7)
    assert store.held() == {1, 2, 6, 7}
    store.save(8)
    assert store.held() == {1, 6, 7, 8}
    assert store.book.figures().dropped_blocks == 0, "there is nowhere else to keep it"


def test_what_lies_in_the_next_tier_too_goes_first() -> None:
    store = Store(4, 8, low=1.0)
    store.save_each(1, 2, 3, 4)
    demoted = store.book.next_demotions(2)
    for move in demoted.moves:
        store.book.end_move(move, False)
    store.ask(1)
    store.book.release(LeaseId(0))  # the coldest is 2 now
    moves = store.book.next_demotions(1).moves
    assert [move.key for move in moves] == keys(2)
    lease = store.ask(2)
    store.book.end_move(moves[0], True)
    assert store.held() == {1, 2, 3, 4}, "leased: it stays in both"
    assert lease is not None
    store.book.release(lease.id)  # 2 is the hottest now, and the only one that is not lost
    plan = store.save(5)
    assert store.held() == {1, 3, 4, 5} and len(plan.clear) == 1
    assert store.book.figures().dropped_blocks == 0
    store.save(6)
    assert store.held() == {1, 4, 5, 6}
    assert store.book.figures().dropped_blocks == 1


# -- look-ups and loads --------------------------------------------------------------------------------------


@given(
    held=st.sets(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 7))),
    gaps=st.sets(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 7)), max_size=4),
    mostly=st.booleans(),
    windows=st.lists(st.sampled_from([0, 1, 2, 3, 9]), min_size=1, max_size=3),
    ranks=st.integers(1, 2),
    blocks=st.integers(0, 8),
    spread=st.sampled_from([1, 3, 8]),
)
def test_the_longest_prefix_is_that_of_a_search_through_all(
    held: set[tuple[int, int, int]],
    gaps: set[tuple[int, int, int]],
    mostly: bool,
    windows: list[int],
    ranks: int,
    blocks: int,
    spread: int,
) -> None:
    if mostly:
        held = {(r, g, i) for r in range(2) for g in range(3) for i in range(8)} - gaps
    prints = [FP, FP1][:ranks]
    tables = [SlotTable(240, LRU(240)) for _ in range(2)]
    for r, g, i in held:
        key = keys(i, fingerprint=[FP, FP1][r], group=g)[0]
        tables[(r + g + i // spread) % 2].recovered(r * 100 + g * 10 + i, key)

    def needed(n: int) -> set[tuple[int, int, int]]:
        firsts = [0 if not window else max(0, n - window) for window in windows]
        return {(r, g, i) for r in range(ranks) for g, first in enumerate(firsts) for i in range(first, n)}

    longest = max(n for n in range(blocks + 1) if needed(n) <= held)
    tiers = Tiers(tables, [Medium.HOST, Medium.DISK])
    n, rows = longest_prefix(tiers, prints, windows, b"".join(map(digest, range(blocks))))
    assert n == longest
    found = [
        ((r, g, i), place)
        for r, by_group in enumerate(rows)
        for g, row in enumerate(by_group)
        for i, place in enumerate(row.places(), row.first)
    ]
    assert sorted(at for at, _ in found) == sorted(needed(n))
    assert all(place == ((r + g + i // spread) % 2, r * 100 + g * 10 + i) for (r, g, i), place in found)


def test_a_prompt_of_no_ranks_or_groups_has_no_prefix() -> None:
    tiers = Tiers([SlotTable(1, LRU(1))], [Medium.HOST])
    assert longest_prefix(tiers, [], [0], digest(1)) == (0, ())
    assert longest_prefix(tiers, [FP], [], digest(1)) == (0, ())
    assert longest_prefix(tiers, [FP], [0], b"") == (0, ())


def test_a_leased_block_stays_until_its_load_has_ended() -> None:
    store = Store(1)
    store.save(1)
    lease = store.ask(1)
    assert lease is not None
    assert store.book.begin_load(lease.id, 0, [[0]]) == ((Place(0, 0),),)
    assert store.book.expire(60.0) == 1
    assert store.save(2).skipped == (0,)
    assert store.book.begin_load(lease.id, 0, [[0]]) is None
    assert store.book.end_load(lease.id, 0) == []
    assert store.save(2).skipped == ()
    assert store.book.figures().loaded_blocks == 1


@pytest.mark.parametrize("rank, indices", [(1, [[0]]), (-1, [[0]]), (0, [[2]]), (0, [[-1]]), (0, [[0], [0]]), (0, [])])
def test_a_load_of_what_the_lease_does_not_cover_fails(rank: int, indices: list[list[int]]) -> None:
    store = Store(4)
    store.save(1, 2)
    lease = store.ask(1, 2)
    assert lease is not None
    assert store.book.begin_load(lease.id, rank, indices) is None
    store.book.release(lease.id)
    assert store.book.figures().leases == 0, "it does not count as begun"


def test_a_bad_block_is_gone_at_once_and_for_all() -> None:
    store = Store(2)
    store.save(1, 2)
    lease, other = store.ask(1, 2), store.ask(1, 2, request="other")
    assert lease is not None and other is not None
    bad = places_of(lease)[1]
    for each in (lease, other):
        store.book.begin_load(each.id, 0, [[0, 1]])
    with pytest.raises(IntegrityError):
        store.book.end_load(lease.id, 0, [Place(0, 9)])
    assert store.book.end_load(lease.id, 0, [bad]) == [bad]
    assert store.book.end_load(other.id, 0, [bad]) == [], "its header says so already"
    again = store.ask(1, 2)
    assert again is not None and again.num_blocks == 1
    for each in (lease, other, again):
        store.book.release(each.id)
    assert store.save(2).clear != (), "the slot itself stays out of use"
    figures = store.book.figures().tiers[0]
    assert (figures.quarantined, figures.bad_reads, figures.pinned) == (1, 1, 0)


def test_a_request_that_asks_again_has_one_lease() -> None:
    store = Store(2)
    store.save(1)
    assert store.ask(1) is not None and store.ask(1) is not None
    assert store.book.figures().leases == 1
    assert store.ask(9) is None
    assert store.book.figures().leases == 0
    figures = store.book.figures()
    assert (figures.look_ups, figures.hit_blocks, figures.missed_blocks) == (3, 2, 1)


def test_a_block_counts_by_the_slowest_medium_of_its_ranks() -> None:
    store = Store(2, 2)
    store.book.recovered(0, [(0, keys(1)[0]), (1, keys(2)[0])])
    store.book.recovered(1, [(0, keys(1, fingerprint=FP1)[0]), (1, keys(2)[0])])
    lease = store.book.look_up(E, RequestId("r"), [FP, FP1], [0], digest(1), 0.0)
    assert lease is not None and lease.media == (Medium.DISK,)
    assert (places_of(lease), places_of(lease, rank=1)) == ([Place(0, 0)], [Place(1, 0)])
    lease = store.book.look_up(E, RequestId("q"), [FP], [0], digest(2), 0.0)
    assert lease is not None and lease.media == (Medium.HOST,), "in both: the fastest"
    assert [tier.hits for tier in store.book.figures().tiers] == [2, 1]


# -- engines and tiers that go ---------------------------------------------------------------------------------


def test_an_engine_that_is_gone_leaves_nothing_but_what_it_committed() -> None:
    store = Store(8)
    store.save(1)
    ended, writing = store.begin(2), store.begin(3)
    store.book.end_write(ended, True)
    lease = store.ask(1)
    assert lease is not None
    store.book.begin_load(lease.id, 0, [[0]])
    store.book.end_engine(E)
    assert (store.tables[0].writing, store.tables[0].pins(0)) == (1, 1), "copies still run"
    again = store.begin(4, job=writing.job)  # it is back under its name and counts its jobs anew
    store.book.end_write(again, True)
    assert len(store.book.commit(E, again.job)) == 1
    store.book.end_write(writing, True)
    store.book.end_load(lease.id, 0)
    store.book.check_integrity()
    assert (store.tables[0].writing, store.tables[0].pins(0), store.held()) == (0, 0, {1, 4})


def test_a_tier_that_is_off_is_neither_read_nor_written() -> None:
    store = Store(4, 8, cascade=Cascade.WRITE)
    store.book.recovered(1, [(0, keys(9)[0])])
    running = store.begin(1)
    store.book.end_write(running, True)
    store.book.commit(E, running.job)
    (move,) = store.book.next_demotions(9).moves
    store.save(2)
    store.book.tier_off(1, "a dead disk")
    assert store.ask(9) is None
    assert store.book.end_move(move, True).publish == ()
    assert store.book.next_demotions(9).moves == ()
    assert store.book.figures().tiers[1].off == "a dead disk"
    assert store.ask(1, 2) is not None, "the host tier serves on"
    late = store.begin(3)
    store.book.end_write(late, True)
    store.book.tier_off(0, "")
    assert store.book.commit(E, late.job) == []
    assert store.ask(1) is None
    assert store.begin(5).skipped == (0,)
    assert store.book.begin_check(0) is None


def test_saves_go_to_the_first_tier_that_serves() -> None:
    store = Store(4, 8)
    store.book.tier_off(0, "no memory")
    assert [place.tier for _, place in store.save(1).write] == [1]
    lease = store.ask(1)
    assert lease is not None and lease.media == (Medium.DISK,)


# -- moves -----------------------------------------------------------------------------------------------------


def test_what_is_committed_cascades_in_its_order() -> None:
    store = Store(4, 8, 8, cascade=Cascade.WRITE)
    store.save(1, 2, 3)
    plan = store.book.next_demotions(2)
    assert [move.key for move in plan.moves] == keys(1, 2)
    assert store.tables[0].evictable(9) == [2]
    end = store.book.end_move(plan.moves[0], True)
    assert (end.publish, end.clear) == (((plan.moves[0].key, plan.moves[0].target),), ())
    store.book.end_move(plan.moves[1], False)
    assert (store.held(0), store.held(1)) == ({1, 2, 3}, {1})
    assert {(move.key, move.target.tier) for move in store.demote()} == {(keys(3)[0], 1), (keys(1)[0], 2)}
    assert [move.target.tier for move in store.demote()] == [2]
    assert store.demote() == []
    assert store.book.figures().demoted_blocks == 4


def test_the_queue_is_bounded_and_skips_what_is_gone() -> None:
    store = Store(2, 8, cascade=Cascade.WRITE, queue_limit=3)
    for number in range(1, 5):
        store.save(number)
    figures = store.book.figures()
    assert (figures.queue_overflows, figures.waiting_moves, figures.dropped_blocks) == (1, 3, 2)
    assert [move.key for move in store.demote()] == keys(3), "1 and 2 were evicted, 4 did not fit the queue"
    store.save(3)
    assert store.demote() == []


def test_moves_wait_for_room_in_the_slower_tier() -> None:
    store = Store(4, 2, cascade=Cascade.WRITE)
    store.book.recovered(1, [(0, keys(8)[0]), (1, keys(9)[0])])
    lease = store.ask(8)
    store.save(1, 2)
    plan = store.book.next_demotions(9)
    assert [move.key for move in plan.moves] == keys(1)
    assert plan.clear == (Place(1, 1),), "9 makes room, 8 is leased"
    store.book.end_move(plan.moves[0], True)
    store.ask(1, request="pins the rest", now=1.0)
    assert lease is not None
    store.book.release(lease.id)
    assert [move.key for move in store.demote()] == keys(2)


def test_the_coldest_cascade_when_few_slots_are_free() -> None:
    store = Store(8, 8, low=0.25)
    store.save_each(1, 2, 3, 4, 5, 6)
    assert store.demote() == [], "two are free"
    store.save_each(7, 8)
    store.ask(1)
    plan = store.book.next_demotions(1)
    assert [move.key for move in plan.moves] == keys(2), "1 is leased"
    rest = store.book.next_demotions(9)
    assert [move.key for move in rest.moves] == keys(3), "2 is on its way"
    assert store.book.next_demotions(9).moves == ()
    assert store.book.end_move(plan.moves[0], True).clear == (plan.moves[0].source,)
    store.book.end_move(rest.moves[0], False)
    assert (store.held(0), store.held(1)) == ({1, 3, 4, 5, 6, 7, 8}, {2})
    assert [move.key for move in store.demote()] == keys(3)
    assert store.demote() == []


def test_a_source_stays_where_slots_are_free_again() -> None:
    store = Store(4, 8, low=0.5)
    store.save_each(1, 2, 3)
    (move,) = store.book.next_demotions(9).moves
    assert store.book.clear(0) != []
    assert store.book.end_move(move, True).clear == ()
    assert (store.held(0), store.held(1)) == ({1}, {1})


def test_a_bad_source_is_quarantined_and_not_copied() -> None:
    store = Store(4, 8, cascade=Cascade.WRITE)
    store.save(1, 2)
    one, two = store.book.next_demotions(9).moves
    store.book.end_move(one, True, bad_source=True)
    assert store.ask(1) is None
    lease = store.ask(2)
    assert lease is not None
    store.book.begin_load(lease.id, 0, [[0]])
    store.book.end_load(lease.id, 0, [two.source])
    assert store.book.end_move(two, True).publish == (), "a reader found it bad while it was copied"
    assert (store.held(0), store.held(1)) == (set(), set())
    with pytest.raises(IntegrityError):
        store.book.end_move(two, True)
    store.book.release(lease.id)
    store.book.check_integrity()


def promote(store: Store, number: int) -> tuple[Move, ...]:
    lease = store.ask(number, request=f"reads {number}")
    assert lease is not None
    moves = store.book.begin_promotion(places_of(lease)).moves
    store.book.release(lease.id)
    return moves


def test_a_block_of_a_slower_tier_comes_up_at_its_second_read() -> None:
    store = Store(2, 8)
    store.book.recovered(1, [(n, key) for n, key in enumerate(keys(0, 1, 2, 3))])
    assert promote(store, 1) == ()
    (move,) = promote(store, 1)
    assert promote(store, 1) == (), "it is on its way"
    assert store.book.end_move(move, True).publish == ((keys(1)[0], move.target),)
    assert (store.held(0), store.held(1)) == ({1}, {0, 1, 2, 3})
    assert promote(store, 1) == (), "and is read up there now"
    store.save(9)
    promote(store, 2)
    (move,) = promote(store, 2)
    store.book.end_move(move, False)
    assert store.held(0) == {9}, "1 made room: it lies in the slower tier too"
    promote(store, 3)
    (third,) = promote(store, 3)
    store.book.end_move(third, True)
    promote(store, 2)
    (move,) = promote(store, 2)
    store.book.end_move(move, True)
    assert store.held(0) == {9, 2}, "9 would be lost and stays"
    lease = store.ask(2)
    assert lease is not None
    promote(store, 0)
    assert promote(store, 0) == (), "no room"
    store.book.release(lease.id)
    assert len(promote(store, 0)) == 1, "its next read asks again"


def test_nothing_is_lost_for_a_promotion() -> None:
    store = Store(1, 4)
    store.book.recovered(1, [(0, keys(1)[0])])
    store.save(9)
    leases = [store.ask(1, request=request) for request in "ab"]
    store.book.tier_off(1, "a dead disk")  # a load under a lease may have begun to read it
    for lease in leases:
        assert lease is not None
        assert store.book.begin_promotion(places_of(lease)).moves == ()
    assert store.held(0) == {9}


# -- operators and checks ------------------------------------------------------------------------------------


def test_clear_forgets_what_nobody_holds() -> None:
    store = Store(4, 4)
    store.book.recovered(1, [(2, keys(9)[0])], quarantined=[0])
    store.save(1, 2)
    lease = store.ask(1)
    assert lease is not None
    assert store.book.clear(1) == [Place(1, 2)]
    assert len(store.book.clear()) == 1
    assert (store.held(0), store.held(1)) == ({1}, set())
    assert store.book.figures().tiers[1].quarantined == 1


def test_the_scrubber_comes_by_every_idle_slot() -> None:
    store = Store(6)
    store.save(0, 1, 2, 3)
    lease = store.ask(0)
    assert lease is not None
    seen = []
    while (found := store.book.begin_check(0)) is not None:
        key, place = found
        assert store.tables[0].pins(place.slot) == 1
        store.book.check_integrity()
        seen.append(key)
        assert store.book.end_check(place, ok=key != keys(2)[0]) == (key == keys(2)[0])
    assert seen == keys(1, 2, 3)
    assert store.held() == {0, 1, 3}
    with pytest.raises(IntegrityError):
        store.book.end_check(place, True)
    found = store.book.begin_check(0)
    assert found is not None and found[0] == keys(1)[0], "a new round"


def test_check_integrity_sees_pins_and_slots_without_an_owner() -> None:
    store = Store(4)
    store.save(1)
    store.tables[0].pin(0)
    with pytest.raises(IntegrityError):
        store.book.check_integrity()
    store.tables[0].unpin(0)
    store.book.check_integrity()
    store.tables[0].reserve(keys(5))
    with pytest.raises(IntegrityError):
        store.book.check_integrity()


def test_a_store_has_a_medium_for_each_table() -> None:
    with pytest.raises(ValueError):
        StoreBook([SlotTable(1, LRU(1))], [], Cascade.EVICT, 1.0)
