"""Fetches what only other nodes' stores have into this one's host tier, on an operator's order.

The theory. What is missing here is asked of the Directory, leased from a holder a piece at a time, and read as the
blocks of a store that is drained are: checked, and into slots for which nothing of this node's is lost. One read is
under way at a time, and before each the copies of engines have their turn. A peer that dies, hangs or lies costs what
it alone had. A block is no use without those before it: what comes first in the prompt is fetched first, for all ranks
and KV groups, and a gap that nobody fills ends it.

Of a model without windows only the missing blocks are asked for, as if they were a prompt: a piece needs nothing of
what is here. A window is one of a certain prefix, so with windows it is the prompt as a whole.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from raykv.actors.peer_finder import PeerDoor, PeerFinder
from raykv.actors.peer_reach import Peers, Reacher
from raykv.actors.store_adopt import Adopter
from raykv.actors.store_operations import Progress
from raykv.actors.store_stock import Stock
from raykv.core.peer_part import PeerPart, lacking
from raykv.core.prefix import block_key
from raykv.directory_messages import Holder, Locate
from raykv.peer_messages import Adopt, Adoption
from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES

LEASED = 512
"""Hashes that are leased at a time: of a model without windows, so many blocks for each rank and KV group."""
READ_NBYTES, READ_BLOCKS = 16 << 20, 256
"""Of one read, the larger of both is the limit: a load that comes meanwhile waits for a few milliseconds."""
LOOKED_UP = 2048
"""Keys in one hold of the lock."""
LOCATE_S, LEND_S = 2.0, 5.0
"""What the Directory and a peer have for an answer."""
GIVE_WAY_S = 0.5
"""So long at most a read waits for copies of engines."""
PATIENCE_S = 5.0
"""How long it waits for room that is being made."""
PAUSE_S = 0.005

Windows = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a model that have these windows."""

    fingerprints: tuple[bytes, ...]
    windows: Windows


@dataclass(frozen=True, slots=True)
class _Offer:
    """One block that a peer has leased to us; `slot` is there."""

    key: bytes
    size: int
    slot: int
    seal: int


@dataclass(eq=False, slots=True)
class FarOrder:
    """One order, as far as it has come. `left`: so many blocks may still come."""

    progress: Progress
    left: int
    came: int = 0
    homeless: set[bytes] = field(default_factory=set)
    failed: dict[str, tuple[str, set[bytes]]] = field(default_factory=dict)
    """By peer: why, and what was missing then."""

    def over(self) -> bool:
        """Whether it is to end now."""
        return self.progress.stopped or bool(self.homeless)


