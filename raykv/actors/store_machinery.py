"""What works in a store once its pools are open: who saves, loads, moves, drains, lends and publishes.

Made by the first engine's `attach`, which knows the size of a slot, or at the start from what an earlier life left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from raykv.actors.event_feed import EventFeed, models_of
from raykv.actors.peer_finder import PeerDoor
from raykv.actors.peer_order import FromPeers
from raykv.actors.peer_tier import PeerTier
from raykv.actors.publisher import Publisher
from raykv.actors.store_admin import StoreAdmin
from raykv.actors.store_drain import Drainer
from raykv.actors.store_loads import Loader
from raykv.actors.store_look_ups import StoreLookUps
from raykv.actors.store_mover import Mover
from raykv.actors.store_reads import Prefetch, Verify
from raykv.actors.store_saves import Saver
from raykv.actors.store_sessions import Sessions
from raykv.actors.store_shared import SharedLookUps
from raykv.actors.store_stock import Stock
from raykv.actors.store_tiers import Tiers
from raykv.actors.store_why import known_heads
from raykv.actors.tier_operations import KINDS as TIER_KINDS
from raykv.actors.tier_operations import TierOperations
from raykv.admin_messages import OperationKind
from raykv.peer_messages import Adopt, Adopted
from raykv.store_messages import StoreSpec
from raykv.types import StoreLife


class Machinery:
    """One per life of a store. Any thread, but `close`, which ends all threads of it, once."""

    def __init__(
        self,
        spec: StoreSpec,
        slot_nbytes: int,
        host: Path,
        life: StoreLife,
        sessions: Sessions,
        admin: StoreAdmin,
        look_ups: StoreLookUps,
        *,
        door: PeerDoor | None,
        backlog_nbytes: int,
        end_dead: Callable[[], None],
    ) -> None:
        """Open the pools and start the threads. Blocks for as long as pools are made (seconds for many GiB).

        `host`: the host tier's file. `backlog_nbytes`: what saves may have under way. `end_dead` is called about once
        a second. Raises StorageError or TransportError; then nothing is left open.
        """
        begun = time.monotonic()
        self._life, self._sessions, self._admin, self._look_ups = life, sessions, admin, look_ups
        self._adopting = threading.Lock()
        self._closed = False
        self.stock = stock = Stock(Tiers.open(spec, slot_nbytes, host))
        self.mover = Mover(stock, sessions, end_dead)
        try:
            self.peers = self._open_peers(door)
        except BaseException:
            stock.close(remove_host=False)
            raise
        self.saver = Saver(stock, backlog_nbytes)
        self.loader = Loader(stock, self.peers.loader if self.peers is not None else None)
        self.drainer = self._make_drainer(door)
        admin.opened(stock)
        self.tiers_changed()
        changes = TierOperations(stock, self.mover, host, self.peers, self.tiers_changed)
        for kind in TIER_KINDS:
            admin.operations_of.add(kind, changes)
        look_ups.opened(stock, self.peers, self.mover.wake)
        self.opened_s = time.monotonic() - begun
        """How long all this took."""
        self.mover.start()
        self._publishers = self._publish(door) if door is not None else []

    def _open_peers(self, door: PeerDoor | None) -> PeerTier | None:
        if not self.stock.spec.peer or door is None:
            return None
        peers = PeerTier(self.stock, self._sessions, self._life, door, self.mover.wake)
        peers.start()
        return peers

    def _make_drainer(self, door: PeerDoor | None) -> Drainer:
        peers = self.peers
        memory = (lambda: peers.memory) if peers is not None else (lambda: None)
        name, find_peer = (door.store, door.open_peer) if door is not None else ("", None)
        return Drainer(self.stock, self._life, name or self.stock.spec.name, memory, find_peer)

    def _publish(self, door: PeerDoor) -> list[Publisher]:
        """To the Directory and to the event stream, if there may be one."""
        book, lock, made = self.stock.book, self.stock.lock, list[Publisher]()
        if door.find_directory is not None:
            made.append(Publisher(book.content, lock, door.find_directory, door.node, door.store, self._life))
        if door.find_events is not None:
            media, models = book.content.media, partial(models_of, self._sessions)
            made.append(EventFeed(media, lock, door.find_events, door.node, door.store, self._life, models))
        for publisher in made:
            publisher.start()
        return made

    def tiers_changed(self) -> None:
        """A tier has come or gone: who asks a shared one must know."""
        before, self._look_ups.shared = self._look_ups.shared, None
        if before is not None:
            before.end()
        self._look_ups.shared = shared = SharedLookUps.of(self.stock)
        self._let_operators_order(shared)

    def _let_operators_order(self, shared: SharedLookUps | None) -> None:
        """What takes long in this store, and depends on its tiers."""
        add, models, stock = self._admin.operations_of.add, self._admin.models, self.stock
        add(OperationKind.VERIFY, Verify(stock))
        far = FromPeers(self.peers.prefetcher if self.peers is not None else None, models.attached_windows)
        add(
            OperationKind.PREFETCH,
            Prefetch(stock, shared, lambda: known_heads(stock, models.known), models.windows, far),
        )

    def adopt(self, adopt: Adopt) -> Adopted:
        """Keep blocks of a store that is drained. Blocks for about as long as they take to be read; one at a time."""
        with self._adopting:
            if self._closed or self.peers is None:
                return Adopted(self._life, refused="it has ended", full=True)
            adopted = self.peers.adopter.adopt(adopt)
        self.mover.wake()
        return adopted

    def close(self, remove_host: bool) -> None:
        """End all copies and threads and let go of all memory and files. No job runs any more, and none begins.

        `remove_host` gives the host tier's memory back.
        """
        self._closed = True
        for publisher in self._publishers:
            publisher.close()
        self.drainer.close()
        self._admin.close()  # what it has under way needs the mover
        self.mover.close()
        with self._adopting:
            pass  # it ends in time, and none begins any more
        if self.peers is not None:
            self.peers.close()
        self._look_ups.closed()
        self.stock.close(remove_host)
