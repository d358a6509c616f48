"""The book against everything that engines, ranks, copies, media and operators can do, in any order.

The model is what the owner of a book does: it keeps the headers as the book says, and bytes that are garbage from the
moment a place is to be written. So whoever reads a place that the book gave to somebody else reads garbage here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raykv.core.eviction import make_policy
from raykv.core.slot_table import SlotState, SlotTable
from raykv.core.store_book import Lease, Move, Place, SavePlan, StoreBook, block_key
from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES, Cascade, Eviction, Medium
from raykv.types import EngineId, JobId, LeaseId, Rank, RequestId
from tests.support.examples import examples, histories

PRINTS = [bytes([r + 1]) * FINGERPRINT_NBYTES for r in range(2)]
HASHES = [bytes([n]) * HASH_NBYTES for n in range(24)]
GARBAGE, BAD = b"garbage", b"bad"
FAMILY = 6
"""So many blocks a prompt has at most; block n of family f is number 6 f + n."""
INDEX = st.integers(0, 11)
FAMILIES = st.integers(0, 3)
ENGINES = st.sampled_from([EngineId("a"), EngineId("b")])
RARELY = st.sampled_from([False] * 7 + [True])
MOSTLY = st.sampled_from([True] * 5 + [False])


def pick(items: list[Any], index: int) -> Any:
    return items[index % len(items)]


def pins(lease: Lease) -> list[Place]:
    """A lease's own pins, one entry each."""
    return [place for run in lease.runs() for place in run.places()]


