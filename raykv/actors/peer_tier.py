"""The peer tier of a store: what it lends, what it borrows. Made with the store's pools, closed before them.

Two agents have the host tier's memory: peers read through the one, whose progress thread pauses; this store reads
through the other, which has none, and goes on where its transfers are polled.

One thread: it gives leases back whose requests are gone, and rows that late transfers have left.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

from raykv.actors.peer_finder import PeerDoor
from raykv.actors.peer_lender import Lender
from raykv.actors.peer_loads import PeerLoader
from raykv.actors.peer_prefetch import PeerPrefetcher
from raykv.actors.peer_reach import Peers, Reacher
from raykv.actors.store_adopt import Adopter
from raykv.actors.store_sessions import Sessions
from raykv.actors.store_stock import Staging, Stock
from raykv.peer_messages import PeerMemory
from raykv.storage.host_pool import HostPool, Piece
from raykv.storage.nixl_transport import NixlTransport, TransportError
from raykv.store_messages import PeerStatus
from raykv.types import LeaseId, StoreLife

logger = logging.getLogger("raykv")

LOOK_S = 1.0
REAP_S = 0.05


def _nobody() -> None:
    pass


class PeerTier:
    """`lender`, `reacher`, `loader`, `adopter` and `prefetcher` may be called from any thread until `close`.
    `memory`: what others may read here; None: nothing."""

    def __init__(
        self, stock: Stock, sessions: Sessions, life: StoreLife, door: PeerDoor, wake: Callable[[], None] = _nobody
    ) -> None:
        """`wake`: there may be blocks to move. Raises TransportError with the fix; then nothing is left open."""
        self._stock = stock
        staging = Staging(stock.tiers.slot_nbytes)
        self.memory: PeerMemory | None = None
        with contextlib.ExitStack() as undo:
            self._lending = NixlTransport(f"raykv-{life}", [], door.loopback)
            undo.callback(self._lending.close)
            self._reading = NixlTransport(f"raykv-{life}-reads", [staging.rows], door.loopback, progress=False)
            undo.callback(self._reading.close)
            if stock.tiers.host is not None:
                pool = stock.tiers.pool(stock.tiers.host)
                assert isinstance(pool, HostPool)
                self.host_came(pool)
                self.host_is(stock.tiers.host)
            undo.pop_all()
        self._finder = door.make_finder()
        self._peers = Peers(door, self._reading)
        self.lender = Lender(stock, life, lambda: self.memory)
        self.reacher = Reacher(stock, sessions, life, door, self._finder, self._peers)
        self.loader = PeerLoader(stock, staging, self._reading, self._peers)
        self.adopter = Adopter(stock, life, self._reading, self._peers)
        self.prefetcher = PeerPrefetcher(
            stock, door, self._finder, self.reacher, self.adopter, self._peers, lambda: sessions.busy, wake
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raykv-peer-watch", daemon=True)

    # -- the host tier changes, by one caller at a time -------------------------------------------------------

    def host_came(self, pool: HostPool) -> None:
        """There is a host tier, soon: its slots may be read into, and lent from `host_is` on. Raises TransportError."""
        self._register(pool.pieces)
        pool.tell()

    def host_grew(self, tier: int, pieces: Sequence[Piece]) -> None:
        """With these pieces; before any of its new slots is used. Raises TransportError."""
        if pieces:
            self._register(pieces)
        self.host_is(tier)

    def host_left(self, tier: int | None, pieces: Sequence[Piece]) -> None:
        """These pieces hold nothing, and nobody reads or writes there any more; `tier` None: there is no host tier."""
        self.host_is(tier)
        if pieces:
            self._reading.unregister(pieces)
            self._lending.unregister(pieces)
            self.host_is(tier)

    def _register(self, pieces: Sequence[Piece]) -> None:
        """With both agents or with none."""
        self._lending.register(pieces)
        try:
            self._reading.register(pieces)
        except TransportError:
            self._lending.unregister(pieces)
            raise

    def host_is(self, tier: int | None) -> None:
        """What may be lent, as it is now."""
        rows = self._stock.tiers.rows(tier)
        if rows is None or not self._stock.spec.checksum:  # what can't be checked by who reads it is not lent
            self.memory = None
        else:
            self.memory = PeerMemory(rows.data_ptr(), rows.shape[0], rows.shape[1], self._lending.metadata)

    def start(self) -> None:
        self._thread.start()

    def released(self, leases: Sequence[LeaseId]) -> None:
        """The book's leases that are over: what they have at peers goes back. About 0.2 ms for each peer."""
        with self._stock.lock:
            parts = self._stock.parts.take(leases)
        self._peers.give_all_back(parts)

    def status(self) -> PeerStatus:
        """Figures of this moment."""
        lender, loader, more = self.lender, self.loader, self.prefetcher
        read, bad = loader.read_blocks + more.read_blocks, loader.bad_blocks + more.bad_blocks
        return PeerStatus(lender.lent_blocks, lender.pinned, read, bad)

    def close(self) -> None:
        """No load and no reach runs any more. After this nobody reads or writes this store's memory by NIXL."""
        self._stop.set()
        self._thread.join()
        self._finder.close()
        self._reading.close()
        self._lending.close()
        self.loader.close()
        self.adopter.reap()

    def _run(self) -> None:
        pause = LOOK_S
        while not self._stop.wait(pause):
            try:
                pause = REAP_S if self.loader.reap() + self.adopter.reap() else LOOK_S
                with self._stock.lock:
                    parts = self._stock.parts.take_over(self._stock.book.holds)
                self._peers.give_all_back(parts)
            except Exception:
                logger.exception("looking after what store %s has borrowed", self._stock.spec.name)
