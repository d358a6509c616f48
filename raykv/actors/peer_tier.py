"""The peer tier of a store: its agent, what it lends, what it borrows. Made with the store's pools, closed before them.

One thread: it gives leases back whose requests are gone, and rows that late transfers have left.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from raykv.actors.peer_finder import PeerDoor
from raykv.actors.peer_lender import Lender
from raykv.actors.peer_loads import PeerLoader
from raykv.actors.peer_reach import Peers, Reacher
from raykv.actors.store_adopt import Adopter
from raykv.actors.store_sessions import Sessions
from raykv.actors.store_stock import Staging, Stock
from raykv.peer_messages import PeerMemory
from raykv.storage.nixl_transport import NixlTransport
from raykv.store_messages import PeerStatus
from raykv.types import LeaseId, StoreLife

logger = logging.getLogger("raykv")

LOOK_S = 1.0
REAP_S = 0.05


class PeerTier:
    """`lender`, `reacher`, `loader` and `adopter` may be called from any thread until `close`. `memory`: what others
    may read here; None: nothing."""

    def __init__(self, stock: Stock, sessions: Sessions, life: StoreLife, door: PeerDoor) -> None:
        """Raises TransportError with the fix; then nothing is left open."""
        self._stock = stock
        rows, staging = stock.tiers.rows(0), Staging(stock.tiers.slot_nbytes)
        regions = [staging.rows] if rows is None else [rows, staging.rows]
        self._transport = NixlTransport(f"raykv-{life}", regions, door.loopback)
        self.memory = memory = None
        if rows is not None and stock.spec.checksum:  # what can't be checked by who reads it is not lent
            self.memory = memory = PeerMemory(rows.data_ptr(), rows.shape[0], rows.shape[1], self._transport.metadata)
        self._finder = door.make_finder()
        self._peers = Peers(door, self._transport)
        self.lender = Lender(stock, life, memory)
        self.reacher = Reacher(stock, sessions, life, door, self._finder, self._peers)
        self.loader = PeerLoader(stock, staging, self._transport, self._peers)
        self.adopter = Adopter(stock, life, self._transport, self._peers)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raykv-peer-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def released(self, leases: Sequence[LeaseId]) -> None:
        """The book's leases that are over: what they have at peers goes back. About 0.2 ms for each peer."""
        with self._stock.lock:
            parts = self._stock.parts.take(leases)
        self._peers.give_all_back(parts)

    def status(self) -> PeerStatus:
        """Figures of this moment."""
        lender, loader = self.lender, self.loader
        return PeerStatus(lender.lent_blocks, lender.pinned, loader.read_blocks, loader.bad_blocks)

    def close(self) -> None:
        """No load and no reach runs any more. After this nobody reads or writes this store's memory by NIXL."""
        self._stop.set()
        self._thread.join()
        self._finder.close()
        self._transport.close()
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
