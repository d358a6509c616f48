"""What an open store has: its tiers, the book about them and the one lock around it, rows to stage, threads to read."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from raykv.actors.store_meter import Meter
from raykv.actors.store_tiers import Tiers
from raykv.core.eviction import make_policy
from raykv.core.peer_part import PeerParts
from raykv.core.slot_table import SlotTable
from raykv.core.store_book import StoreBook
from raykv.core.store_plans import Move, Place
from raykv.errors import DiskError
from raykv.storage.disk_pool import aligned_buffer
from raykv.store_messages import Medium
from raykv.types import LeaseId

logger = logging.getLogger("raykv")

READ_THREADS = 4
"""The queue depth of the disk pool: more would wait there."""
STAGING_NBYTES = 64 << 20


class Staging:
    """Page-aligned rows for bytes on their way from or to a tier that is not memory. Any thread.

    In turn: what one core has just read is overwritten late by another, which would have to fetch it from its cache."""

    def __init__(self, slot_nbytes: int) -> None:
        count = max(4, min(64, STAGING_NBYTES // slot_nbytes))
        self.rows: torch.Tensor = aligned_buffer(count * slot_nbytes).view(count, slot_nbytes)
        self._free = deque(range(count))
        self._changed = threading.Condition()

    def take(self, wait: bool = True, timeout: float | None = None) -> int | None:
        """A row; None if there is none and the caller, who holds some, must not wait (it could be for himself), or if
        there is none within `timeout` seconds."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: bool(self._free), timeout)
            return self._free.popleft() if self._free else None

    def take_some(self, most: int) -> list[int]:
        """One row at least, which the caller, who holds none, may wait for."""
        first = self.take()
        assert first is not None
        rows = [first]
        while len(rows) < most and (more := self.take(wait=False)) is not None:
            rows.append(more)
        return rows

    def give(self, rows: Iterable[int]) -> None:
        with self._changed:
            self._free.extend(rows)
            self._changed.notify_all()


class Stock:
    """Made once the size of a slot is known. `lock` is around every call of `book` and the headers that it asks for."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers, self.spec = tiers, tiers.spec
        self.lock = threading.Lock()
        self.meter = Meter()
        self.book = StoreBook(
            [SlotTable(count, make_policy(self.spec.eviction, count)) for count in tiers.num_slots],
            [tier.medium for tier in tiers.specs],
            self.spec.cascade,
            self.spec.lease_s,
        )
        tiers.tenant_of = self.book.contents.tenants.tag
        for tier, spec in enumerate(tiers.specs):
            found, quarantined = tiers.recovered(tier)
            self.book.recovered(tier, found, quarantined, tiers.tenants(tier))
            if found or quarantined:
                medium = tiers.medium(tier)
                logger.info("%s tier: %d blocks found again, %d slots out of use", medium, len(found), len(quarantined))
            if spec.medium in tiers.drained:
                self.book.changes.be_drained(tier)
        self._staging: Staging | None = None
        self.stage_through(spec.medium for spec in tiers.specs)
        self.readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="raykv-read")
        self.parts = PeerParts()
        """What leases have at peers; under the lock."""
        self._off: set[int] = set()
        # Ids of another life's leases must mean nothing here: a load names its lease, and not that life.
        self._first_lease = secrets.randbits(30) << 32
        for tier, why in tiers.off:
            self.switch_off(tier, DiskError(why, fatal=True))

    def stage_through(self, media: Iterable[Medium]) -> None:
        """There are tiers of these media (too)."""
        if self._staging is None and any(medium is not Medium.HOST for medium in media):
            self._staging = Staging(self.tiers.slot_nbytes)

    @property
    def takes(self) -> int | None:
        """The tier that saves, promotions and what comes from peers go to. Under the lock."""
        return self.book.fastest

    @property
    def staging(self) -> Staging:
        assert self._staging is not None, "only a tier that is not memory needs staging"
        return self._staging

    def lease_out(self, lease: LeaseId) -> LeaseId:
        """The book's number of a lease as engines know it."""
        return LeaseId(self._first_lease + lease)

    def lease_in(self, lease: LeaseId) -> LeaseId:
        """The reverse; a lease of another life becomes a number that the book never gave."""
        return LeaseId(lease - self._first_lease)

    def sound(self, key: bytes, place: Place) -> bool:
        """Whether a pinned slot has the bytes of its block. Blocks for as long as they take to be read; raises
        StorageError."""
        header, rows = self.tiers.header(place), self.tiers.rows(place.tier)
        if header is None or header.key != key:
            return False
        if rows is not None:
            return self.tiers.good(header, rows[place.slot])
        staged = self.staging.take()
        assert staged is not None
        try:
            return self.tiers.read(place, header, self.staging.rows[staged])
        finally:
            self.staging.give([staged])

    def end_move(self, move: Move, ok: bool, bad_source: bool = False) -> None:
        """A move has ended, and its headers follow."""
        with self.lock:
            end = self.book.end_move(move, ok, bad_source)
            self.tiers.publish(end.publish)
            self.tiers.clear(end.clear)
            if bad_source:
                self.tiers.quarantine([move.source])

    def serves(self, tier: int) -> bool:
        """Whether the tier is not switched off."""
        return tier not in self._off

    def is_new(self, tier: int) -> None:
        """The number is that of another tier now. Under the lock."""
        self._off.discard(tier)

    def switch_off(self, tier: int, error: DiskError) -> None:
        """A medium has failed for good. The store serves on without it."""
        with self.lock:
            if tier in self._off or tier not in self.book.order:
                return
            self._off.add(tier)
            self.meter.fault("tier off")
            self.book.tier_off(tier, str(error))
        logger.error(
            "The %s tier of store %s (%s) is switched off: %s The store serves on without it; `raykv stop` and a new "
            "start try it again.",
            self.tiers.medium(tier),
            self.spec.name,
            self.tiers.spec_of(tier).path or "memory",
            error,
        )

    def close(self, remove_host: bool) -> None:
        """No copy runs any more."""
        self.readers.shutdown(wait=True)
        self.tiers.close(remove_host)