class BookMachine(RuleBasedStateMachine):
    @initialize(
        slots=st.lists(st.integers(3, 12), min_size=1, max_size=3),
        cascade=st.sampled_from(Cascade),
        eviction=st.sampled_from(Eviction),
        windows=st.sampled_from([[0], [2], [0, 1], [0, 2]]),
        recovered=st.sets(st.integers(0, 23)),
    )
    def start(
        self, slots: list[int], cascade: Cascade, eviction: Eviction, windows: list[int], recovered: set[int]
    ) -> None:
        self.tables = [SlotTable(count, make_policy(eviction, count)) for count in slots]
        self.book = StoreBook(self.tables, [Medium.HOST, *[Medium.DISK] * 2][: len(slots)], cascade, 10.0, low=0.3)
        self.windows = windows
        self.headers: dict[Place, bytes] = {}
        self.bytes: dict[Place, bytes] = {}
        self.plans: list[tuple[SavePlan, list[bytes]]] = []
        self.jobs: list[tuple[EngineId, JobId]] = []  # not settled
        self.settled: list[tuple[EngineId, JobId]] = []
        self.begun: set[tuple[EngineId, JobId, int]] = set()
        self.count = 0
        self.leases: dict[LeaseId, Lease] = {}
        self.first: dict[LeaseId, int] = {}
        self.loads: list[tuple[LeaseId, tuple[Place, ...]]] = []
        self.moves: list[Move] = []
        self.checks: list[Place] = []
        self.off: set[int] = set()
        self.now = 0.0
        for tier, count in enumerate(slots):
            found = [(n // 3, self.key(n % 2, 0, n)) for n in recovered if n % 3 == tier and n // 3 < count]
            self.book.recovered(tier, found := list({key: (slot, key) for slot, key in found}.values()))
            for slot, key in found:
                self.headers[Place(tier, slot)] = self.bytes[Place(tier, slot)] = key

    def key(self, rank: int, group: int, n: int) -> bytes:
        return block_key(PRINTS[rank], group, HASHES[n])

    def clear(self, places: Any) -> None:
        for place in places:
            assert self.headers.pop(place)

    def publish(self, published: Any) -> None:
        for key, place in published:
            assert place not in self.headers and place.tier not in self.off
            self.headers[place] = key

    def overwrite(self, places: Any) -> None:
        for place in places:
            assert place not in self.headers, "a place is overwritten under its header"
            assert place.tier not in self.off
            self.bytes[place] = GARBAGE

    # -- saves ----------------------------------------------------------------------------------------------

    @rule(engine=ENGINES, rank=st.integers(0, 1), job=INDEX, blocks=st.lists(INDEX, min_size=1, max_size=6))
    def begin_save(self, engine: EngineId, rank: int, job: int, blocks: list[int]) -> None:
        """A new job, or a part of one that has begun, or (11) of one that is settled."""
        mine = [number for owner, number in self.jobs if owner == engine and (owner, number, rank) not in self.begun]
        if job == 11 and self.settled:
            engine, number = self.settled[-1]
        elif job % 2 and mine:
            number = pick(mine, job)
        else:
            self.count += 1
            number = JobId(self.count)
            self.jobs.append((engine, number))
        self.begun.add((engine, number, rank))
        self.save(engine, rank, number, blocks)

    def save(self, engine: EngineId, rank: int, job: JobId, blocks: list[int]) -> None:
        groups = len(self.windows)
        keys = [self.key(rank, n % groups, n // groups) for n in blocks]
        plan = self.book.begin_save(engine, Rank(rank), job, keys)
        numbers = [i for i, _ in plan.write] + list(plan.known) + list(plan.skipped)
        assert sorted(numbers) == list(range(len(keys)))
        self.clear(plan.clear)
        self.overwrite(place for _, place in plan.write)
        assert not plan.write or (engine, job) in self.jobs
        self.plans.append((plan, keys))

    @rule(engine=ENGINES, family=FAMILIES, blocks=st.integers(1, 4))
    def save_prompt(self, engine: EngineId, family: int, blocks: int) -> None:
        """All of a prompt, on all ranks, without trouble: what look-ups live on."""
        self.count += 1
        job = JobId(self.count)
        self.jobs.append((engine, job))
        first, groups = family * FAMILY, len(self.windows)
        for rank in range(2):
            self.save(engine, rank, job, list(range(first * groups, (first + blocks) * groups)))
            self.end_write(len(self.plans) - 1, True)
        self.settle(len(self.jobs) - 1, True)

    @precondition(lambda self: self.plans)
    @rule(index=INDEX, ok=MOSTLY)
    def end_write(self, index: int, ok: bool) -> None:
        plan, keys = self.plans.pop(index % len(self.plans))
        for i, place in plan.write:
            assert self.bytes[place] == GARBAGE, "two wrote one place"
            self.bytes[place] = keys[i] if ok else GARBAGE
        self.book.end_write(plan, ok)

    @precondition(lambda self: self.jobs)
    @rule(index=INDEX, ok=MOSTLY)
    def settle(self, index: int, ok: bool) -> None:
        engine, job = self.jobs.pop(index % len(self.jobs))
        self.settled.append((engine, job))
        if ok:
            self.publish(self.book.commit(engine, job))
        else:
            self.book.abort(engine, job)

    # -- look-ups and loads ---------------------------------------------------------------------------------

    @rule(
        engine=ENGINES,
        request=st.sampled_from(["q", "r", "s"]),
        family=FAMILIES,
        ranks=st.integers(1, 2),
        blocks=st.integers(1, 5),
        load=MOSTLY,
        promote=MOSTLY,
    )
    def look_up(
        self, engine: EngineId, request: str, family: int, ranks: int, blocks: int, load: bool, promote: bool
    ) -> None:
        first = family * FAMILY
        lease = self.book.look_up(
            engine, RequestId(request), PRINTS[:ranks], self.windows, b"".join(HASHES[first : first + blocks]), self.now
        )
        held = {key for place, key in self.headers.items() if place.tier not in self.off}
        longest = max(n for n in range(blocks + 1) if held.issuperset(self.needed(ranks, n, first)))
        assert longest == (0 if lease is None else lease.num_blocks)
        self.leases = {
            i: old for i, old in self.leases.items() if (old.engine, old.request) != (engine, RequestId(request))
        }
        if lease is not None:
            assert sorted(self.headers[place] for place in pins(lease)) == sorted(self.needed(ranks, longest, first))
            self.leases[lease.id] = lease
            self.first[lease.id] = first
            if load:
                self.begin_load(len(self.leases) - 1, promote, blocks)

    def needed(self, ranks: int, n: int, start: int) -> list[bytes]:
        firsts = [0 if not window else max(0, n - window) for window in self.windows]
        return [
            self.key(r, g, start + i) for r in range(ranks) for g, first in enumerate(firsts) for i in range(first, n)
        ]

    @precondition(lambda self: self.leases)
    @rule(index=INDEX, promote=st.booleans(), longest=INDEX)
    def begin_load(self, index: int, promote: bool, longest: int) -> None:
        lease = pick(list(self.leases.values()), index)
        wanted = [[i for i in range(row.first, row.end) if i <= longest] for row in lease.rows[0]]
        places = self.book.begin_load(lease.id, 0, wanted)
        assert places is not None
        flat = tuple(place for row in places for place in row)
        self.loads.append((lease.id, flat))
        if promote:
            self.start_moves(self.book.begin_promotion(flat))

    @precondition(lambda self: self.loads)
    @rule(index=INDEX, rot=RARELY)
    def end_load(self, index: int, rot: bool) -> None:
        lease, places = self.loads.pop(index % len(self.loads))
        if rot and places:
            self.bytes[places[0]] = BAD
        bad = [place for place in places if self.bytes[place] == BAD]
        self.clear(self.book.end_load(lease, 0, bad))

    @precondition(lambda self: self.leases)
    @rule(index=INDEX)
    def release(self, index: int) -> None:
        lease = pick(list(self.leases), index)
        self.book.release(lease)
        del self.leases[lease]

    @rule(seconds=st.integers(1, 6))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        late = [i for i, lease in self.leases.items() if lease.expires <= self.now]
        assert self.book.expire(self.now) == len(late)
        for lease in late:
            del self.leases[lease]
            assert self.book.begin_load(lease, 0, [[] for _ in self.windows]) is None

    # -- moves ----------------------------------------------------------------------------------------------

    def start_moves(self, plan: Any) -> None:
        self.clear(plan.clear)
        self.overwrite(move.target for move in plan.moves)
        self.moves.extend(plan.moves)

    @rule(limit=st.integers(1, 4))
    def demote(self, limit: int) -> None:
        before = len(self.moves)
        self.start_moves(self.book.next_demotions(limit))
        assert len(self.moves) - before <= limit

    @precondition(lambda self: self.moves)
    @rule(index=INDEX, ok=MOSTLY)
    def end_move(self, index: int, ok: bool) -> None:
        move = self.moves.pop(index % len(self.moves))
        source, found_bad = self.bytes[move.source], move.source not in self.headers
        assert source in (move.key, BAD) and self.bytes[move.target] == GARBAGE
        self.bytes[move.target] = source if ok else GARBAGE
        bad = source == BAD and not found_bad
        end = self.book.end_move(move, ok and not bad, bad_source=bad)
        assert not (found_bad and end.publish), "copied from what a reader has found bad meanwhile"
        if bad:
            self.clear([move.source])
        self.publish(end.publish)
        self.clear(end.clear)

    # -- trouble --------------------------------------------------------------------------------------------

    @rule(engine=ENGINES, really=RARELY)
    def end_engine(self, engine: EngineId, really: bool) -> None:
        if not really:
            return
        self.book.end_engine(engine)
        self.leases = {i: lease for i, lease in self.leases.items() if lease.engine != engine}
        self.jobs = [job for job in self.jobs if job[0] != engine]
        self.settled = [job for job in self.settled if job[0] != engine]

    @precondition(lambda self: len(self.off) < len(self.tables))
    @rule(tier=INDEX, really=RARELY)
    def tier_off(self, tier: int, really: bool) -> None:
        if really:
            self.off.add(tier % len(self.tables))
            self.book.tier_off(tier % len(self.tables), "off")

    @rule(tier=st.sampled_from([None, 0]), really=RARELY)
    def clear_all(self, tier: int | None, really: bool) -> None:
        if really:
            self.clear(self.book.clear(tier))

    @rule(tier=INDEX)
    def begin_check(self, tier: int) -> None:
        found = self.book.begin_check(tier % len(self.tables))
        if found is not None:
            assert self.headers[found[1]] == found[0]
            self.checks.append(found[1])

    @precondition(lambda self: self.checks)
    @rule(rot=RARELY)
    def end_check(self, rot: bool) -> None:
        place = self.checks.pop()
        if rot:
            self.bytes[place] = BAD
        if self.book.end_check(place, self.bytes[place] != BAD):
            self.clear([place])

    # -- what always holds ----------------------------------------------------------------------------------

    @invariant()
    def the_book_is_sound(self) -> None:
        self.book.check_integrity()
        for tier, (table, figures) in enumerate(zip(self.tables, self.book.figures().tiers, strict=True)):
            assert table.free + figures.used + figures.writing + figures.quarantined == figures.slots
            ready = {Place(tier, slot): table.key(slot) for slot in table.in_state(SlotState.READY)}
            assert ready == {place: key for place, key in self.headers.items() if place.tier == tier}
        assert self.book.figures().leases >= len(self.leases)

    @invariant()
    def what_is_held_has_its_bytes(self) -> None:
        assert all(self.bytes[place] in (key, BAD) for place, key in self.headers.items())
        for lease in self.leases.values():
            first = self.first[lease.id]
            for rank, rows in enumerate(lease.rows):
                for group, row in enumerate(rows):
                    for n, place in enumerate(row.places(), row.first):
                        assert self.bytes[place] in (self.key(rank, group, first + n), BAD)
        assert not any(self.bytes[place] == GARBAGE for _, places in self.loads for place in places)

    def teardown(self) -> None:
        if not hasattr(self, "book"):
            return
        for engine in ("a", "b"):
            self.end_engine(EngineId(engine), True)
        for many, end in (
            (self.plans, lambda: self.end_write(0, True)),
            (self.loads, lambda: self.end_load(0, False)),
            (self.moves, lambda: self.end_move(0, True)),
            (self.checks, lambda: self.end_check(False)),
        ):
            while many:
                end()
        self.the_book_is_sound()
        figures = self.book.figures()
        assert (figures.leases, figures.open_jobs, figures.open_moves) == (0, 0, 0)
        assert all((tier.writing, tier.pinned) == (0, 0) for tier in figures.tiers)
        assert not any(table.pinned() for table in self.tables)


@pytest.mark.parametrize("cascade", Cascade)
@pytest.mark.parametrize("eviction", Eviction)
@pytest.mark.parametrize("seed", range(3))
def test_a_long_day_of_a_store(cascade: Cascade, eviction: Eviction, seed: int) -> None:
    """The same steps by their weight in use, many of them: Hypothesis finds the short cases, this the deep ones."""
    dice, machine = random.Random(seed), BookMachine()
    sizes = [[5], [6, 9], [12, 12], [4, 6, 9], [9, 24], [12, 40]][seed]
    machine.start(sizes, cascade, eviction, dice.choice([[0], [0, 2]]), set(range(seed * 3)))

    def index() -> int:
        return dice.randrange(12)

    def engine() -> EngineId:
        return EngineId(dice.choice("ab"))

    def ok() -> bool:
        return dice.random() < 0.9

    steps: list[Callable[[], object]] = []

    def step(weight: int, run: Callable[[], object]) -> None:
        steps.extend([run] * weight)

    step(6, lambda: machine.save_prompt(engine(), dice.randrange(4), dice.randint(1, 4)))
    step(6, lambda: machine.begin_save(engine(), dice.randint(0, 1), index(), [index() for _ in range(index())]))
    step(8, lambda: machine.plans and machine.end_write(index(), ok()))
    step(4, lambda: machine.jobs and machine.settle(index(), ok()))
    step(
        12,
        lambda: machine.look_up(
            engine(), dice.choice("qrs"), dice.randrange(4), dice.randint(1, 2), dice.randint(1, 4), ok(), ok()
        ),
    )
    step(2, lambda: machine.leases and machine.begin_load(index(), ok(), index()))
    step(10, lambda: machine.loads and machine.end_load(index(), dice.random() < 0.03))
    step(3, lambda: machine.leases and machine.release(index()))
    step(3, lambda: machine.expire(dice.randint(1, 3)))
    step(8, lambda: machine.demote(dice.randint(1, 3)))
    step(12, lambda: machine.moves and machine.end_move(index(), ok()))
    step(2, lambda: machine.begin_check(index()))
    step(3, lambda: machine.checks and machine.end_check(dice.random() < 0.02))
    step(1, lambda: machine.end_engine(engine(), True))
    for number in range(examples(200)):
        dice.choice(steps)()
        machine.the_book_is_sound()
        machine.what_is_held_has_its_bytes()
        if number == 150 and seed % 2:
            machine.tier_off(index(), True)
    machine.teardown()


LIGHT = histories(12)


class TestBook(BookMachine.TestCase):
    settings = LIGHT


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestBookAtLength(BookMachine.TestCase):
    settings = settings(LIGHT, max_examples=3_000, derandomize=False)
