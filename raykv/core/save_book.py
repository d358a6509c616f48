"""Saves: the part of a store's book that gives new blocks their slots, and decides when they are seen.

Which rank writes for which job is known by `save_jobs`. Not thread-safe; the owner of the book has the lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from raykv.core.contents import Contents, WatchedTiers
from raykv.core.moves import Moves
from raykv.core.save_jobs import SaveJobs, Settled
from raykv.core.store_plans import Place, Published, SavePlan, row_of, runs_of
from raykv.engine_messages import Why
from raykv.types import EngineId, JobId, Rank


class SaveBook:
    """Its methods are the book's, by the same names. `jobs`: those that are not settled, or still written."""

    def __init__(self, tiers: WatchedTiers, contents: Contents, moves: Moves, counts: Counter[str]) -> None:
        """`moves` are told what is committed. `counts`: the book's figures, by name."""
        self._tiers, self._contents, self._moves, self._counts = tiers, contents, moves, counts
        self.jobs = SaveJobs()

    def begin_save(
        self, engine: EngineId, rank: Rank, job: JobId, keys: Sequence[bytes], tenants: Sequence[bytes] = ()
    ) -> SavePlan:
        """As `StoreBook.begin_save`."""
        tier = self._tiers.fastest
        if not self.jobs.takes(engine, rank, job) or tier is None:
            return self._planned(engine, rank, job, (), (), range(len(keys)), ())
        table = self._tiers.tables[tier]
        wanted: dict[bytes, int] = {}
        known, kept = [], []
        for i, key in enumerate(keys):
            place = self._tiers.find(key)
            if place is not None:
                kept.append(place)
            if place is not None or self._tiers.being_written(key):
                known.append(i)
            else:
                wanted.setdefault(key, i)
        runs = runs_of(kept)
        self._tiers.use(reversed(runs))  # the tail first: without its prefix it is worth nothing
        self._tiers.pin_runs(runs)  # making room must not take what the job counts on
        clear: list[Place] = []
        allowed = wanted
        if tenants and self._contents.tenants.limited:
            self._contents.tenants.asked(runs)
            clear, refused = self._contents.within_quotas(wanted, tenants, self._tiers.may_go)
            self._tiers.evict(clear)
            allowed = {key: i for key, i in wanted.items() if key not in refused}
        clear += self._tiers.make_room(tier, len(allowed))
        self._tiers.unpin_runs(runs)
        written = dict(list(allowed.items())[: table.free])
        in_rows = sorted(written, key=row_of)  # a look-up goes by runs of one row
        slot_of = dict(zip(in_rows, table.reserve(in_rows) or (), strict=True))
        write = [(i, Place(tier, slot_of[key])) for key, i in written.items()]
        if tenants:
            self._contents.reserved(write, tenants)
        fresh = set(known).union(written.values())
        twice = [i for i, key in enumerate(keys) if i not in fresh and key in written]
        skipped = [i for i, key in enumerate(keys) if i not in fresh and key not in written]
        for key in list(allowed)[len(written) :]:
            self._contents.absences.note(key, Why.NO_ROOM)
        return self._planned(engine, rank, job, write, sorted(known + twice), skipped, clear)

    def _planned(
        self,
        engine: EngineId,
        rank: Rank,
        job: JobId,
        write: Sequence[tuple[int, Place]],
        known: Sequence[int],
        skipped: Sequence[int],
        clear: Sequence[Place],
    ) -> SavePlan:
        ticket = self.jobs.begin(engine, rank, job, [place for _, place in write])
        self._counts["skipped_blocks"] += len(skipped)
        return SavePlan(engine, rank, job, ticket, tuple(write), tuple(known), tuple(skipped), tuple(clear))

    def end_write(self, plan: SavePlan, ok: bool) -> None:
        """As `StoreBook.end_write`."""
        self._settle(self.jobs.end(plan.ticket, ok))

    def commit(self, engine: EngineId, job: JobId) -> list[Published]:
        """As `StoreBook.commit`."""
        return self._settle(self.jobs.commit(engine, job))

    def abort(self, engine: EngineId, job: JobId) -> None:
        """As `StoreBook.abort`."""
        self._settle(self.jobs.abort(engine, job))

    def end_engine(self, engine: EngineId) -> None:
        """As `StoreBook.end_engine`."""
        self._settle(self.jobs.end_engine(engine))

    def _settle(self, settled: Settled) -> list[Published]:
        serving = [place for place in settled.publish if place.tier in self._tiers.serving]
        for discard in (settled.discard, [place for place in settled.publish if place.tier not in self._tiers.serving]):
            self._tiers.discard(discard)
            self._contents.discarded(discard)
        published = self._tiers.publish(serving)
        for key, place in published:
            self._moves.committed(place.tier, key)
        self._counts["saved_blocks"] += len(published)
        return published
