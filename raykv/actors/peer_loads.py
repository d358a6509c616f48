"""Loads blocks from a peer: read into slots or staging rows, checked there, copied on into the KV cache.

A row is the transfer's until NIXL says that the transfer has ended: what is not over in time fails the load at once,
and its rows wait with the orphans. The KV cache is written by this process alone, from rows that are complete.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch

from raykv.actors.late_transfers import LateTransfers
from raykv.actors.peer_reach import Peers
from raykv.actors.store_sessions import Session
from raykv.actors.store_stock import Staging, Stock
from raykv.actors.store_tiers import Written
from raykv.core.peer_part import PeerBlock, PeerPart, seal
from raykv.core.store_plans import Place
from raykv.storage.nixl_transport import NixlTransport, Transfer, TransferState, TransportError

logger = logging.getLogger("raykv")

CHUNK_NBYTES = 4 << 20
"""Of one transfer: what is checked and copied after it is still in the cache then."""
DEPTH = 4
"""Transfers of one load that are under way: over a network one is checked while others arrive."""
READ_THREADS = 1
"""It begins the transfers of all loads. Over shared memory that is the copy itself, under a spinning lock of UCX: a
second one would take a core only to wait, and that core is the one that checks and copies on."""
PATIENCE_S = 2.0
SLOWEST = 64 << 20
"""A load from a peer ends within PATIENCE_S and the time that its bytes take at this rate; else it has failed. That is
less than what a store has for a load before it counts as hung."""
FIRST_SLEEP_S, LAST_SLEEP_S = 20e-6, 500e-6


@dataclass(frozen=True, slots=True)
class Wanted:
    """One block of a load: `index` is its place in the leased prefix."""

    group: int
    index: int
    block_id: int


@dataclass(eq=False)
class PeerLoaded:
    """How it went. `error` is empty exactly when nothing is bad."""

    good: list[Wanted] = field(default_factory=list)
    bad: list[Wanted] = field(default_factory=list)
    error: str = ""


@dataclass(eq=False, slots=True)
class _Target:
    """A block on its way, into `place` of the fastest tier, else into row `staged`: to `address`."""

    wanted: Wanted
    block: PeerBlock
    place: Place | None
    staged: int
    address: int = 0
    checksum: int = 0


@dataclass(eq=False, slots=True)
class _Chunk:
    targets: list[_Target]
    transfer: Future[Transfer]


class PeerLoader:
    """One per store. Any number of threads, each inside a use of the session."""

    def __init__(self, stock: Stock, staging: Staging, transport: NixlTransport, peers: Peers) -> None:
        self._stock, self._staging, self._transport, self._peers = stock, staging, transport, peers
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="raykv-peer-read")
        self._late = LateTransfers(self._ended)
        self.read_blocks = self.bad_blocks = 0

    def load(self, session: Session, row: int, part: PeerPart, wanted: Sequence[Wanted]) -> PeerLoaded:
        """Fill these blocks. Ends in time whatever the peer does; never raises for what the peer did."""
        loaded = PeerLoaded()
        nbytes = sum(session.nbytes[one.group] for one in wanted)
        limit = time.monotonic() + PATIENCE_S + nbytes / SLOWEST
        blocks = part.blocks(row, [(one.group, one.index) for one in wanted])
        todo = deque(zip(wanted, blocks or (), strict=False))
        flying: deque[_Chunk] = deque()
        try:
            if blocks is None:
                loaded.error = "the peer has not lent all of it"
            elif time.monotonic() >= part.until:
                loaded.error = "its lease at the peer is over"
            elif not self._peers.may(part.peer):
                loaded.error = "the peer has just failed"
            while not loaded.error and (todo or flying):
                while todo and len(flying) < DEPTH:
                    chunk = self._begin(session, part, todo, limit, wait=not flying)
                    if chunk is None:
                        break
                    flying.append(chunk)
                if not flying:
                    loaded.error = "no row to read into came free"
                    break
                self._finish(session, flying[0], part, limit, loaded)
                if not loaded.error:
                    flying.popleft()
        except TransportError as error:
            loaded.error = str(error)
            self._peers.failed(part.peer, str(error))
        finally:
            for chunk in flying:
                self._late.let_go(chunk)
            good = {(one.group, one.index) for one in loaded.good}
            loaded.bad = [one for one in wanted if (one.group, one.index) not in good]
            self.read_blocks += len(loaded.good)
        if not loaded.error:
            self._peers.well(part.peer)
        return loaded

    def _begin(
        self, session: Session, part: PeerPart, todo: deque[tuple[Wanted, PeerBlock]], limit: float, wait: bool
    ) -> _Chunk | None:
        """Start to read the next blocks. None: there is no row for even one of them. Raises TransportError."""
        batch: list[tuple[Wanted, PeerBlock]] = []
        nbytes = 0
        while todo and (not batch or nbytes + session.nbytes[todo[0][0].group] <= CHUNK_NBYTES):
            nbytes += session.nbytes[todo[0][0].group]
            batch.append(todo.popleft())
        targets = self._targets(batch, part.tenant, limit, wait)
        todo.extendleft(reversed(batch[len(targets) :]))
        if not targets:
            return None
        kept, staging, nbytes_of = self._rows(targets), self._staging.rows.data_ptr(), session.nbytes
        pool, step = kept.data_ptr() if kept is not None else 0, self._stock.tiers.slot_nbytes
        for one in targets:
            one.address = pool + one.place.slot * step if one.place is not None else staging + one.staged * step
        pairs = [(one.block.address, one.address, nbytes_of[one.wanted.group]) for one in targets]
        # Over shared memory the call that begins a read is the one that copies: not in this thread, which checks.
        return _Chunk(targets, self._readers.submit(self._transport.read, part.store, pairs))

    def _targets(
        self, batch: Sequence[tuple[Wanted, PeerBlock]], tenant: bytes, limit: float, wait: bool
    ) -> list[_Target]:
        """Memory for the first of these blocks, for as many as there is: a slot that keeps it, or a row."""
        stock = self._stock
        places: list[Place | None] = [None] * len(batch)
        with stock.lock:
            if stock.tiers.rows(stock.takes) is not None:
                places, clear = stock.book.begin_fetch([block.key for _, block in batch], tenant)
                stock.tiers.clear(clear)
        targets: list[_Target] = []
        for (wanted, block), place in zip(batch, places, strict=True):
            staged = -1
            if place is None:
                row = self._staging.take(wait and not targets, max(0.0, limit - time.monotonic()))
                if row is None:
                    break
                staged = row
            targets.append(_Target(wanted, block, place, staged))
        unused = [place for place in places[len(targets) :] if place is not None]
        if unused:
            with stock.lock:
                stock.book.end_fetch([], unused)
        return targets

    def _finish(self, session: Session, chunk: _Chunk, part: PeerPart, limit: float, loaded: PeerLoaded) -> None:
        """Wait for it, check it, copy it on. What it leaves undone is let go by the caller."""
        try:
            transfer = chunk.transfer.result(max(0.0, limit - time.monotonic()))
        except TimeoutError:
            loaded.error = f"a read from store {part.peer} did not begin in time"
            self._peers.failed(part.peer, loaded.error)
            return
        pause = FIRST_SLEEP_S
        while transfer.poll() is TransferState.RUNNING and time.monotonic() < limit:
            time.sleep(pause)
            pause = min(LAST_SLEEP_S, 2 * pause)
        if transfer.poll() is not TransferState.DONE:
            loaded.error = f"a read from store {part.peer} failed: {transfer.error or 'it is too slow, or hangs'}"
            self._peers.failed(part.peer, loaded.error)
            return
        bad = self._fill(session, chunk.targets)
        if bad:
            self.bad_blocks += bad
            loaded.error = f"store {part.peer} has other bytes than it said"
            self._peers.failed(part.peer, loaded.error)
            return
        self._keep(session, chunk.targets)
        loaded.good.extend(one.wanted for one in chunk.targets)
        chunk.targets = []

    def _rows(self, targets: Sequence[_Target]) -> torch.Tensor | None:
        """Of the tier in memory that some of these have slots in; None: none has."""
        tier = next((one.place.tier for one in targets if one.place is not None), None)
        return self._stock.tiers.rows(tier)

    def _fill(self, session: Session, targets: Sequence[_Target]) -> int:
        """Check these blocks and copy on those that are what the peer said, a few at a time, while they are in the
        cache. How many are not."""
        rows, bad = self._rows(targets), 0
        batches: dict[tuple[bool, int], list[_Target]] = {}
        for one in targets:
            batches.setdefault((one.place is not None, one.wanted.group), []).append(one)
        for (kept, group), batch in batches.items():
            memory = rows if kept and rows is not None else self._staging.rows
            slots = [one.place.slot if one.place is not None else one.staged for one in batch]
            sound = partial(_sound, batch, session.nbytes[group])
            ids = [one.wanted.block_id for one in batch]
            bad += len(session.mover(group, memory).load(slots, ids, sound=sound))
        return bad

    def _keep(self, session: Session, targets: Sequence[_Target]) -> None:
        """They are checked and copied: those in slots are this store's from now on, the rows are free again."""
        stock, good = self._stock, [one.place for one in targets if one.place is not None]
        for one in targets:
            if one.place is not None:
                stock.tiers.note(one.place, Written(session.nbytes[one.wanted.group], one.checksum))
        if good:
            with stock.lock:
                stock.tiers.publish(stock.book.end_fetch(good))
        self._staging.give([one.staged for one in targets if one.place is None])

    # -- what has failed ------------------------------------------------------------------------------------

    def _ended(self, chunk: _Chunk) -> bool:
        """Whether nothing writes into its rows any more; then they are given back."""
        if not chunk.transfer.cancel():  # else it never begins
            if not chunk.transfer.done():
                return False
            try:
                if chunk.transfer.result().poll() is TransferState.RUNNING:
                    return False
            except TransportError:
                pass  # it never began
        targets, chunk.targets = chunk.targets, []
        self._give_up(targets)
        return True

    def _give_up(self, targets: Sequence[_Target]) -> None:
        bad = [one.place for one in targets if one.place is not None]
        if bad:
            with self._stock.lock:
                self._stock.book.end_fetch([], bad)
        self._staging.give([one.staged for one in targets if one.place is None])

    def close(self) -> None:
        """No load runs any more, and the transport is closed: all transfers have ended."""
        self._readers.shutdown(wait=True)
        self.reap()

    def reap(self) -> int:
        """Give back the rows of late transfers that have ended; how many have not."""
        return self._late.reap()


def _sound(batch: Sequence[_Target], nbytes: int, place: int, found: int) -> bool:
    """Whether the bytes with the checksum `found` are those of the block; keeps the checksum."""
    one = batch[place]
    one.checksum = found
    return seal(one.block.key, nbytes, found) == one.block.seal
