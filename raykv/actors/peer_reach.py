"""Looks further than this node: what a look-up lacks here is asked of the Directory and leased at another store.

It blocks, for its limit at most, in a thread that no other look-up needs. Whatever goes wrong, the local answer
stands; a peer that does not answer is left alone for a while.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from raykv.actors.peer_finder import PeerDoor, PeerFinder
from raykv.actors.store_call import StoreCaller, reason
from raykv.actors.store_sessions import Sessions
from raykv.actors.store_stock import Stock
from raykv.core.backoff import Backoff
from raykv.core.peer_part import PeerPart
from raykv.directory_messages import Holder, Locate
from raykv.errors import HostError, HostTimeout, RayKVError
from raykv.peer_messages import Lend, Lent, PeerMemory
from raykv.storage.nixl_transport import NixlTransport, TransportError
from raykv.store_messages import LookedUp, LookUp, Medium
from raykv.types import NODE_CHARS, EngineId, LeaseId, StoreLife

logger = logging.getLogger("raykv")

LOCATE_SHARE = 0.4
"""Of a look-up's time is the Directory's; the rest is the peer's."""
MOST_FAILING = 1000
"""Names of stores that failed: a hint may name any."""
MOST_PEERS = 2
"""Asked for one look-up, beside the one that is announced: the Directory may be behind, and a third try is seldom worth
a request's time."""


class Peers:
    """The other stores, as this one knows them: how to call them, what of their memory is known, how they behave."""

    def __init__(self, door: PeerDoor, transport: NixlTransport) -> None:
        self._door, self._transport = door, transport
        self._lock = threading.Lock()
        self._callers: dict[str, StoreCaller] = {}
        self._known: dict[str, tuple[StoreLife, PeerMemory]] = {}
        self._backoff = Backoff()
        self._failing: dict[str, str] = {}  # why each of them failed last

    def may(self, peer: str) -> bool:
        """Whether it is to be asked: not for a while after it failed."""
        with self._lock:
            return self._backoff.may(peer, time.monotonic())

    def failed(self, peer: str, why: str) -> None:
        """It did not answer, could not be read, or lied."""
        with self._lock:
            if len(self._failing) >= MOST_FAILING:
                self._backoff, self._failing = Backoff(), {}
            self._failing[peer] = why
            pause = self._backoff.failed(peer, time.monotonic())
            self._callers.pop(peer, None)
            known = self._known.pop(peer, None)
        if known is not None:
            self._transport.forget(known[0])
        logger.warning("the store %s is not asked for %g s: %s", peer, pause, why)

    def why(self, peer: str) -> str:
        """Why it failed last; empty if it never has."""
        with self._lock:
            return self._failing.get(peer, "")

    def well(self, peer: str) -> None:
        """It was read, and its bytes were right."""
        with self._lock:
            self._backoff.well(peer, time.monotonic())

    def caller(self, peer: str) -> StoreCaller:
        """Raises RayKVError."""
        with self._lock:
            caller = self._callers.get(peer)
        if caller is None:
            caller = self._door.open_peer(peer)
            with self._lock:
                self._callers[peer] = caller
        return caller

    def knows(self, peer: str) -> StoreLife | None:
        """The life of it whose memory can be read."""
        with self._lock:
            known = self._known.get(peer)
        return known[0] if known is not None and self._transport.knows(known[0]) else None

    def memory(self, peer: str, lent: Lent) -> PeerMemory:
        """Of the life that lends, ready to be read. Raises TransportError."""
        with self._lock:
            known = self._known.get(peer)
        if lent.memory is None:
            if known is None or known[0] != lent.store:
                raise TransportError(f"{peer} does not say where its memory is.")
            return known[1]
        if known is not None and known[0] != lent.store:
            self._transport.forget(known[0])
        self._transport.know(lent.store, lent.memory.metadata)
        with self._lock:
            self._known[peer] = (lent.store, lent.memory)
        return lent.memory

    def give_back(self, peer: str, leases: Sequence[LeaseId]) -> None:
        """Tell it, without waiting. One that can't be told finds out when their time is over."""
        with self._lock:
            caller = self._callers.get(peer)
        try:
            if caller is not None:
                caller.submit("give_back", tuple(leases), done=_ignore)
        except RayKVError as error:
            logger.debug("leases at %s end by themselves: %s", peer, error)

    def give_all_back(self, parts: Iterable[PeerPart]) -> None:
        by_peer: dict[str, list[LeaseId]] = {}
        for part in parts:
            by_peer.setdefault(part.peer, []).append(part.lease)
        for peer, leases in by_peer.items():
            self.give_back(peer, leases)


def _ignore(result: Any, error: HostError | None) -> None:
    pass


