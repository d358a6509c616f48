"""The tiers of a store as one thing: pools that are found or made, their headers, reads and writes by `Place`."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from raykv.actors.store_pools import Pool, open_pool, remove_host_pool
from raykv.actors.tier_state import TierState, TierStateFile
from raykv.admin_messages import NO_TENANT
from raykv.core.store_plans import Place, Published
from raykv.errors import DiskError
from raykv.storage.checksum import matches
from raykv.storage.disk_files import remove_pool
from raykv.storage.disk_pool import DiskPool
from raykv.storage.fs_pool import FsPool
from raykv.storage.headers import PAGE, Header, SlotState, read_geometry
from raykv.storage.host_pool import HostPool
from raykv.store_messages import Medium, StoreSpec, TierSpec

logger = logging.getLogger("raykv")


def round_up(nbytes: int) -> int:
    """To what a slot, and direct I/O, is a multiple of."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class Written:
    """What lies in a slot that is not published yet. `checksum` None: checksums are off."""

    nbytes: int
    checksum: int | None


class Tiers:
    """The open pools of a store, by the number that the book knows each tier by. Any thread; who may touch which slot
    is the book's to decide. `spec` is what was configured; what is now is `specs`."""

    def __init__(
        self, spec: StoreSpec, slot_nbytes: int, pools: Sequence[Pool], file: TierStateFile, state: TierState
    ) -> None:
        self.spec, self.slot_nbytes = spec, slot_nbytes
        self.file, self.drained = file, state.drained
        self._pools: list[Pool | None] = list(pools)
        self._specs = list(state.tiers)  # that of a tier that was removed stays until its number is another's
        self._written: dict[Place, Written] = {}
        self._written_lock = threading.Lock()
        self.tenant_of: Callable[[Place], bytes] = lambda place: NO_TENANT
        """Whose a slot is that is published; the book says it."""

    @classmethod
    def open(cls, spec: StoreSpec, slot_nbytes: int, host: Path) -> Tiers:
        """Find or make all pools, of the tiers as an operator has left them. Raises StorageError; then none is left
        open."""
        pools: list[Pool] = []
        file = TierStateFile(host, spec)
        state = file.read()
        try:
            for tier in state.tiers:
                pools.append(open_pool(tier, slot_nbytes, host))
            if state != TierState(spec.tiers):
                kept = tuple(path for path in state.trash if not remove_pool(path))
                file.write(state := replace(state, trash=kept))
                _say(spec, state)
            if not any(isinstance(pool, HostPool) for pool in pools):
                remove_host_pool(host)
        except BaseException:
            for pool in pools:
                pool.close(remove=False)
            raise
        return cls(spec, slot_nbytes, pools, file, state)

    @staticmethod
    def found_slot_nbytes(spec: StoreSpec, host: Path) -> int:
        """The bytes of a slot in pools of an earlier life, the slowest one's, which has the most to lose; 0: none."""
        for tier in reversed(TierStateFile(host, spec).read().tiers):
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
        """By number; 0 where there is no tier."""
        return tuple(pool.headers.slots if pool is not None else 0 for pool in self._pools)

    @property
    def specs(self) -> tuple[TierSpec, ...]:
        """The tiers as they are, fastest first."""
        there = [spec for spec, pool in zip(self._specs, self._pools, strict=True) if pool is not None]
        return tuple(sorted(there, key=lambda spec: list(Medium).index(spec.medium)))

    def spec_of(self, tier: int) -> TierSpec:
        """What the tier of that number is now; of one that was removed, what it was."""
        return self._specs[tier]

    def pool(self, tier: int) -> Pool:
        """That of a tier that is there, which is so while anything of it is pinned or written."""
        pool = self._pools[tier]
        assert pool is not None
        return pool

    # -- changes, by one caller at a time -------------------------------------------------------------------

    def add(self, tier: int, spec: TierSpec, pool: Pool) -> None:
        """Under the number that the book has given it."""
        if tier == len(self._pools):
            self._pools.append(None)
            self._specs.append(spec)
        self._specs[tier] = spec
        self._pools[tier] = pool

    def remove(self, tier: int) -> Pool:
        """Nothing of it is pinned or written, and the book has no such tier any more."""
        pool = self.pool(tier)
        self._pools[tier] = None
        return pool

    def resized(self, tier: int, capacity: int) -> None:
        """Its pool has changed."""
        self._specs[tier] = replace(self._specs[tier], capacity=capacity)

    def rows(self, tier: int | None) -> torch.Tensor | None:
        """The slots of a tier in memory, [slots, slot_nbytes]; None for one that is read and written, and for none.

        Slots keep their address while the tier is there; after it has grown there are more of them.
        """
        pool = self._pools[tier] if tier is not None else None
        return pool.slots if isinstance(pool, HostPool) else None

    def recovered(self, tier: int) -> tuple[list[tuple[int, bytes]], list[int]]:
        """What an earlier life left there: slots with their keys, and slots that are out of use."""
        pool = self.pool(tier)
        if isinstance(pool, FsPool):  # what is there is found by look-ups
            return [], []
        if not self.spec.checksum:  # nothing would check them
            self.clear([Place(tier, one.slot) for one in pool.recovered])
            return [], pool.headers.quarantined()
        return [(one.slot, one.key) for one in pool.recovered], pool.headers.quarantined()

    def tenants(self, tier: int) -> dict[int, bytes]:
        """Whose the recovered slots are, of those that are somebody's."""
        recovered = self.pool(tier).recovered if self.spec.checksum else ()
        return {one.slot: one.tenant for one in recovered if one.tenant != NO_TENANT}

    @property
    def host(self) -> int | None:
        """The tier in memory."""
        return next((tier for tier, pool in enumerate(self._pools) if isinstance(pool, HostPool)), None)

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
        if not isinstance(pool, FsPool):  # also of a tier that has just gone
            return {}
        return {"evicted": pool.counts["evicted"], "bad_reads": pool.counts["bad"]}

    def close(self, remove_host: bool) -> None:
        """Nothing may touch a slot any more."""
        for pool in self._pools:
            if pool is not None:
                pool.close(remove=remove_host and isinstance(pool, HostPool))
        self.file.close(remove_host)

    # -- headers: in the lock hold of the book's call that asked for it -------------------------------------

    def publish(self, published: Sequence[Published]) -> None:
        """Write the headers of slots that `note` or `note_copy` has told of."""
        for key, place in published:
            with self._written_lock:
                written = self._written.pop(place)
            tenant = self.tenant_of(place)
            self.pool(place.tier).headers.publish(place.slot, key, written.nbytes, written.checksum, tenant)

    def clear(self, places: Sequence[Place]) -> None:
        """The headers of these slots name no block any more. Under the book's lock."""
        for place in places:
            self.pool(place.tier).headers.clear(place.slot)

    def quarantine(self, places: Sequence[Place]) -> None:
        """The headers of these slots say that they are out of use. Under the book's lock."""
        for place in places:
            self.pool(place.tier).headers.quarantine(place.slot)

    # -- any time -------------------------------------------------------------------------------------------

    def note(self, place: Place, written: Written) -> None:
        """These bytes are in a WRITING slot now. (An aborted slot's note is overwritten by its next use.)"""
        with self._written_lock:
            self._written[place] = written

    def header(self, place: Place) -> Header | None:
        """The header of a READY slot, if it is sound."""
        header = self.pool(place.tier).headers.read(place.slot)
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
        pool = self.pool(place.tier)
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
        pool = self.pool(place.tier)
        if isinstance(pool, FsPool):
            pool.write(key, written.nbytes, written.checksum, row)
        elif isinstance(pool, DiskPool):
            pool.write(place.slot, row[: round_up(written.nbytes)])
        else:
            pool.slots[place.slot, : written.nbytes].copy_(row[: written.nbytes])
        self.note(place, written)

    def medium(self, tier: int) -> Medium:
        return self._specs[tier].medium


def _say(spec: StoreSpec, state: TierState) -> None:
    tiers = ", ".join(f"{tier.medium} {tier.capacity:,} bytes" for tier in state.tiers)
    drained = f" (drained: {', '.join(state.drained)})" if state.drained else ""
    logger.info("store %s has its tiers as an operator left them: %s%s", spec.name, tiers, drained)
