"""Two operations that read slots on an operator's order: check all of them, and copy some up to the fastest tier.

Each has one thread and reads one slot at a time, by staging rows that engines' loads use too, but never more than one
of them: a load finds at most one more read before it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from raykv.actors.peer_order import FromPeers, can_fetch
from raykv.actors.store_operations import Progress
from raykv.actors.store_shared import Prompt, SharedLookUps
from raykv.actors.store_stock import Stock
from raykv.actors.store_tiers import Written
from raykv.admin_messages import Operation
from raykv.core.selections import Chosen, chosen
from raykv.core.store_plans import Move, Place
from raykv.errors import DiskError, StorageError, StoreError
from raykv.store_messages import Medium

logger = logging.getLogger("raykv")

AT_ONCE = 16
"""Slots that are pinned for it in one hold of the lock."""
PATIENCE_S = 5.0
"""How long a copy up waits for room that is being made, before it gives up."""
PAUSE_S = 0.05
FULL = 0.9
"""A copy up ends when so much of the fastest tier holds what it has brought: more would throw out the first ones."""


class Verify:
    """A `Runner`: reads every slot and takes those out of use whose bytes are not what their header says."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock

    def check(self, operation: Operation) -> int:
        what = chosen(operation.selection, self._stock.book.serving_media) if operation.selection is not None else None
        if what is not None and (what.fingerprints or what.hashes is not None or what.tenant is not None):
            raise StoreError("Whole tiers are verified: select by medium only, or nothing.")
        with self._stock.lock:
            figures = self._stock.book.figures().tiers
        return sum(one.used for one in figures if not one.off and (what is None or what.medium in (None, one.medium)))

    def run(self, operation: Operation, progress: Progress) -> str:
        stock = self._stock
        medium = operation.selection.medium if operation.selection is not None else None
        good, bad, gone, unread = 0, 0, 0, 0
        for tier, one in enumerate(stock.book.media):
            first: int | None = 0 if medium in (None, one) else None
            while first is not None and not progress.stopped:
                with stock.lock:
                    found, first = stock.book.reads.begin(tier, first, AT_ONCE)
                for key, place in found:
                    sound = self._read(key, place)
                    good += sound is True
                    unread += sound is None
                    gone += sound is False and one is Medium.FS
                    bad += sound is False and one is not Medium.FS
                    progress.done()
        said = f"{good + bad + gone:,} blocks were read and {bad:,} are out of use, since their bytes were wrong"
        if gone:
            said += f"; {gone:,} files of the shared folder are gone or were bad"
        if unread:
            said += f"; {unread:,} could not be read"
        if not stock.spec.checksum:
            said += "; this store keeps no checksums, so only headers were checked"
        return f"{said}{'; the store closed before the end' if progress.stopped else ''}."

    def _read(self, key: bytes, place: Place) -> bool | None:
        """None: it could not be read now."""
        stock, sound = self._stock, None
        try:
            sound = stock.sound(key, place)
        except StorageError as error:
            logger.warning("can't read slot %s to verify it: %s", place, error)
        finally:
            with stock.lock:
                if stock.book.end_read(place, sound is not False):
                    stock.tiers.quarantine([place])
        return sound


