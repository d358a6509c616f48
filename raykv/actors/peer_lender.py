"""Lends slots of this store's host tier to the stores of other nodes, which read them without its doing.

A lease here is one of the book's: it pins the slots, ends by the borrower's word, and else by its time, which runs by
this store's clock alone. What lies in slower tiers is not lent: its reads would be this store's work, and a borrower
has a disk of its own.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterable

from raykv.actors.store_stock import Stock
from raykv.core.peer_part import seal
from raykv.core.prefix import block_key
from raykv.core.store_plans import Lease
from raykv.peer_messages import Lend, Lent, PeerMemory
from raykv.store_messages import HASH_NBYTES
from raykv.types import EngineId, LeaseId, RequestId, StoreLife

logger = logging.getLogger("raykv")

LONGEST_S = 120.0
MOST_TOLD = 4096
"""Borrowers whose knowledge is remembered."""
MOST = 1 / 2
"""Of the host tier's slots may be pinned by peers: its own engines need room."""


class Lender:
    """Any thread."""

    def __init__(self, stock: Stock, life: StoreLife, memory: Callable[[], PeerMemory | None]) -> None:
        """`memory`, as it is now; None: there is nothing to lend, for want of a host tier or of checksums."""
        self._stock, self._life, self._memory = stock, life, memory
        self._told: dict[StoreLife, PeerMemory] = {}  # what a borrower was told last
        self._lent: dict[LeaseId, tuple[int, float]] = {}  # slots, and the end of its time; under the stock's lock
        self.lent_blocks = 0
        """Slots, since the start."""

    def lend(self, lend: Lend) -> Lent:
        """The longest prefix in the host tier, if that is more than the borrower has. As fast as a look-up."""
        memory, stock, now = self._memory(), self._stock, time.monotonic()
        if memory is None or len(lend.hashes) % HASH_NBYTES:
            return Lent(self._life)
        duration = min(lend.duration_s, LONGEST_S)
        with stock.lock:
            self._lent = {lease: kept for lease, kept in self._lent.items() if kept[1] > now}
            most = int(memory.slots * MOST) - sum(slots for slots, _ in self._lent.values())
            lease = stock.book.lend(
                EngineId(f"peer {lend.borrower}"),
                RequestId(str(lend.number)),
                lend.fingerprints,
                lend.windows,
                lend.hashes,
                lend.first,
                most,
                now + duration,
            )
            if lease is not None:
                self._lent[lease.id] = (lease.num_pins, now + duration)
                self.lent_blocks += lease.num_pins
        if lease is None:
            return Lent(self._life)
        sealed = self._sealed(lend, lease)
        memory = self._memory()  # once more: the tier may have grown, or gone, since
        if sealed is None or memory is None:
            self._end([lease.id])
            return Lent(self._life)
        return Lent(
            self._life,
            lease.num_blocks,
            stock.lease_out(lease.id),
            duration,
            slots=_slots(lease),
            seals=array("Q", sealed[0]).tobytes(),
            memory=self._news(lend, memory),
            sizes=array("I", sealed[1]).tobytes() if lend.sizes else b"",
        )

    def _news(self, lend: Lend, memory: PeerMemory) -> PeerMemory | None:
        """What the borrower does not know yet. Where an answer is lost his next read fails, and he knows nothing."""
        if lend.knows == self._life and self._told.get(lend.borrower) is memory:
            return None
        if len(self._told) >= MOST_TOLD:
            self._told.clear()
        self._told[lend.borrower] = memory
        return memory

    def _sealed(self, lend: Lend, lease: Lease) -> tuple[list[int], list[int]] | None:
        """Seals and sizes, as the slots' own headers have it; None if one of them is damaged. The slots are pinned."""
        tiers, seals, sizes = self._stock.tiers, [], []
        for fingerprint, rows in zip(lend.fingerprints, lease.rows, strict=True):
            for group, row in enumerate(rows):
                head = block_key(fingerprint, group, b"")
                for i, place in enumerate(row.places(), row.first):
                    header = tiers.header(place)
                    if header is None or header.checksum is None:
                        return None
                    if header.key != head + lend.hashes[HASH_NBYTES * i : HASH_NBYTES * (i + 1)]:
                        logger.error("a slot's header names another block than the book: it is not lent")
                        return None
                    seals.append(seal(header.key, header.nbytes, header.checksum))
                    sizes.append(header.nbytes)
        return seals, sizes

    def give_back(self, leases: Iterable[LeaseId]) -> None:
        """A borrower needs these no more. Unknown ones, and any that are no peer's, are passed over."""
        self._end([self._stock.lease_in(lease) for lease in leases])

    def _end(self, leases: list[LeaseId]) -> None:
        with self._stock.lock:
            for lease in leases:
                if self._lent.pop(lease, None) is not None:
                    self._stock.book.release(lease)

    @property
    def pinned(self) -> int:
        """Slots that are lent now."""
        now = time.monotonic()
        with self._stock.lock:
            return sum(slots for slots, until in self._lent.values() if until > now)


def _slots(lease: Lease) -> bytes:
    """The slots of its blocks, in the order of the seals."""
    slots = array("I")
    for run in lease.runs():
        slots.extend(range(run.slot, run.slot + run.length))
    return slots.tobytes()
