"""The part of a leased prefix that lies at a peer: which blocks it is, and where each of them lies.

The theory. A prefix of n blocks is served by two stores. Of a KV group that needs the whole prefix, the blocks before
`first` are leased in this store and the others at the peer. Of a group with a window w, the last min(w, n) blocks are
all at the peer: this store's own window is that of a shorter prefix.

A slot at a peer is read without the peer's doing, at any time, also when its lease is long over. So what was read is
believed only if it fits the block's *seal*, which ties key, length and checksum together: other bytes, or another
block's, have another one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from raykv.core.prefix import block_key
from raykv.errors import IntegrityError
from raykv.peer_messages import Lent, PeerMemory
from raykv.store_messages import HASH_NBYTES
from raykv.types import LeaseId, StoreLife

_SEALED = struct.Struct("<QQ")


def seal(key: bytes, nbytes: int, checksum: int) -> int:
    """64 bits of what a slot's header says of it."""
    return int.from_bytes(blake2b(key + _SEALED.pack(nbytes, checksum), digest_size=8).digest(), "little")


def lacking(windows: Sequence[int], first: int, num_blocks: int) -> list[range]:
    """By KV group: the blocks of a prefix of `num_blocks` that somebody lacks who has `first`."""
    return [range(max(0, num_blocks - w) if w else min(first, num_blocks), num_blocks) for w in windows]


@dataclass(frozen=True, slots=True)
class PeerBlock:
    """One block at a peer: its key, the address of its slot there, and its seal."""

    key: bytes
    address: int
    seal: int


@dataclass(frozen=True, slots=True)
class PeerPart:
    """What one peer lends for one prefix. `until` on this store's clock; `peer` is the name of its actor."""

    peer: str
    store: StoreLife
    lease: LeaseId
    until: float
    first: int
    num_blocks: int
    windows: tuple[int, ...]
    fingerprints: tuple[bytes, ...]
    hashes: bytes = field(repr=False)
    slots: memoryview = field(repr=False)
    seals: memoryview = field(repr=False)
    memory: PeerMemory
    sizes: memoryview = field(default=memoryview(b""), repr=False)
    """Bytes of each block, where that was asked for."""
    tenant: bytes = b""
    """Whose blocks they are; empty: nobody's, or not known."""

    @classmethod
    def of(
        cls,
        lent: Lent,
        memory: PeerMemory,
        peer: str,
        until: float,
        first: int,
        windows: Sequence[int],
        fingerprints: Sequence[bytes],
        hashes: bytes,
    ) -> PeerPart | None:
        """None: the answer is not one to this question, whatever is wrong with it."""
        count = sum(map(len, lacking(windows, first, lent.num_blocks))) * len(fingerprints)
        asked = len(hashes) // HASH_NBYTES
        if lent.lease is None or not first < lent.num_blocks <= asked:
            return None
        if len(lent.slots) != 4 * count or len(lent.seals) != 8 * count or len(lent.sizes) not in (0, 4 * count):
            return None
        slots = memoryview(lent.slots).cast("I")
        if memory.slots < 1 or memory.slot_nbytes < 1 or max(slots, default=0) >= memory.slots:
            return None
        seals = memoryview(lent.seals).cast("Q")
        return cls(
            peer, lent.store, lent.lease, until, first, lent.num_blocks, tuple(windows), tuple(fingerprints), hashes,
            slots, seals, memory, memoryview(lent.sizes).cast("I"),
        )  # fmt: skip

    def split(self, indices: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
        """By KV group the places in `indices[g]` whose blocks are leased here, and those at the peer."""
        here: list[list[int]] = []
        there: list[list[int]] = []
        for window, wanted in zip(self.windows, indices, strict=True):
            far = [bool(window) or i >= self.first for i in wanted]
            here.append([place for place, is_far in enumerate(far) if not is_far])
            there.append([place for place, is_far in enumerate(far) if is_far])
        return here, there

    def blocks(self, row: int, wanted: Iterable[tuple[int, int]]) -> list[PeerBlock] | None:
        """Blocks by (KV group, place in the prefix), for fingerprint `row`; None: the peer has not lent all of them."""
        ranges = lacking(self.windows, self.first, self.num_blocks)
        if not 0 <= row < len(self.fingerprints):
            return None
        starts, start = [], row * sum(map(len, ranges))
        for one in ranges:
            starts.append(start - one.start)
            start += len(one)
        heads = [block_key(self.fingerprints[row], group, b"") for group in range(len(ranges))]
        base, step, slots, seals = self.memory.base, self.memory.slot_nbytes, self.slots, self.seals
        found = []
        for group, index in wanted:
            if index not in ranges[group]:
                return None
            place, digest = starts[group] + index, self.hashes[index * HASH_NBYTES : (index + 1) * HASH_NBYTES]
            found.append(PeerBlock(heads[group] + digest, base + slots[place] * step, seals[place]))
        return found


class PeerParts:
    """Which leases of this store have a part at a peer. Not thread-safe: under the lock of the store's book."""

    def __init__(self) -> None:
        self._parts: dict[LeaseId, PeerPart] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, lease: LeaseId, part: PeerPart) -> None:
        """Once for each lease."""
        if lease in self._parts:
            raise IntegrityError(f"lease {lease} has a part at a peer already")
        self._parts[lease] = part

    def get(self, lease: LeaseId) -> PeerPart | None:
        return self._parts.get(lease)

    def take(self, leases: Iterable[LeaseId]) -> list[PeerPart]:
        """These leases are over: give their parts back."""
        return [part for lease in leases if (part := self._parts.pop(lease, None)) is not None]

    def take_over(self, holds: Callable[[LeaseId], bool]) -> list[PeerPart]:
        """The same for all leases that are over."""
        return self.take([lease for lease in self._parts if not holds(lease)])