class Prefetch:
    """A `Runner`: copies the selected blocks up to the fastest tier, from slower tiers, from the shared folder and, of
    blocks that are named by hash and fingerprint, from other nodes.

    Nothing is lost for them: they go into free slots, or in the place of blocks that lie in a slower tier too.
    """

    def __init__(
        self,
        stock: Stock,
        shared: SharedLookUps | None,
        heads: Callable[[], list[bytes]],
        windows: Callable[[bytes], list[int]],
        far: FromPeers,
    ) -> None:
        """`heads`: all that the store knows; `windows`: of the KV groups of the model with a fingerprint."""
        self._stock, self._shared, self._heads, self._windows, self._far = stock, shared, heads, windows, far

    def check(self, operation: Operation) -> int:
        what, windows = self._chosen(operation), operation.windows
        if not isinstance(windows, tuple) or not all(type(w) is int and w >= 0 for w in windows) or len(windows) > 255:
            raise StoreError(f"Windows are up to 255 whole numbers of blocks, 0 or more, not {windows!r:.80}.")
        heads = what.heads(self._heads())
        return len(what.hashes) * len(heads) if what.hashes is not None else 0

    def _chosen(self, operation: Operation) -> Chosen:
        """The medium of a selection, or of the order's tier, is where the blocks go."""
        if operation.selection is None:
            raise StoreError("What is to be prefetched is said by a Selection: of a prefix all its hashes.")
        what, stock = chosen(operation.selection, self._stock.book.serving_media), self._stock
        own = [stock.book.media[tier] for tier in stock.book.own_tiers]
        if not own or (len(own) == 1 and stock.tiers.shared() is None and not can_fetch(what, own, self._far)):
            raise StoreError(
                "This store has one tier only: there is nothing slower to prefetch from. From other nodes it needs a "
                "peer tier, and a selection by hashes and fingerprints."
            )
        for medium in (what.medium, operation.tier.medium if operation.tier is not None else None):
            if medium not in (None, own[0]):
                raise StoreError(f"Blocks are prefetched to the fastest tier, {own[0]}, and not to {medium}.")
        return Chosen(what.fingerprints, what.tenant, what.hashes, None)

    def run(self, operation: Operation, progress: Progress) -> str:
        what, stock = self._chosen(operation), self._stock
        if what.hashes is not None and self._shared is not None:
            self._look_in_folder(self._shared, what, progress)
        wanted = self._wanted(what)
        progress.total(len(wanted))
        here = sum(one[1] is None for one in wanted)
        progress.done(here)
        todo = [key for key, place in wanted if place is not None]
        with stock.lock:
            most = int(FULL * stock.book.fastest_slots)
        copied, failed, late = self._lift_all(todo[:most], progress)
        left = max(0, len(todo) - most) + late
        far = ""
        if what.hashes is not None and not left and not progress.stopped:
            far = self._from_others(operation, what, most - copied, wanted, progress)
        said = f"{copied:,} blocks were copied up, {here:,} were there already"
        if failed:
            said += f", {failed:,} could not be read or have gone"
        if left:
            said += f"; {left:,} found no room: a larger tier, or fewer blocks, would take them"
        if far:
            said += f"; {far}"
        if progress.stopped:
            said += "; the store closed before the end"
        return f"{said}."

    def _from_others(
        self,
        operation: Operation,
        what: Chosen,
        most: int,
        here: Sequence[tuple[bytes, Place | None]],
        progress: Progress,
    ) -> str:
        """Fetch what this node has nowhere; what is to be said of that."""
        heads = what.heads(self._heads())
        known = {head[:-1] for head in heads}
        if known and known >= what.fingerprints and len(here) == len(heads) * len(set(what.hashes or ())):
            return ""  # all of it is here
        return self._far.fetch(operation, what, most, len(here), progress)

    def _wanted(self, what: Chosen) -> list[tuple[bytes, Place | None]]:
        """The selected blocks that the store has: where each is best read; None: it lies in the fastest tier."""
        stock, book = self._stock, self._stock.book
        found: dict[bytes, Place | None] = {}
        for part in book.select(what, self._heads()):
            with stock.lock:
                fastest = book.fastest
                for key, _ in part():
                    for _, place in book.lying([key]):
                        found[key] = None if place.tier == fastest else place
        return list(found.items())

    def _look_in_folder(self, shared: SharedLookUps, what: Chosen, progress: Progress) -> None:
        """Let the book know which of the named blocks the shared folder has: as a look-up of the prefix does, until
        that finds no more."""
        assert what.hashes is not None
        hashes = b"".join(what.hashes)
        for fingerprint in dict.fromkeys(head[:-1] for head in what.heads(self._heads())):
            windows = self._windows(fingerprint)
            before, known = -1, 0
            while known != before and known < len(what.hashes) and not progress.stopped:
                before = known
                shared.find([Prompt([fingerprint], windows, hashes)])
                keys = [fingerprint + bytes(1) + one for one in what.hashes]
                with self._stock.lock:
                    known = sum(self._stock.book.find(key) is not None for key in keys)

    def _lift_all(self, keys: Sequence[bytes], progress: Progress) -> tuple[int, int, int]:
        """How many were copied, could not be read or have gone, and found no room in time."""
        stock, copied, failed = self._stock, 0, 0
        todo, patience = deque(keys), time.monotonic() + PATIENCE_S
        while todo and not progress.stopped:
            some = [todo.popleft() for _ in range(min(AT_ONCE, len(todo)))]
            with stock.lock:
                still, fastest = dict(stock.book.lying(some)), stock.book.fastest
                slower = {key: place for key, place in still.items() if place.tier != fastest}
                plan = stock.book.reads.begin_lifts(list(slower.values()))
                stock.tiers.clear(plan.clear)
            for move in plan.moves:
                ok = self._lift(move)
                copied, failed = copied + ok, failed + (not ok)
            begun = {move.key for move in plan.moves}
            waiting = [key for key in slower if key not in begun]
            failed += len(some) - len(still)
            progress.done(len(some) - len(waiting))
            todo.extendleft(reversed(waiting))
            if begun:
                patience = time.monotonic() + PATIENCE_S
            elif waiting and time.monotonic() > patience:
                break
            elif waiting:  # a cascade may be making room
                time.sleep(PAUSE_S)
        return copied, failed, len(todo)

    def _lift(self, move: Move) -> bool:
        """Copy one up, checked."""
        stock, tiers = self._stock, self._stock.tiers
        ok = bad = False
        staged: int | None = None
        at_work = move.source.tier
        try:
            header = tiers.header(move.source)
            if header is None or header.key != move.key:
                bad = True
            else:
                staged = stock.staging.take()
                assert staged is not None
                row = stock.staging.rows[staged]
                bad = not tiers.read(move.source, header, row)
                if not bad:
                    at_work = move.target.tier
                    tiers.write(move.target, row, Written(header.nbytes, header.checksum))
                    ok = True
        except DiskError as error:
            if error.fatal:
                stock.switch_off(at_work, error)
            else:
                logger.warning("a copy up to the fastest tier: %s", error)
        finally:
            if staged is not None:
                stock.staging.give([staged])
            with stock.lock:
                published = stock.book.end_lift(move, ok, bad)
                stock.tiers.publish(published)
                if bad:
                    stock.tiers.quarantine([move.source])
        return bool(published)
