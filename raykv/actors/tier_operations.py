"""Carries out an operator's changes of a running store's tiers: add, resize, drain, remove.

The book decides (`core.tier_changes`), the store's mover copies, engines save, load and look up all the while. Changes
take turns. What is wrong with one is said before anything is changed; where a medium fails half-way, the error says so
and the store serves on.

How it is wired: `store_machinery` makes one `TierOperations` and adds it to the store's `Operations` for each kind in
`KINDS`; those have ended before the mover and the peer tier are closed. `changed` is called when a tier
has come or gone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from raykv.actors.peer_tier import PeerTier
from raykv.actors.store_mover import MOVES_AT_ONCE, Mover
from raykv.actors.store_operations import Progress
from raykv.actors.store_pools import open_pool
from raykv.actors.store_stock import Stock
from raykv.actors.tier_requests import check, slots_for
from raykv.actors.tier_state import TierState
from raykv.admin_messages import Operation, OperationKind
from raykv.core.eviction import make_policy
from raykv.core.slot_table import SlotTable
from raykv.core.tier_changes import position_of
from raykv.core.tier_stages import Stage
from raykv.errors import StoreError
from raykv.storage.fs_pool import FsPool
from raykv.storage.host_pool import HostPool
from raykv.store_messages import Medium, TierSpec

logger = logging.getLogger("raykv")

KINDS = frozenset(
    {OperationKind.ADD_TIER, OperationKind.RESIZE_TIER, OperationKind.DRAIN_TIER, OperationKind.REMOVE_TIER}
)
PAUSE_S = 0.05
"""Between two looks at what is still read or written where a tier is to be empty."""
RECOVER = 2048
"""So many blocks of a tier that comes are made known in one hold of the lock: a few milliseconds."""


def _go_on(progress: Progress) -> None:
    if progress.stopped:
        raise StoreError("The store closes: it ended half-way, and nothing is lost by that.")


class TierOperations:
    """One per open store. A `store_operations.Runner`."""

    def __init__(
        self, stock: Stock, mover: Mover, host: Path, peers: PeerTier | None, changed: Callable[[], None]
    ) -> None:
        """`host`: where the host pool is, or would be."""
        self._stock, self._mover, self._host, self._peers, self._changed = stock, mover, host, peers, changed
        self._turn = threading.Lock()

    def check(self, operation: Operation) -> int:
        """Raises StoreError with the fix if it can't be done now."""
        check(self._stock, self._host, operation)
        return 0

    def run(self, operation: Operation, progress: Progress) -> str:
        """Wait for its turn, and do it."""
        while not self._turn.acquire(timeout=PAUSE_S):
            _go_on(progress)
        try:
            _go_on(progress)
            check(self._stock, self._host, operation)  # the one before may have changed what was right then
            result = self._carry_out(operation, progress)
        finally:
            self._turn.release()
        logger.info("store %s: %s", self._stock.spec.name, result)
        return result

    def _carry_out(self, operation: Operation, progress: Progress) -> str:
        spec = operation.tier
        assert spec is not None
        if operation.kind is OperationKind.ADD_TIER:
            tier = self._tier(spec.medium)
            return self._add(progress, spec) if tier is None else self._reopen(tier)
        tier = self._tier(spec.medium)
        assert tier is not None
        if operation.kind is OperationKind.RESIZE_TIER:
            return self._resize(progress, tier, spec.capacity)
        if operation.kind is OperationKind.DRAIN_TIER:
            return self._drain(progress, tier)
        return self._remove(progress, tier)

    def _tier(self, medium: Medium) -> int | None:
        with self._stock.lock:
            return next((one.tier for one in self._stock.book.figures().tiers if one.medium is medium), None)

    # -- add ------------------------------------------------------------------------------------------------

    def _add(self, progress: Progress, spec: TierSpec) -> str:
        stock, tiers = self._stock, self._stock.tiers
        pool = open_pool(spec, tiers.slot_nbytes, self._host)
        try:
            if isinstance(pool, FsPool) and pool.off:
                raise StoreError(pool.off)
            if self._peers is not None and isinstance(pool, HostPool):
                self._peers.host_came(pool)
            self._note(add=spec)
        except BaseException:
            if self._peers is not None and isinstance(pool, HostPool) and pool.told:
                self._peers.host_left(None, pool.pieces)
            pool.close(remove=isinstance(pool, HostPool))
            raise
        stock.stage_through([spec.medium])
        with stock.lock:
            slots = pool.headers.slots
            table = SlotTable(slots, make_policy(stock.spec.eviction, slots))
            position = position_of(spec.medium, [one.medium for one in tiers.specs])
            tier = stock.book.changes.add(table, spec.medium, position, drained=True)  # shut, until all is known
            tiers.add(tier, spec, pool)
            stock.is_new(tier)
            found, quarantined = tiers.recovered(tier)
            tenants = tiers.tenants(tier)
        progress.total(len(found))
        for at in range(0, len(found), RECOVER):
            part = found[at : at + RECOVER]
            with stock.lock:
                stock.book.recovered(tier, part, (), {slot: tenants[slot] for slot, _ in part if slot in tenants})
            progress.done(len(part))
        with stock.lock:
            stock.book.recovered(tier, [], quarantined)
        if self._peers is not None and isinstance(pool, HostPool):
            self._peers.host_is(tier)
        self._open_again(tier)
        self._changed()
        return f"The {spec.medium} tier was added with {slots:,} slots, {len(found):,} of them with blocks from before."

    def _open_again(self, tier: int) -> None:
        """It takes blocks, of the tiers above too."""
        stock, changes = self._stock, self._stock.book.changes
        with stock.lock:
            stock.tiers.clear(changes.reopen(tier))
            order = stock.book.order
        for above in order[: order.index(tier)]:
            at: int | None = 0
            while at is not None:
                with stock.lock:
                    at = changes.queue_again(above, at, RECOVER)
        self._mover.wake()

    def _reopen(self, tier: int) -> str:
        medium = self._stock.tiers.medium(tier)
        self._note(open_again=medium)
        self._open_again(tier)
        return f"The {medium} tier, which was drained, takes blocks again."

    # -- resize ---------------------------------------------------------------------------------------------

    def _resize(self, progress: Progress, tier: int, capacity: int) -> str:
        stock, tiers, changes = self._stock, self._stock.tiers, self._stock.book.changes
        pool, medium = tiers.pool(tier), tiers.medium(tier)
        before = pool.headers.slots
        if isinstance(pool, FsPool):
            slots = pool.resize(capacity)
            with stock.lock:
                if slots > before:
                    changes.grow(tier, slots)
                tiers.resized(tier, capacity)
            self._note()
            return f"The {medium} tier keeps to {capacity:,} bytes now."
        slots, lost = slots_for(capacity, tiers.slot_nbytes), 0
        if slots > before:
            added = pool.plan(slots)[0] if isinstance(pool, HostPool) else []
            pool.resize(slots)
            try:
                if self._peers is not None and isinstance(pool, HostPool):
                    self._peers.host_grew(tier, added)
            except BaseException:
                pool.resize(before)  # what is new holds nothing, and nobody was told of it
                raise
            with stock.lock:
                changes.grow(tier, slots)
        elif slots < before:
            with stock.lock:
                total = changes.shrink(tier, slots)
            progress.total(total)
            _, lost = self._empty(progress, tier, lambda idle: changes.is_empty(tier))
            with stock.lock:
                changes.settle(tier)  # the pool clears the headers of what goes
            dropped = pool.plan(slots)[1] if isinstance(pool, HostPool) else []
            if self._peers is not None and isinstance(pool, HostPool):
                self._peers.host_left(tier, dropped)
            pool.resize(slots)
            if self._peers is not None and isinstance(pool, HostPool):
                self._peers.host_is(tier)
        with stock.lock:
            tiers.resized(tier, capacity)
        self._note()
        gone = f" {lost:,} blocks found no room and are gone." if lost else ""
        return f"The {medium} tier has {slots:,} slots now, {before:,} before.{gone}"

    # -- drain and remove -----------------------------------------------------------------------------------

    def _drain(self, progress: Progress, tier: int) -> str:
        medium = self._stock.tiers.medium(tier)
        moved, left = self._drained(progress, tier)
        if medium is Medium.FS:
            return "The fs tier takes nothing new; its files stay, and are read."
        stay = f" {left:,} find no room elsewhere: they stay there and are read." if left else ""
        return f"The {medium} tier is drained: {moved:,} blocks lie elsewhere.{stay}"

    def _drained(self, progress: Progress, tier: int) -> tuple[int, int]:
        """How many blocks lie elsewhere now, and how many do not."""
        stock, changes = self._stock, self._stock.book.changes
        self._note(drain=stock.tiers.medium(tier))
        with stock.lock:
            total = changes.drain(tier)
        progress.total(total)
        moved, _ = self._empty(progress, tier, lambda idle: idle and changes.rests(tier))
        with stock.lock:
            left = next(one.used for one in stock.book.figures().tiers if one.tier == tier)
            stock.tiers.clear(changes.settle(tier))
        return moved, left

    def _remove(self, progress: Progress, tier: int) -> str:
        stock, tiers, changes = self._stock, self._stock.tiers, self._stock.book.changes
        spec = tiers.spec_of(tier)
        moved, _ = self._drained(progress, tier)
        self._note(remove=spec)  # what can fail comes first
        with stock.lock:
            changes.leave(tier)
        _, lost = self._empty(progress, tier, lambda idle: changes.is_empty(tier))
        with stock.lock:
            changes.remove(tier)
            pool = tiers.remove(tier)
        self._changed()
        if isinstance(pool, HostPool) and self._peers is not None:
            self._peers.host_left(None, pool.pieces)
        pool.close(remove=spec.medium is not Medium.FS)
        self._note()
        if spec.medium is Medium.FS:
            return "The fs tier was removed; its files stay for the other nodes."
        gone = f", {lost:,} found no room and are gone" if lost else ""
        return f"The {spec.medium} tier was removed: {moved:,} blocks lie elsewhere{gone}."

    def _empty(self, progress: Progress, tier: int, over: Callable[[bool], bool]) -> tuple[int, int]:
        """Empty what is shut of a tier, until `over` (under the lock; told whether a whole round found nothing to do).
        How many blocks lie elsewhere, and how many are lost."""
        stock, changes = self._stock, self._stock.book.changes
        moved = lost = worked = 0
        while True:
            _go_on(progress)
            with stock.lock:
                step = changes.next_moves(tier, MOVES_AT_ONCE)
                stock.tiers.clear(step.clear)
            good = sum(self._mover.carry_out(step.moves))
            moved, lost, worked = moved + step.done + good, lost + step.lost, worked + step.done + step.lost + good
            if step.done + step.lost + good:
                progress.done(step.done + step.lost + good)
            if not step.round_over:
                continue
            with stock.lock:
                if over(not worked):
                    return moved, lost
            if not worked:
                time.sleep(PAUSE_S)
            worked = 0

    # -- what the next life is told -------------------------------------------------------------------------

    def _note(
        self,
        add: TierSpec | None = None,
        remove: TierSpec | None = None,
        drain: Medium | None = None,
        open_again: Medium | None = None,
    ) -> None:
        """Write down the tiers as they are, and with this change. Raises StorageError."""
        stock = self._stock
        with stock.lock:
            figures, changes = stock.book.figures().tiers, stock.book.changes
            drained = {one.medium for one in figures if changes.stage(one.tier) in (Stage.DRAINING, Stage.DRAINED)}
        specs = [spec for spec in stock.tiers.specs if remove is None or spec.medium is not remove.medium]
        if add is not None:
            specs = sorted([*specs, add], key=lambda spec: list(Medium).index(spec.medium))
        drained |= {drain} if drain is not None else set()
        drained -= {open_again, remove.medium if remove is not None else None}
        trash = (remove.path,) if remove is not None and remove.medium is Medium.DISK and remove.path else ()
        stock.tiers.file.write(TierState(tuple(specs), frozenset(drained), trash))