class PeerPrefetcher:
    """One per store with a peer tier. Any thread that may block."""

    def __init__(
        self,
        stock: Stock,
        door: PeerDoor,
        finder: PeerFinder,
        reacher: Reacher,
        adopter: Adopter,
        peers: Peers,
        busy: Callable[[], bool],
        wake: Callable[[], None],
    ) -> None:
        """`busy`: whether a copy of an engine runs. `wake`: blocks have come that may be moved on."""
        self._stock, self._door, self._finder, self._reacher = stock, door, finder, reacher
        self._adopter, self._peers, self._busy, self._wake = adopter, peers, busy, wake
        self.read_blocks = self.bad_blocks = 0

    def why_not(self) -> str:
        """Why other nodes can't be asked now; empty: they can."""
        stock = self._stock
        with stock.lock:
            fits = stock.tiers.host is not None and stock.book.fastest == stock.tiers.host
        if not fits or not stock.spec.checksum:
            return "what they have goes into a host tier with checksums, and this store has none that takes blocks"
        return "" if self._finder.up else "no Directory is found that knows what they have"

    def fetch(self, model: Ranks, hashes: Sequence[bytes], order: FarOrder) -> None:
        """Fetch what these ranks lack of a prompt. Never raises for what a peer does."""
        before = -1
        while before != order.came and not order.over():
            before = order.came
            missing = self.lacks(model, hashes)
            asked = list(hashes) if any(model.windows) else list(dict.fromkeys(hashes[index] for index, _ in missing))
            if not missing:
                return
            for holder in self._finder.find(self._question(model, asked), LOCATE_S):
                if order.over():
                    return
                if holder.store != self._door.store and self._peers.may(holder.store):
                    self._from(holder, model, asked[: holder.blocks], order)

    def lacks(self, model: Ranks, hashes: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """What is not in this store of all that the prefix needs: places in it and keys, the first ones first."""
        wanted = [
            (index, block_key(fingerprint, group, hashes[index]))
            for group, needed in enumerate(lacking(model.windows, 0, len(hashes)))
            for fingerprint in model.fingerprints
            for index in needed
        ]
        missing = self.missing([key for _, key in wanted])
        return sorted((one for one in wanted if one[1] in missing), key=lambda one: one[0])

    def missing(self, keys: Collection[bytes]) -> set[bytes]:
        """Those that lie in no tier of this store."""
        stock, found, asked = self._stock, set[bytes](), list(keys)
        for at in range(0, len(asked), LOOKED_UP):
            with stock.lock:
                found.update(key for key in asked[at : at + LOOKED_UP] if stock.book.find(key) is None)
        return found

    # -- one holder -----------------------------------------------------------------------------------------

    def _question(self, model: Ranks, hashes: Sequence[bytes]) -> Locate:
        return Locate(model.fingerprints, model.windows, b"".join(hashes), self._door.node)

    def _from(self, holder: Holder, model: Ranks, hashes: Sequence[bytes], order: FarOrder) -> None:
        """What the holder has of these, up to the first one that it has not, or until it fails."""
        missing = self.lacks(model, hashes)
        if not missing:
            return
        if any(model.windows):
            needed = (index for index, key in missing if not model.windows[key[FINGERPRINT_NBYTES]])
            first = min(next(needed, len(hashes)), len(hashes) - 1)  # nothing is lent to who says that he has all
            self._piece(holder, model, hashes, first, order)
        else:
            self._by_pieces(holder, model, list(dict.fromkeys(hashes[index] for index, _ in missing)), order)
        if not self._peers.may(holder.store):
            order.failed[holder.store] = (self._peers.why(holder.store), {key for _, key in missing})

    def _by_pieces(self, holder: Holder, model: Ranks, hashes: Sequence[bytes], order: FarOrder) -> None:
        at, size = 0, min(LEASED, len(hashes))
        while size and at < len(hashes) and not order.over():
            piece = hashes[at : at + size]
            blocks = self._piece(holder, model, piece, 0, order)
            if blocks == len(piece):
                at += blocks
            elif blocks or not self._peers.may(holder.store):
                return
            else:  # it lends no more than a share of its tier at a time
                size = len(piece) // 2

    def _piece(self, holder: Holder, model: Ranks, hashes: Sequence[bytes], first: int, order: FarOrder) -> int:
        """How many of these blocks were leased; 0 as well if something was left of what was."""
        question, deadline = self._question(model, hashes), time.monotonic() + LEND_S
        part = self._reacher.borrow(holder, question, first, deadline, sizes=True)
        if part is None:
            return 0
        error = ""
        try:
            whole, error = self._take(part, order)
        finally:
            self._peers.give_back(part.peer, [part.lease])
        if error and self._peers.may(part.peer):  # a read that failed is known already
            self._peers.failed(part.peer, error)
        elif whole:
            self._peers.well(part.peer)
        return part.num_blocks if whole else 0

    def _take(self, part: PeerPart, order: FarOrder) -> tuple[bool, str]:
        """Read what is leased, as far as there is room. Whether all was dealt with, and how the peer has failed."""
        if len(part.sizes) != len(part.slots):
            return False, "it does not say how large its blocks are"
        todo, patience = self._offers(part), time.monotonic() + PATIENCE_S
        while todo:
            self._give_way()
            if order.progress.stopped or time.monotonic() >= part.until:
                return False, ""
            some = _batch(todo[: order.left])
            if not some:
                order.homeless.update(one.key for one in todo)
                return False, ""
            adopted = self._adopter.adopt(_adopt(part, some))
            if len(adopted.blocks) != len(some):
                if not self.why_not():
                    return False, adopted.refused or "what it has makes no sense"
                order.homeless.update(one.key for one in todo)  # the tier has gone meanwhile
                return False, ""
            how = dict(zip(some, map(Adoption, adopted.blocks), strict=True))
            came = sum(one is Adoption.TAKEN for one in how.values())
            bad = sum(one is Adoption.BAD for one in how.values())
            left = [one for one, so in how.items() if so is Adoption.NOT_HERE]
            order.came, order.left, self.read_blocks = order.came + came, order.left - came, self.read_blocks + came
            order.progress.done(len(some) - len(left))
            self.bad_blocks += bad
            if came:
                self._wake()
                patience = time.monotonic() + PATIENCE_S
            if bad or adopted.refused:
                return False, f"{bad} of its blocks had other bytes than it said" if bad else adopted.refused
            todo = todo[len(some) :]
            if left and adopted.full:
                todo = left + todo
                if not adopted.more or time.monotonic() > patience:
                    order.homeless.update(one.key for one in todo)
                    return False, ""
                if not came:
                    time.sleep(PAUSE_S)
        return True, ""

    def _offers(self, part: PeerPart) -> list[_Offer]:
        """What is leased and missing here, the first blocks of the prompt first."""
        keys = [
            (index, block_key(fingerprint, group, part.hashes[index * HASH_NBYTES : (index + 1) * HASH_NBYTES]))
            for fingerprint in part.fingerprints
            for group, needed in enumerate(lacking(part.windows, part.first, part.num_blocks))
            for index in needed
        ]
        missing = self.missing([key for _, key in keys])
        found: dict[bytes, tuple[int, _Offer]] = {}
        for (index, key), *where in zip(keys, part.sizes, part.slots, part.seals, strict=True):
            if key in missing:
                found.setdefault(key, (index, _Offer(key, *where)))
        return [offer for _, offer in sorted(found.values(), key=lambda one: one[0])]

    def _give_way(self) -> None:
        """Let engines' copies go first, but not for ever."""
        until = time.monotonic() + GIVE_WAY_S
        while self._busy() and time.monotonic() < until:
            time.sleep(PAUSE_S)


def _batch(offers: Sequence[_Offer]) -> list[_Offer]:
    """The first ones, for one read."""
    some: list[_Offer] = []
    nbytes = 0
    for one in offers[:READ_BLOCKS]:
        nbytes += one.size
        if some and nbytes > READ_NBYTES:
            break
        some.append(one)
    return some


def _adopt(part: PeerPart, offers: Sequence[_Offer]) -> Adopt:
    """As a store that is drained would offer them."""
    count = len(offers)
    return Adopt(
        source=part.peer,
        store=part.store,
        memory=part.memory,
        keys=b"".join(one.key for one in offers),
        sizes=struct.pack(f"<{count}I", *(one.size for one in offers)),
        slots=struct.pack(f"<{count}I", *(one.slot for one in offers)),
        seals=struct.pack(f"<{count}Q", *(one.seal for one in offers)),
    )