class Reacher:
    """Any thread."""

    def __init__(
        self, stock: Stock, sessions: Sessions, life: StoreLife, door: PeerDoor, finder: PeerFinder, peers: Peers
    ) -> None:
        self._stock, self._sessions, self._life, self._door = stock, sessions, life, door
        self._finder, self._peers = finder, peers
        self._numbers = itertools.count()

    @property
    def up(self) -> bool:
        return self._finder.up

    def reach(self, engine: EngineId, look_up: LookUp, have: LookedUp, limit_s: float) -> LookedUp:
        """What `have` found here and more of it elsewhere; `have` itself if nobody has more. Blocks for `limit_s`."""
        deadline = time.monotonic() + limit_s
        found = self._sessions.complete(engine)
        if found is None or have.store != self._life:
            return have
        key, fingerprints, windows = found
        wanted = Locate(tuple(fingerprints), tuple(windows), look_up.hashes, self._door.node)
        asked: set[str] = set()
        most = MOST_PEERS + (look_up.hand_over is not None)
        for holder in self._holders(look_up, wanted, deadline):
            if len(asked) >= most or time.monotonic() >= deadline:
                break
            if holder.blocks <= have.num_blocks or holder.store in (self._door.store, *asked):
                continue
            if not self._peers.may(holder.store):
                continue
            asked.add(holder.store)
            part = self.borrow(holder, wanted, have.num_blocks, deadline)
            if part is not None:
                return self._grant(key, have, replace(part, tenant=look_up.tenant), holder.node[:NODE_CHARS])
        return have

    def _holders(self, look_up: LookUp, wanted: Locate, deadline: float) -> Iterator[Holder]:
        """Where it is announced, without anybody being asked; then those that the Directory knows, if that is up."""
        if look_up.hand_over is not None and look_up.hand_over.store:
            store = look_up.hand_over.store
            yield Holder(store.rpartition("-")[2], store, look_up.hand_over.blocks)  # so its actor is named
        left = deadline - time.monotonic()
        if self._finder.up and left > 0:
            yield from self._finder.find(wanted, left * LOCATE_SHARE)

    def borrow(
        self, holder: Holder, wanted: Locate, first: int, deadline: float, *, sizes: bool = False
    ) -> PeerPart | None:
        """Have a peer keep what is lacking; None: it has no more than that, or has failed. Blocks until `deadline`."""
        peers, peer, asked_at = self._peers, holder.store, time.monotonic()
        lend = Lend(
            self._life,
            next(self._numbers),
            wanted.fingerprints,
            wanted.windows,
            wanted.hashes,
            first,
            self._stock.spec.lease_s,
            peers.knows(peer),
            sizes,
        )
        try:
            lent = self._ask(peer, lend, deadline)
        except RayKVError as error:
            peers.failed(peer, reason(error))
            return None
        if lent.lease is None:
            return None
        try:
            memory = peers.memory(peer, lent)
        except TransportError as error:
            peers.give_back(peer, [lent.lease])
            peers.failed(peer, str(error))
            return None
        part = PeerPart.of(
            lent, memory, peer, asked_at + lent.duration_s, first, wanted.windows, wanted.fingerprints, wanted.hashes
        )
        if part is None:
            peers.give_back(peer, [lent.lease])
            peers.failed(peer, "it answered something else than it was asked for")
        return part

    def _ask(self, peer: str, lend: Lend, deadline: float) -> Lent:
        """Raises RayKVError. An answer that is late is given back when it comes."""
        caller, answered, lock = self._peers.caller(peer), threading.Event(), threading.Lock()
        answers: list[tuple[Lent | None, HostError | None]] = []
        given_up = False

        def done(lent: Lent | None, error: HostError | None) -> None:
            with lock:
                answers.append((lent, error))
                late = given_up
            answered.set()
            if late and lent is not None and lent.lease is not None:
                with contextlib.suppress(RayKVError):  # then it ends by itself
                    caller.submit("give_back", (lent.lease,), done=_ignore)

        caller.submit("lend", lend, done=done)
        answered.wait(max(0.0, deadline - time.monotonic()))
        with lock:
            given_up = not answers
        if given_up:
            raise HostTimeout("it did not answer in time")
        lent, error = answers[0]
        if lent is None:
            raise error or HostError("it answered nothing")
        return lent

    def _grant(self, key: EngineId, have: LookedUp, part: PeerPart, node: str) -> LookedUp:
        """Tie it to the lease of what is here."""
        stock, over = self._stock, [part]
        with stock.lock:
            if have.lease is None:
                ranks, groups = len(part.fingerprints), len(part.windows)
                lease = stock.book.lease_nothing(key, have.request, ranks, groups, time.monotonic())
            else:
                lease = stock.lease_in(have.lease)
            if stock.book.holds(lease) and stock.parts.get(lease) is None:
                stock.parts.add(lease, part)
                over = []
        if over:
            self._peers.give_all_back(over)
            return have
        media = have.media + (Medium.PEER,) * (part.num_blocks - have.num_blocks)
        return replace(have, num_blocks=part.num_blocks, lease=stock.lease_out(lease), media=media, peer=node)
