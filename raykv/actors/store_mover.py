"""A store's background work: copies between tiers, the end of dead engines and old leases, checks of idle slots.

Two threads: one copies, and sleeps until it is woken; one looks around once a second.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from raykv.actors import store_meter
from raykv.actors.store_sessions import Sessions
from raykv.actors.store_stock import Stock
from raykv.actors.store_tiers import Written
from raykv.core.store_plans import Move
from raykv.errors import DiskError, StorageError
from raykv.store_messages import Medium

logger = logging.getLogger("raykv")

MOVES_AT_ONCE = 16
MOVE_THREADS = 2
"""Half the queue depth of a disk: a load must not wait behind all of them."""
LOOK_AROUND_S = 1.0
"""A dead engine's leases and mapping are gone within twice this time."""
SCRUB_PAUSE_S = 5.0
IDLE_S = 2.0
CHECK_AFTER_S = 300.0
CHECK_SLOTS = 200_000
"""The book's own check holds its lock, a microsecond or two a slot: larger books are checked when asked only."""


class Mover:
    """Started by `start`, ended by `close`. `wake` is called whenever something may be there to move."""

    def __init__(self, stock: Stock, sessions: Sessions, end_engines: Callable[[], None]) -> None:
        self._stock, self._sessions, self._end_engines = stock, sessions, end_engines
        self._woken, self._stop = threading.Event(), threading.Event()
        self._used_at = time.monotonic()
        self._checked_at, self._scrubbed_at = 0.0, 0.0
        self._threads = [
            threading.Thread(target=self._move_all, name="raykv-mover", daemon=True),
            threading.Thread(target=self._look_around, name="raykv-store-watch", daemon=True),
        ]
        self._pool = ThreadPoolExecutor(MOVE_THREADS, thread_name_prefix="raykv-move")

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        self._used_at = time.monotonic()
        self._woken.set()

    def close(self) -> None:
        """Returns when no move runs any more."""
        self._stop.set()
        self._woken.set()
        for thread in self._threads:
            thread.join()
        self._pool.shutdown(wait=True)

    # -- moves ----------------------------------------------------------------------------------------------

    def _move_all(self) -> None:
        while not self._stop.is_set():
            self._woken.wait()
            self._woken.clear()
            try:
                while not self._stop.is_set() and self.move_some():
                    pass
            except Exception:
                logger.exception("moving blocks of store %s", self._stock.spec.name)
                self._stop.wait(LOOK_AROUND_S)

    def move_some(self) -> int:
        """Carry out what the book wants moved next; how many moves that were."""
        stock = self._stock
        with stock.lock:
            plan = stock.book.next_demotions(MOVES_AT_ONCE)
            stock.tiers.clear(plan.clear)
        self.carry_out(plan.moves)
        return len(plan.moves)

    def carry_out(self, moves: Sequence[Move]) -> list[bool]:
        """Copy, and tell the book of each; whether it is in its new place. Blocks; any thread, until `close`."""
        return list(self._pool.map(self._move, moves))

    def _move(self, move: Move) -> bool:
        ok, bad = False, False
        staged: int | None = None
        tiers, at_work = self._stock.tiers, move.source.tier
        try:
            header, rows = tiers.header(move.source), tiers.rows(move.source.tier)
            if header is None or header.key != move.key:
                bad = True
            else:
                if rows is not None:
                    row = rows[move.source.slot]
                    bad = not tiers.good(header, row)
                else:
                    staged = self._stock.staging.take()
                    assert staged is not None
                    row = self._stock.staging.rows[staged]
                    bad = not tiers.read(move.source, header, row)
                if not bad:
                    at_work = move.target.tier
                    begun = time.monotonic()
                    tiers.write(move.target, row, Written(header.nbytes, header.checksum), move.key)
                    ok, seconds, medium = True, time.monotonic() - begun, tiers.medium(move.target.tier)
                    self._stock.meter.moved(medium, store_meter.WRITE, store_meter.MOVE, header.nbytes, seconds)
        except DiskError as error:
            if error.fatal:
                self._stock.switch_off(at_work, error)
            else:
                logger.warning("a move, at the %s tier: %s", tiers.medium(at_work), error)
        finally:
            if staged is not None:
                self._stock.staging.give([staged])
            self._stock.end_move(move, ok, bad)
            if not ok:
                self._stock.meter.fault("move failed")
        return ok

    # -- once a second --------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        while not self._stop.wait(LOOK_AROUND_S):
            try:
                self._end_engines()
                now = time.monotonic()
                with self._stock.lock:
                    expired = self._stock.book.expire(now)
                if expired:
                    self._woken.set()
                if now - self._used_at > IDLE_S and now - self._scrubbed_at > SCRUB_PAUSE_S:
                    self._scrubbed_at = now
                    with self._stock.lock:
                        tiers = self._stock.book.order
                    for tier in tiers:
                        self.scrub(tier)
                self._check_when_idle(now)
            except Exception:
                logger.exception("looking after store %s", self._stock.spec.name)

    def scrub(self, tier: int) -> None:
        """Verify the next idle slot of a tier, and quarantine it if it is bad."""
        stock = self._stock
        if not stock.spec.checksum or stock.tiers.medium(tier) is Medium.FS:
            return  # on a shared tier all nodes would read all files, and each read of one is checked anyway
        with stock.lock:
            found = stock.book.begin_check(tier)
        if found is None:
            return
        key, place = found
        ok = True
        try:
            ok = self._stock.sound(key, place)
        except StorageError as error:
            logger.warning("can't read slot %s to check it: %s", place, error)
        finally:
            with stock.lock:
                if stock.book.end_check(place, ok):
                    stock.tiers.quarantine([place])
        if not ok:
            logger.warning("slot %d of the %s tier has rotted: out of use", place.slot, stock.tiers.medium(tier))

    def _check_when_idle(self, now: float) -> None:
        if now - self._used_at < CHECK_AFTER_S or self._checked_at > self._used_at:
            return
        self._checked_at = now
        if sum(self._stock.tiers.num_slots) <= CHECK_SLOTS:
            with self._stock.lock:
                self._stock.book.check_integrity()
