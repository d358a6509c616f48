"""The book of a node's store: which block lies where, for whom it is kept, and what is to be copied next.

This class is the one door. Behind it look-ups and leases are decided in `leased_reads`, saves in `save_book`, copies
between tiers in `moves`, changes of the tiers in `tier_changes`. One owner drives it, under one lock that it holds for
one call and for the header changes that the call asks for (`store_plans`). The book does no I/O and has no clock: it
decides, the owner copies outside the lock and comes back with what happened. A wrong call raises IntegrityError and
changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from raykv.admin_messages import NO_TENANT
from raykv.core.checked_reads import CheckedReads
from raykv.core.content_log import ContentLog
from raykv.core.contents import Contents, WatchedTiers
from raykv.core.drain_book import DrainBook
from raykv.core.fetches import Fetches
from raykv.core.leased_reads import LeasedReads
from raykv.core.moves import Moves
from raykv.core.prefix import CHUNK, block_key
from raykv.core.save_book import SaveBook
from raykv.core.scrub import Scrub
from raykv.core.selections import Chosen, Part, parts
from raykv.core.slot_ages import SlotAges
from raykv.core.slot_table import SlotState, SlotTable
from raykv.core.store_plans import (
    BookFigures,
    Lease,
    Move,
    MoveEnd,
    MovePlan,
    Place,
    Published,
    SavePlan,
)
from raykv.core.tier_changes import TierChanges
from raykv.engine_messages import Why
from raykv.store_messages import Cascade, Medium
from raykv.types import EngineId, JobId, LeaseId, Rank, RequestId

__all__ = ["Lease", "Move", "MoveEnd", "MovePlan", "Place", "SavePlan", "StoreBook", "block_key"]

QUOTA_STEP = 512
"""So many blocks of a tenant over his quota go in one hold of the lock."""
COUNTED = ("look_ups", "hit_blocks", "missed_blocks", "saved_blocks", "skipped_blocks", "loaded_blocks")


class StoreBook:
    """Tiers, save jobs, leases and moves of one store; `tables[0]` is the fastest. `low`: see `next_demotions`."""

    def __init__(
        self,
        tables: Sequence[SlotTable],
        media: Sequence[Medium],
        cascade: Cascade,
        lease_s: float,
        low: float = 1 / 16,
        queue_limit: int | None = None,
    ) -> None:
        self._tiers = WatchedTiers(tables, media)
        self._moves = Moves(self._tiers, cascade, low, queue_limit)
        self._scrub = Scrub(self._tiers)
        self._fetches = Fetches(self._tiers)
        self.drain = DrainBook(self._tiers, cascade, low)
        self._counts: Counter[str] = Counter()
        self.content = ContentLog(self._tiers)
        """What a Directory is to be told; off until somebody does so."""
        self.contents = Contents(self._tiers)
        """Whose blocks these are, which of them operators keep, and what became of the others."""
        self._leased = LeasedReads(self._tiers, self.contents, self._counts, lease_s)
        self._saves = SaveBook(self._tiers, self.contents, self._moves, self._counts)
        self.reads = CheckedReads(self._tiers)
        """What is read on an operator's order."""
        for tier, table in enumerate(tables):
            self._watch(tier, table)
        self._tiers.added = self._watch
        self.changes = TierChanges(self._tiers, self._moves, self.content.touch)
        """Of the tiers themselves."""
        self.changes.follow(self.contents.elsewhere, self.contents.pins)

    def _watch(self, tier: int, table: SlotTable) -> None:
        table.touch = partial(self._touched, tier, table)

    def _touched(self, tier: int, table: SlotTable, key: bytes) -> None:
        self.content.touch(key)
        self.contents.touch(tier, table, key)

    # -- start and operators --------------------------------------------------------------------------------

    def recovered(
        self,
        tier: int,
        found: Sequence[tuple[int, bytes]],
        quarantined: Iterable[int] = (),
        tenants: Mapping[int, bytes] | None = None,
    ) -> None:
        """At the start, before anything else: these slots hold these keys, oldest first, those are out of use.

        `tenants`: by slot, of those blocks that have one.
        """
        table = self._tiers.tables[tier]
        for slot, tag in (tenants or {}).items():
            self.contents.tenants.put(Place(tier, slot), self.contents.tenants.number(tag))
        for at in range(0, len(found), CHUNK):  # about as they were used: prompts in their order, each tail first
            for slot, key in reversed(found[at : at + CHUNK]):
                table.recovered(slot, key)
        for _, key in found:
            self._moves.committed(tier, key)
        for slot in quarantined:
            table.recovered_quarantined(slot)

    def tier_off(self, tier: int, why: str) -> None:
        """Nothing is found or written there any more. What runs there ends as usual and is not published."""
        self._tiers.off(tier, why)
        self.content.tier_off()

    def clear(self, tier: int | None = None) -> list[Place]:
        """Forget all that nobody holds (of one tier). Clear the headers of what is returned."""
        ready = [
            Place(number, slot)
            for number, table in enumerate(self._tiers.tables)
            if tier in (None, number)
            for slot in table.in_state(SlotState.READY)
        ]
        return self.forget_all(ready)

    def forget_all(self, places: Iterable[Place]) -> list[Place]:
        """Forget those of these READY places that nobody holds. Clear the headers of what is returned."""
        tables = self._tiers.tables
        cleared = [place for place in places if not tables[place.tier].pins(place.slot)]
        with self.contents.absences.because(Why.CLEARED):
            self._tiers.evict(cleared)
        return cleared

    def select(self, what: Chosen, heads: Sequence[bytes]) -> Iterator[Part]:
        """The READY blocks that an operator means, in parts; each part is one call. `heads`: see `selections.parts`."""
        return parts(self._tiers, self.contents.tenants, what, heads)

    @property
    def media(self) -> list[Medium]:
        """By number of a tier."""
        return list(self._tiers.media)

    @property
    def serving_media(self) -> list[Medium]:
        """Of the tiers that are asked, fastest first."""
        return [self._tiers.media[tier] for tier in self._tiers.serving]

    @property
    def fastest_slots(self) -> int:
        """How many the tier has that saves go to; 0: there is none."""
        tier = self._tiers.fastest
        return self._tiers.tables[tier].slots if tier is not None else 0

    @property
    def own_tiers(self) -> list[int]:
        """Tiers whose slots are this node's own."""
        return [tier for tier in self._tiers.order if tier not in self._tiers.shared]

    def lying(self, keys: Iterable[bytes], medium: Medium | None = None) -> list[Published]:
        """Where these blocks are READY: in a tier of that medium, or else in the fastest one."""
        tiers, found = self._tiers, []
        for key in keys:
            in_tier = [tier for tier in tiers.serving if tiers.tables[tier].find(key) is not None]
            first = next((tier for tier in in_tier if tiers.media[tier] is medium), in_tier[0] if in_tier else None)
            slot = tiers.tables[first].find(key) if first is not None else None
            if first is not None and slot is not None:
                found.append((key, Place(first, slot)))
        return found

    def in_tiers(self, key: bytes) -> list[int]:
        """The tiers that serve and have the block, fastest first."""
        return [tier for tier in self._tiers.serving if self._tiers.tables[tier].find(key) is not None]

    def quota_cut(self, tag: bytes) -> list[Place]:
        """Throw out what a tenant has beyond his quota, a part of it. Clear the headers of what is returned."""
        tenants = self.contents.tenants
        number = tenants.known(tag)
        over = tenants.over(number) if number is not None else 0
        if number is None or not over:
            return []
        victims = tenants.victims(number, min(over, QUOTA_STEP), self._tiers.may_go)
        with self.contents.absences.because(Why.OVER_QUOTA):
            self._tiers.evict(victims)
        return victims

    # -- look-ups and loads ---------------------------------------------------------------------------------

    def look_up(
        self,
        engine: EngineId,
        request: RequestId,
        fingerprints: Sequence[bytes],
        windows: Sequence[int],
        hashes: bytes,
        now: float,
    ) -> Lease | None:
        """Lease the longest prefix of `hashes` (concatenated) that is READY for every fingerprint (writing rank) and
        KV group.

        `windows[g]` 0: the group needs all blocks of the prefix; w > 0: only its last w. A request has one lease: an
        older one is released, also when the answer is None.
        """
        return self._leased.look_up(engine, request, fingerprints, windows, hashes, now)

    @property
    def fastest(self) -> int | None:
        """The number of the tier that saves go to."""
        return self._tiers.fastest

    @property
    def order(self) -> list[int]:
        """The numbers of all tiers, fastest first."""
        return list(self._tiers.order)

    def find(self, key: bytes) -> Place | None:
        """The fastest place where the block is READY."""
        return self._tiers.find(key)

    def adopt(
        self, tier: int, keys: Sequence[bytes], tenants: Mapping[bytes, bytes] | None = None
    ) -> tuple[list[Published], list[Place]]:
        """These blocks were found in a shared tier. Publish the first answer's headers, clear the second's.

        `tenants`: by key, of those that somebody asked for who has a tag.
        """
        added, forgotten = self._tiers.adopt(tier, keys)
        if tenants:
            for key, place in added:
                if tag := tenants.get(key, NO_TENANT):
                    self.contents.tenants.put(place, self.contents.tenants.number(tag))
        return added, forgotten

    def forget(self, place: Place) -> bool:
        """A block is no longer in a shared tier. False: somebody holds it, and will find out for himself."""
        table = self._tiers.tables[place.tier]
        if not self._tiers.is_ready(place) or table.pins(place.slot):
            return False
        table.evict([place.slot])
        return True

    def release(self, lease: LeaseId) -> None:
        """The lease is over (once loads of it have ended). A second time and an unknown one are fine."""
        self._leased.release(lease)

    def expire(self, now: float) -> int:
        """Release what is past its time; how many leases that were. Tells the ages of blocks the time as well."""
        return self._leased.expire(now)

    def begin_load(
        self, lease: LeaseId, rank: int, indices: Sequence[Sequence[int]]
    ) -> tuple[tuple[Place, ...], ...] | None:
        """A load of these blocks (by KV group, as LoadJob.indices) starts: where they lie. `rank` as in Lease.rows.

        None: the lease is over, or it does not cover all of them; the load fails. Else the lease lives until
        `end_load`, which the caller calls exactly once for this call.
        """
        return self._leased.begin_load(lease, rank, indices)

    def end_load(self, lease: LeaseId, rank: int, bad: Iterable[Place] = ()) -> list[Place]:
        """That load no longer reads. `bad` failed their check: quarantine the headers of the places returned.

        Bad places are never found again; who else holds them keeps the pin and will find out for himself.
        """
        return self._leased.end_load(lease, rank, bad)

    # -- saves ----------------------------------------------------------------------------------------------

    def begin_save(
        self, engine: EngineId, rank: Rank, job: JobId, keys: Sequence[bytes], tenants: Sequence[bytes] = ()
    ) -> SavePlan:
        """One rank starts its part of a job. Once per rank and job. What finds no room is skipped, from the tail.

        `tenants`: whose each block is, empty if all are nobody's. A tenant who is over his quota by this makes room
        among his own, and what is too much all the same is skipped.
        """
        return self._saves.begin_save(engine, rank, job, keys, tenants)

    def end_write(self, plan: SavePlan, ok: bool) -> None:
        """That rank no longer writes for that plan. Exactly once per plan, also for one with nothing to write."""
        self._saves.end_write(plan, ok)

    def commit(self, engine: EngineId, job: JobId) -> list[Published]:
        """The engine says that the job is complete on all ranks: publish what is returned.

        Holds if every rank that began has ended with ok; else it is an abort. An unknown job has nothing to publish.
        """
        return self._saves.commit(engine, job)

    def abort(self, engine: EngineId, job: JobId) -> None:
        """The job must not be seen. Its slots come free as its ranks end. An unknown job is fine."""
        self._saves.abort(engine, job)

    def end_engine(self, engine: EngineId) -> None:
        """The engine is gone: its leases are over, its uncommitted jobs are aborted."""
        self._leased.end_engine(engine)
        self._saves.end_engine(engine)

    # -- moves between tiers --------------------------------------------------------------------------------

    def next_demotions(self, limit: int) -> MovePlan:
        """Up to `limit` copies to the next slower tier.

        Cascade.WRITE: of what was committed, oldest first. Cascade.EVICT: the coldest of a tier with less than the
        share `low` of its slots free.
        """
        return self._moves.next_demotions(limit)

    def begin_promotion(self, places: Sequence[Place]) -> MovePlan:
        """These places of slower tiers (leased, so pinned) are read now: which of them go to the fastest tier too.

        A block is admitted at its second read, and only where that loses nothing: into a free slot, or one whose
        block lies in a slower tier too.
        """
        return self._moves.begin_promotion(places)

    def end_move(self, move: Move, ok: bool, bad_source: bool = False) -> MoveEnd:
        """That copy has ended, exactly once per move. `bad_source`: the source failed its check; so its header says."""
        moves = self.changes if self.changes.runs(move) else self._moves
        why = Why.CORRUPT if bad_source else Why.EVICTED
        with self.contents.moved(move) as published, self.contents.absences.because(why):
            end = moves.end(move, ok, bad_source)
            published.extend(end.publish)
        return end

    def end_lift(self, move: Move, ok: bool, bad_source: bool = False) -> list[Published]:
        """A copy that `reads` has begun has ended. As `end_move`."""
        why = Why.CORRUPT if bad_source else Why.EVICTED
        with self.contents.moved(move) as published, self.contents.absences.because(why):
            published.extend(self.reads.end_lift(move, ok, bad_source))
        for key, place in published:
            self._moves.committed(place.tier, key)
        return published

    def end_read(self, place: Place, ok: bool) -> bool:
        """A place that `reads` has begun is not read any more; whether it is to be quarantined."""
        with self.contents.absences.because(Why.CORRUPT):
            return self.reads.end(place, ok)

    # -- peers: other nodes' stores ---------------------------------------------------------------------------

    def lease_nothing(self, engine: EngineId, request: RequestId, ranks: int, groups: int, now: float) -> LeaseId:
        """A lease of no block, for a prefix of which all lies at a peer. Else it is as one of `look_up`."""
        return self._leased.lease_nothing(engine, request, ranks, groups, now)

    def holds(self, lease: LeaseId) -> bool:
        """Whether the lease is not over."""
        return self._leased.holds(lease)

    def lend(
        self,
        borrower: EngineId,
        number: RequestId,
        fingerprints: Sequence[bytes],
        windows: Sequence[int],
        hashes: bytes,
        first: int,
        most: int,
        expires: float,
    ) -> Lease | None:
        """Lease the longest prefix in the fastest tier to a peer that has `first` blocks: of it what that one lacks.

        None if it is not longer than that, or if more than `most` slots would be pinned. No look-up of an engine's,
        so none of its figures.
        """
        return self._leased.lend(borrower, number, fingerprints, windows, hashes, first, most, expires)

    def begin_fetch(self, keys: Sequence[bytes], tenant: bytes = NO_TENANT) -> tuple[list[Place | None], list[Place]]:
        """Blocks are read from a peer now: the places that they are written into too, each ended by `end_fetch`.

        None: there is no room, or not within the quota of the `tenant` whose they are. Clear the headers of the second
        answer.
        """
        if tenant in (b"", NO_TENANT):
            return self._fetches.begin(keys)
        tenants = self.contents.tenants
        room = tenants.room(tenant)
        places, clear = self._fetches.begin(keys[:room])
        for place in places:
            if place is not None:
                tenants.put(place, tenants.number(tenant))
        return [*places, *[None] * (len(keys) - len(places))], clear

    def end_fetch(self, good: Sequence[Place], bad: Sequence[Place] = ()) -> list[Published]:
        """These are not written any more: publish what is returned."""
        published = self._fetches.end(good, bad)
        kept = {place for _, place in published}
        self.contents.discarded([place for place in (*good, *bad) if place not in kept])
        for key, place in published:
            self._moves.committed(place.tier, key)
        return published

    # -- the scrubber ---------------------------------------------------------------------------------------

    def begin_check(self, tier: int) -> Published | None:
        """The next idle slot of a tier in turn, pinned until `end_check`; None at the end of a round."""
        return self._scrub.begin(tier)

    def end_check(self, place: Place, ok: bool) -> bool:
        """Whether the slot is to be quarantined: not `ok`, and nobody else has quarantined it yet."""
        with self.contents.absences.because(Why.CORRUPT):
            return self._scrub.end(place, ok)

    # -- figures --------------------------------------------------------------------------------------------

    def figures(self) -> BookFigures:
        """All counts at this moment."""
        return BookFigures(
            tiers=self._tiers.figures(),
            leases=len(self._leased.leases),
            open_jobs=len(self._saves.jobs),
            open_moves=len(self._moves),
            waiting_moves=self._moves.waiting,
            demoted_blocks=self._moves.demoted,
            promoted_blocks=self._moves.promoted,
            dropped_blocks=self._tiers.dropped,
            queue_overflows=self._moves.overflows,
            unknown_releases=self._leased.leases.unknown_releases,
            **{name: self._counts[name] for name in COUNTED},
        )

    def ages(self) -> tuple[SlotAges, ...]:
        """By tier: how old blocks were that were thrown out, and how many had never been read."""
        return tuple(table.ages for table in self._tiers.tables)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless pins and WRITING slots have owners and counts agree. Reads every slot."""
        self._saves.jobs.check_integrity()
        self._leased.leases.check_integrity()
        self.changes.check_integrity()
        self.contents.check_integrity()
        pinned = self._leased.leases.pinned() + self._moves.pinned() + self._scrub.pinned() + self.drain.pinned()
        pinned += self.changes.pinned() + self.contents.pins.pinned() + self.reads.pinned()
        moving = [*self._moves.targets(), *self.changes.targets(), *self.reads.targets()]
        self._tiers.check_integrity(pinned, [*self._saves.jobs.places(), *moving, *self._fetches.targets()])
