"""What EngineCore asks of a store, and what it settles: `NodeStore`'s methods of the groups "look_up" and "settle".

One thread each, so look-ups stay fast while copies run; the lock is held for one look-up or one job at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from raykv.actors.peer_tier import PeerTier
from raykv.actors.store_metrics import LookUpMeter
from raykv.actors.store_sessions import Sessions
from raykv.actors.store_shared import Prompt, SharedLookUps
from raykv.actors.store_stock import Stock
from raykv.store_messages import HASH_NBYTES, LookedUp, LookUp, Settle
from raykv.types import EngineId, StoreLife


def _nobody() -> None:
    """There is nothing to move."""


class StoreLookUps:
    """One per store, also before its pools are open: then nothing is found. `opened` and `closed` once each."""

    def __init__(self, sessions: Sessions, life: StoreLife) -> None:
        self._sessions, self._life = sessions, life
        self.meter = LookUpMeter()
        self.shared: SharedLookUps | None = None
        """Asks a shared tier first; None: there is none. Its owner replaces it when tiers come and go."""
        self._stock: Stock | None = None
        self._peers: PeerTier | None = None
        self._wake: Callable[[], None] = _nobody

    def opened(self, stock: Stock, peers: PeerTier | None, wake: Callable[[], None]) -> None:
        """The pools are open and recovered. `wake`: there may be something to move."""
        self._peers, self._wake, self._stock = peers, wake, stock

    def closed(self) -> None:
        """The pools are about to be closed: nothing is found any more."""
        self._stock = None

    def look_ups(self, engine: EngineId, batch: Sequence[LookUp]) -> list[LookedUp]:
        """The longest prefixes held for all ranks of the engine, leased to it. A stranger has no hits.

        With a shared tier it may wait for that a little.
        """
        begun = time.monotonic()
        found, shared = self._sessions.complete(engine), self.shared
        if shared is not None and found is not None:
            _, fingerprints, windows = found
            shared.find([Prompt(fingerprints, windows, look_up.hashes, look_up.tenant) for look_up in batch])
        answers = [self._look_up(engine, look_up) for look_up in batch]
        self.meter.took(time.monotonic() - begun)
        if self._peers is None or not self._peers.reacher.up:
            return answers
        asked = [len(look_up.hashes) // HASH_NBYTES for look_up in batch]
        return [replace(one, more=one.num_blocks < n) for one, n in zip(answers, asked, strict=True)]

    def _look_up(self, engine: EngineId, look_up: LookUp) -> LookedUp:
        stock, miss = self._stock, LookedUp(self._life, look_up.request, 0)
        found = self._sessions.complete(engine)
        if stock is None or found is None:
            return miss
        key, fingerprints, windows = found
        with stock.lock:
            lease = stock.book.look_up(key, look_up.request, fingerprints, windows, look_up.hashes, time.monotonic())
        self.meter.looked_up(fingerprints[0], look_up.hashes, lease.num_blocks if lease is not None else 0)
        if lease is None:
            return miss
        return LookedUp(self._life, look_up.request, lease.num_blocks, stock.lease_out(lease.id), lease.media)

    def settle(self, engine: EngineId, settle: Settle) -> StoreLife:
        """Commits become visible, aborts and releases are carried out. What this life doesn't know is passed over."""
        stock, found = self._stock, self._sessions.find(engine)
        if stock is not None and found is not None:
            for job in settle.commits:
                with stock.lock:  # one job at a time: a look-up must not wait for all of them
                    published = stock.book.commit(found.key, job)
                    stock.tiers.publish(published)
                self.meter.held(published)
            with stock.lock:
                for job in settle.aborts:
                    stock.book.abort(found.key, job)
                for lease in settle.releases:
                    stock.book.release(stock.lease_in(lease))
            if settle.releases and self._peers is not None:
                self._peers.released([stock.lease_in(lease) for lease in settle.releases])
            if settle.commits or settle.releases:
                self._wake()
        return self._life
