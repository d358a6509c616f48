"""What the stores of two nodes tell each other: plain frozen records, no heavy import.

A borrower asks for blocks, a lender keeps them where they are for a while and says where that is. The bytes
themselves never cross Ray: the borrower reads them out of the lender's memory, one-sided.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raykv.types import LeaseId, StoreLife


@dataclass(frozen=True, slots=True)
class Lend:
    """Keep the blocks of this prefix for a while.

    `fingerprints`: one for each rank. `windows`: one for each KV group, in blocks; 0: it needs the whole prefix.
    `hashes`: HASH_NBYTES each, concatenated, from the prompt's first block on. `first`: of groups that need the whole
    prefix, the borrower has the blocks before this one. `number` is the borrower's own and never used twice in its
    life. `duration_s`: how long they are wanted. `knows`: the life whose memory the borrower can read already.
    """

    borrower: StoreLife
    number: int
    fingerprints: tuple[bytes, ...]
    windows: tuple[int, ...]
    hashes: bytes
    first: int
    duration_s: float
    knows: StoreLife | None = None


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """The slots that a lender lets others read: `slots` of `slot_nbytes` from the address `base` on.

    `metadata` is what NIXL says of the lender's agent; opaque, and only ever given to NIXL.
    """

    base: int
    slots: int
    slot_nbytes: int
    metadata: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Lent:
    """The first `num_blocks` blocks are there, and what the borrower lacks of them stays for `duration_s` seconds.

    0 blocks: nothing is lent, and all else is empty. `slots` (4 bytes each) and `seals` (8 bytes each, see
    `core.peer_part.seal`), both little-endian, are by fingerprint, by KV group, and then by block as
    `core.peer_part.lacking` counts them. `memory` comes with an answer to somebody who does not know this life.
    """

    store: StoreLife
    num_blocks: int = 0
    lease: LeaseId | None = None
    duration_s: float = 0.0
    slots: bytes = field(default=b"", repr=False)
    seals: bytes = field(default=b"", repr=False)
    memory: PeerMemory | None = None
