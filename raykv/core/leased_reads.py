"""Look-ups and what they lease: the part of a store's book that promises blocks, to engines and to peers.

Who holds which pins until when is decided by `leases`; here a lease is made of what lies where, and its pins are taken
and given back. Not thread-safe; the owner of the book has the lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from raykv.core.contents import Contents, WatchedTiers
from raykv.core.leases import LeaseBook
from raykv.core.one_table import OneTable
from raykv.core.peer_part import lacking
from raykv.core.prefix import longest_prefix, tail_first
from raykv.core.store_plans import Lease, Place, Row
from raykv.engine_messages import Why
from raykv.errors import IntegrityError
from raykv.store_messages import HASH_NBYTES, Medium
from raykv.types import EngineId, LeaseId, RequestId


class LeasedReads:
    """Its methods are the book's, by the same names. `leases`: who holds what."""

    def __init__(self, tiers: WatchedTiers, contents: Contents, counts: Counter[str], lease_s: float) -> None:
        """`counts`: the book's figures, by name. `lease_s`: how long a lease of an engine's lasts."""
        self._tiers, self._contents, self._counts, self._lease_s = tiers, contents, counts, lease_s
        self.leases = LeaseBook()

    # -- engines --------------------------------------------------------------------------------------------

    def look_up(
        self,
        engine: EngineId,
        request: RequestId,
        fingerprints: Sequence[bytes],
        windows: Sequence[int],
        hashes: bytes,
        now: float,
    ) -> Lease | None:
        """As `StoreBook.look_up`."""
        tiers = self._tiers
        n, rows = longest_prefix(tiers, fingerprints, windows, hashes)
        counts = self._counts
        counts["look_ups"] += 1
        counts["hit_blocks"] += n
        counts["missed_blocks"] += len(hashes) // HASH_NBYTES - n
        if not n:
            tiers.unpin_runs(self.leases.drop_request(engine, request))
            return None
        flat = [row for by_group in rows for row in by_group]
        expires = now + self._lease_s
        lease = Lease(self.leases.next_id(), engine, request, expires, n, rows, tiers.slowest(n, flat))
        order = tail_first(flat)
        tiers.read(order)
        if self._contents.tenants.limited:
            self._contents.tenants.asked(order)
        tiers.unpin_runs(self.leases.grant(lease))
        return lease

    def release(self, lease: LeaseId) -> None:
        """As `StoreBook.release`."""
        self._tiers.unpin_runs(self.leases.release(lease))

    def expire(self, now: float) -> int:
        """As `StoreBook.expire`."""
        for table in self._tiers.tables:
            table.ages.tick(now)
        count, freed = self.leases.expire(now)
        self._tiers.unpin_runs(freed)
        return count

    def end_engine(self, engine: EngineId) -> None:
        """As `StoreBook.end_engine`."""
        self._tiers.unpin_runs(self.leases.end_engine(engine))

    def begin_load(
        self, lease: LeaseId, rank: int, indices: Sequence[Sequence[int]]
    ) -> tuple[tuple[Place, ...], ...] | None:
        """As `StoreBook.begin_load`."""
        held = self.leases.get(lease)
        if held is None or not 0 <= rank < len(held.rows) or len(indices) != len(held.rows[rank]):
            return None
        wanted: list[tuple[Place, ...]] = []
        for group, group_indices in enumerate(indices):
            places = held.places(rank, group, group_indices)
            if places is None:
                return None
            wanted.append(places)
        self.leases.begin_use(lease, rank)
        self._counts["loaded_blocks"] += sum(map(len, wanted))
        return tuple(wanted)

    def end_load(self, lease: LeaseId, rank: int, bad: Iterable[Place] = ()) -> list[Place]:
        """As `StoreBook.end_load`."""
        bad = set(bad)
        held = self.leases.in_use(lease, rank)
        if held is None or not all(map(held.covers, bad)):
            raise IntegrityError(f"no load of rank {rank} under lease {lease} reads {sorted(bad)}")
        with self._contents.absences.because(Why.CORRUPT):
            found = [place for place in sorted(bad) if self._tiers.quarantine(place)]
        self._counts["loaded_blocks"] -= len(bad)
        self._tiers.unpin_runs(self.leases.end_use(lease, rank))
        return found

    # -- peers ----------------------------------------------------------------------------------------------

    def lease_nothing(self, engine: EngineId, request: RequestId, ranks: int, groups: int, now: float) -> LeaseId:
        """As `StoreBook.lease_nothing`."""
        rows = ((Row(0, ()),) * groups,) * ranks
        lease = Lease(self.leases.next_id(), engine, request, now + self._lease_s, 0, rows, ())
        self._tiers.unpin_runs(self.leases.grant(lease))
        return lease.id

    def holds(self, lease: LeaseId) -> bool:
        """As `StoreBook.holds`."""
        return self.leases.get(lease) is not None

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
        """As `StoreBook.lend`."""
        tiers = self._tiers
        tier = tiers.of(Medium.HOST)
        if tier not in tiers.serving or tier is None:
            return None
        n, rows = longest_prefix(OneTable(tier, tiers.tables[tier]), fingerprints, windows, hashes)
        if n <= first:
            return None
        ranges = lacking(windows, first, n)
        lent = tuple(
            tuple(row.past(wanted.start) for row, wanted in zip(by_group, ranges, strict=True)) for by_group in rows
        )
        lease = Lease(self.leases.next_id(), borrower, number, expires, n, lent, (tiers.media[tier],) * n)
        if lease.num_pins > most:
            return None
        tiers.pin_runs(lease.runs())
        tiers.use(tail_first([row for by_group in lent for row in by_group]))
        tiers.unpin_runs(self.leases.grant(lease))
        return lease
