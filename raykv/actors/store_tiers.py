"""The tiers of a store as one thing: pools that are found or made, their headers, reads and writes by `Place`."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from raykv.core.store_plans import Place, Published
from raykv.errors import DiskError, StorageError
from raykv.storage.checksum import matches
from raykv.storage.disk_pool import DiskPool
from raykv.storage.fs_pool import FsPool
from raykv.storage.headers import PAGE, Header, SlotState, read_geometry
from raykv.storage.host_pool import HostPool
from raykv.store_messages import Medium, StoreSpec, TierSpec

logger = logging.getLogger("raykv")

Pool: TypeAlias = HostPool | DiskPool | FsPool

LOCK_WAIT_S = 10.0
"""How long a predecessor may take to die: its lock goes with its process."""


def round_up(nbytes: int) -> int:
    """To what a slot, and direct I/O, is a multiple of."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class Written:
    """What lies in a slot that is not published yet. `checksum` None: checksums are off."""

    nbytes: int
    checksum: int | None


class Tiers:
    """The open pools of a store, fastest first. Any thread; who may touch which slot is the book's to decide."""

    def __init__(self, spec: StoreSpec, slot_nbytes: int, pools: Sequence[Pool]) -> None:
        self.spec, self.slot_nbytes, self._pools = spec, slot_nbytes, tuple(pools)
        self._written: dict[Place, Written] = {}
        self._written_lock = threading.Lock()

    @classmethod
    def open(cls, spec: StoreSpec, slot_nbytes: int, host: Path) -> Tiers:
        """Find or make all pools. Raises StorageError; then none is left open."""
        pools: list[Pool] = []
        try:
            for tier in spec.tiers:
                pools.append(_open_pool(tier, slot_nbytes, host))
        except BaseException:
            for pool in pools:
                pool.close(remove=False)
            raise
        return cls(spec, slot_nbytes, pools)

    @staticmethod
    def found_slot_nbytes(spec: StoreSpec, host: Path) -> int:
        """The bytes of a slot in pools of an earlier life, the slowest one's, which has the most to lose; 0: none."""
        for tier in reversed(spec.tiers):
            if tier.medium is Medium.FS:  # it has files of any length
                continue
            path = host if tier.medium is Medium.HOST else Path(tier.path or "", "raykv.headers")
            with contextlib.suppress(OSError), path.open("rb") as file:
                geometry = read_geometry(file.read(PAGE))
                if geometry is not None:
                    return geometry[1]
        return 0

    @property
    def num_slots(self) -> tuple[int, ...]:
        return tuple(pool.headers.slots for pool in self._pools)

    def rows(self, tier: int) -> torch.Tensor | None:
        """The slots of a tier in memory, [slots, slot_nbytes]; None for one that is read and written."""
        pool = self._pools[tier]
        return pool.slots if isinstance(pool, HostPool) else None

    def recovered(self, tier: int) -> tuple[list[tuple[int, bytes]], list[int]]:
        """What an earlier life left there: slots with their keys, and slots that are out of use."""
        pool = self._pools[tier]
        if isinstance(pool, FsPool):  # what is there is found by look-ups
            return [], []
        if not self.spec.checksum:  # nothing would check them
            self.clear([Place(tier, one.slot) for one in pool.recovered])
            return [], pool.headers.quarantined()
        return [(one.slot, one.key) for one in pool.recovered], pool.headers.quarantined()

    @property
    def off(self) -> list[tuple[int, str]]:
        """Tiers that could not be opened though nothing is wrong with the config, and why."""
        return [(tier, pool.off) for tier, pool in enumerate(self._pools) if isinstance(pool, FsPool) and pool.off]

    def shared(self) -> tuple[int, FsPool] | None:
        """The tier that other nodes' stores have too."""
        return next(((tier, pool) for tier, pool in enumerate(self._pools) if isinstance(pool, FsPool)), None)

    def counts(self, tier: int) -> dict[str, int]:
        """Figures of a TierStatus that the pool knows better than the book."""
        pool = self._pools[tier]
        if not isinstance(pool, FsPool):
            return {}
        return {"evicted": pool.counts["evicted"], "bad_reads": pool.counts["bad"]}

    def close(self, remove_host: bool) -> None:
        """Nothing may touch a slot any more."""
        for pool in self._pools:
            pool.close(remove=remove_host and isinstance(pool, HostPool))

    # -- headers: in the lock hold of the book's call that asked for it -------------------------------------

    def publish(self, published: Sequence[Published]) -> None:
        """Write the headers of slots that `note` or `note_copy` has told of."""
        for key, place in published:
            with self._written_lock:
                written = self._written.pop(place)
            self._pools[place.tier].headers.publish(place.slot, key, written.nbytes, written.checksum)

    def clear(self, places: Sequence[Place]) -> None:
        for place in places:
            self._pools[place.tier].headers.clear(place.slot)

    def quarantine(self, places: Sequence[Place]) -> None:
        for place in places:
            self._pools[place.tier].headers.quarantine(place.slot)

    # -- any time -------------------------------------------------------------------------------------------

    def note(self, place: Place, written: Written) -> None:
        """These bytes are in a WRITING slot now. (An aborted slot's note is overwritten by its next use.)"""
        with self._written_lock:
            self._written[place] = written

    def header(self, place: Place) -> Header | None:
        """The header of a READY slot, if it is sound."""
        header = self._pools[place.tier].headers.read(place.slot)
        if header.state is not SlotState.READY:
            return None
        if header.checksum is None and self.spec.checksum:
            return None
        return header

    def good(self, header: Header, data: torch.Tensor) -> bool:
        """Whether `data` is what the header promises."""
        return not self.spec.checksum or (
            header.checksum is not None and matches(data[: header.nbytes], header.checksum)
        )

    def read(self, place: Place, header: Header, row: torch.Tensor) -> bool:
        """Read a slot into an aligned row and check it there. False: bad bytes. Raises a fatal DiskError."""
        pool = self._pools[place.tier]
        try:
            if isinstance(pool, FsPool):
                return pool.read(header, row)
            if isinstance(pool, DiskPool):
                pool.read(place.slot, header.nbytes, row[: round_up(header.nbytes)])
            else:
                row[: header.nbytes].copy_(pool.slots[place.slot, : header.nbytes])
        except DiskError as error:
            if error.fatal:
                raise
            logger.warning("slot %d of the %s tier: %s", place.slot, self.medium(place.tier), error)
            return False
        return self.good(header, row)

    def write(self, place: Place, row: torch.Tensor, written: Written, key: bytes = b"") -> None:
        """Write the bytes of an aligned row into a WRITING slot. Raises DiskError.

        `key` is what they are written by where a tier is shared, for other nodes to see at once: of what is committed.
        """
        pool = self._pools[place.tier]
        if isinstance(pool, FsPool):
            pool.write(key, written.nbytes, written.checksum, row)
        elif isinstance(pool, DiskPool):
            pool.write(place.slot, row[: round_up(written.nbytes)])
        else:
            pool.slots[place.slot, : written.nbytes].copy_(row[: written.nbytes])
        self.note(place, written)

    def medium(self, tier: int) -> Medium:
        return self.spec.tiers[tier].medium


def _open_pool(tier: TierSpec, slot_nbytes: int, host: Path) -> Pool:
    num_slots = tier.capacity // slot_nbytes
    if num_slots < 1:
        raise StorageError(
            f"The {tier.medium} tier has room for {tier.capacity} bytes, less than one block of {slot_nbytes}: give "
            "it a larger `capacity`."
        )
    if tier.medium is Medium.FS:
        return FsPool.open(tier.path or "", tier.capacity, slot_nbytes)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            if tier.medium is Medium.HOST:
                return HostPool.open(str(host), num_slots, slot_nbytes, pin=torch.cuda.is_available())
            return DiskPool.open(tier.path or "", num_slots, slot_nbytes)
        except StorageError as error:
            if not isinstance(error.__cause__, BlockingIOError) or time.monotonic() >= deadline:
                raise
            time.sleep(0.1)
