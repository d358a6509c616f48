"""What stores, their askers and the Directory tell each other: which node's store is believed to hold which block.

Plain frozen records, as in `store_messages`. Nothing here is ever taken for the truth: a store that is named as a
holder is asked, and may say no.
"""

from __future__ import annotations

from dataclasses import dataclass

from raykv.types import StoreLife


@dataclass(frozen=True, slots=True)
class Locate:
    """Which stores hold a prefix of these blocks, for all ranks and KV groups?

    `fingerprints`: one for each rank. `windows`: one for each KV group, in blocks; 0: it needs the whole prefix.
    `hashes`: HASH_NBYTES each, concatenated, from the prompt's first block on. `but_not`: a node (its id in hex) that
    is not wanted as a holder, as a rule the asker's own; empty: none.
    """

    fingerprints: tuple[bytes, ...]
    windows: tuple[int, ...]
    hashes: bytes
    but_not: str


@dataclass(frozen=True, slots=True)
class Holder:
    """A store that is believed to hold the first `blocks` blocks (1 or more) for all ranks and KV groups.

    `node`: its node's id in hex. `store`: the name of its Ray actor.
    """

    node: str
    store: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Located:
    """The holders, most blocks first; a few, never all of a large cluster."""

    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class Publish:
    """What changed in a store: the batch `number` (from 0) of a stream.

    A stream begins with nothing, so its first batches carry all that the store holds (`whole` is False until the last
    of them), and later ones what came and went. `stream` counts up within a life: a new one replaces the one before.
    `added`, `removed`: block marks (`core.block_marks`), 8 bytes each; removals come first. An empty batch says that
    the store lives.
    """

    node: str
    store: str
    life: StoreLife
    stream: int
    number: int
    added: bytes = b""
    removed: bytes = b""
    whole: bool = True


@dataclass(frozen=True, slots=True)
class PublishReply:
    """`again`: the Directory does not have what came before this batch: begin a new stream, with all that is held."""

    again: bool


@dataclass(frozen=True, slots=True)
class HolderStatus:
    """One store as the Directory sees it. `blocks`: believed keys, one for each rank and KV group of a block."""

    node: str
    store: str
    life: StoreLife
    blocks: int
    whole: bool
    silent_s: float


@dataclass(frozen=True, slots=True)
class DirectoryStatus:
    """The Directory in figures. `keys`: distinct block keys in its index; `index_nbytes`: about what they take.

    Counts are since the start of its process: batches taken and refused, keys added and removed, look-ups, blocks
    asked for, and look-ups that named a holder.
    """

    life: str
    pid: int
    keys: int
    index_nbytes: int
    nodes: int
    holders: tuple[HolderStatus, ...]
    published: int
    refused: int
    added: int
    removed: int
    forgotten: int
    located: int
    located_blocks: int
    hits: int
