"""What the stores of two nodes tell each other: plain frozen records, no heavy import.

A borrower asks for blocks, a lender keeps them where they are for a while and says where that is. The bytes
themselves never cross Ray: the borrower reads them out of the lender's memory, one-sided.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from raykv.types import LeaseId, StoreLife


@dataclass(frozen=True, slots=True)
class Lend:
    """Keep the blocks of this prefix for a while.

    `fingerprints`: one for each rank. `windows`: one for each KV group, in blocks; 0: it needs the whole prefix.
    `hashes`: HASH_NBYTES each, concatenated, from the prompt's first block on. `first`: of groups that need the whole
    prefix, the borrower has the blocks before this one. `number` is the borrower's own and never used twice in its
    life. `duration_s`: how long they are wanted. `knows`: the life whose memory the borrower can read already. `sizes`:
    the answer is to say how many bytes each block has, since no engine is there that would know.
    """

    borrower: StoreLife
    number: int
    fingerprints: tuple[bytes, ...]
    windows: tuple[int, ...]
    hashes: bytes
    first: int
    duration_s: float
    knows: StoreLife | None = None
    sizes: bool = False


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
    `core.peer_part.lacking` counts them. `memory` comes with an answer to somebody who does not know this life; `sizes`
    (4 bytes each, as the slots) to somebody who asked for them.
    """

    store: StoreLife
    num_blocks: int = 0
    lease: LeaseId | None = None
    duration_s: float = 0.0
    slots: bytes = field(default=b"", repr=False)
    seals: bytes = field(default=b"", repr=False)
    memory: PeerMemory | None = None
    sizes: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Room:
    """What a store could take of one that is drained: free slots of its host tier. `refused`: why it takes nothing."""

    store: StoreLife
    slots: int = 0
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Adopt:
    """A store that is drained asks another one to keep these blocks. They stay where they are until the answer.

    `source` is the name of its actor, `store` its life, `memory` where the slots lie. By block: `keys` (KEY_NBYTES
    each), `sizes` and `slots` (4 bytes each), `seals` (8 each), all little-endian; most recently used first.
    """

    source: str
    store: StoreLife
    memory: PeerMemory
    keys: bytes = field(repr=False)
    sizes: bytes = field(repr=False)
    slots: bytes = field(repr=False)
    seals: bytes = field(repr=False)


class Adoption(enum.IntEnum):
    """How it went with one block. NOT_HERE: there was no room, or somebody is just writing it."""

    NOT_HERE = 0
    WAS_HERE = 1
    TAKEN = 2
    BAD = 3
    """Its bytes were not what its seal says."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """The answer: an Adoption for each block, one byte each; empty if `refused` says why it takes none now.

    `full`: some were not taken for want of room; `more`: but room is being made.
    """

    store: StoreLife
    blocks: bytes = b""
    refused: str = ""
    full: bool = False
    more: bool = False
