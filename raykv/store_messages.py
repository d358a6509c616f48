"""What crosses between an engine and the `NodeStore` of its node: plain frozen records, no heavy import.

An engine's scheduler half asks and settles, its worker halves attach and hand over copy jobs. A job is numbered by
the scheduler half and is the same on every rank; `store` in every answer names the life of the store that gave it,
so that an answer of an older life is told from a current one.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field
from typing import Any

from raykv.types import EngineId, JobId, LeaseId, Rank, RequestId, StoreLife

FINGERPRINT_NBYTES = 16
HASH_NBYTES = 32
KEY_NBYTES = FINGERPRINT_NBYTES + 1 + HASH_NBYTES
"""A BlockKey: fingerprint of a rank's KV cache, KV group, vLLM's block hash (shorter ones padded, longer digested)."""


class Medium(enum.StrEnum):
    """Where a tier's bytes live."""

    HOST = "host"
    DISK = "disk"
    PEER = "peer"
    FS = "fs"


class Cascade(enum.StrEnum):
    """When a block goes on to the next tier: when this one needs its slot, or as soon as it is committed."""

    EVICT = "evict"
    WRITE = "write"


class Eviction(enum.StrEnum):
    """Who goes first when a tier is full."""

    LRU = "lru"
    S3FIFO = "s3fifo"


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier of a store's own. `path`: the folder of a disk or fs tier, None for host memory.

    `capacity`: bytes of slots; of an fs tier the bytes that all nodes together keep in its folder.
    """

    medium: Medium
    capacity: int
    path: str | None = None


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """A node's store as its first engine wants it; fastest tier first.

    `slot_nbytes` is a multiple of 4096; 0: that of the first engine's largest block, rounded up.
    `checksum` False trades the check of every read for speed; what a store then recovers is not served.
    `peer`: read from the host tiers of other nodes' stores too.
    """

    name: str
    tiers: tuple[TierSpec, ...]
    slot_nbytes: int = 0
    checksum: bool = True
    eviction: Eviction = Eviction.LRU
    cascade: Cascade = Cascade.EVICT
    lease_s: float = 60.0
    peer: bool = False


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One KV group: its layers in the order in which their bytes lie in a slot, and what a prefix needs of it.

    `window_blocks` 0: all blocks of the prefix (full attention); else only that many last ones (sliding window).
    """

    layers: tuple[str, ...]
    window_blocks: int = 0


@dataclass(frozen=True, slots=True)
class RankAttach:
    """One worker of an engine joins. `caches` is the pickled handle of its KV cache and of its forward fence.

    `fingerprint` decides who shares (FINGERPRINT_NBYTES). `writes` False: this rank's bytes are another rank's too
    (MLA), so it loads under that fingerprint and saves nothing. `pid` and `started` (clock ticks) are the worker's.
    `facts`: the canonical JSON behind the fingerprint, and `model` the model's name: for people, never compared.
    """

    engine: EngineId
    rank: Rank
    num_ranks: int
    pid: int
    started: int
    fingerprint: bytes
    num_blocks: int
    groups: tuple[GroupLayout, ...]
    caches: bytes
    writes: bool = True
    facts: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class Attached:
    """The answer: the life of the store, its process, and the bytes of a slot."""

    store: StoreLife
    pid: int
    started: int
    slot_nbytes: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """Another engine says that the first `blocks` blocks of a prompt are in the store whose actor has this name, or on
    their way there. Never taken for the truth: what is held is found by its hashes, so a lie costs time only.
    """

    blocks: int
    store: str


@dataclass(frozen=True, slots=True)
class LookUp:
    """Which prefix of these blocks does the store hold for this engine, on all ranks and groups?

    `hashes`: the block hashes of the prompt's full blocks, HASH_NBYTES each, concatenated, from its first block on.
    `tenant`: whose they are (`admin_messages.tenant_tag`), empty: nobody's. What is found elsewhere is his here, too.
    """

    request: RequestId
    hashes: bytes
    hand_over: HandOver | None = None
    tenant: bytes = b""


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The first `num_blocks` blocks are held and leased. `media`: for each the slowest medium that it comes from.

    `lease` is None exactly when `num_blocks` is 0. `more`: other nodes may have more of it; `NodeStore.reach` asks.
    `peer`: the node (the first letters of its id) from which blocks of Medium.PEER come.
    """

    store: StoreLife
    request: RequestId
    num_blocks: int
    lease: LeaseId | None = None
    media: tuple[Medium, ...] = ()
    more: bool = False
    peer: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """On the wire media are runs: a thousand blocks of one medium cost no more than one."""
        media = self.media
        if media and media.count(media[0]) == len(media):
            runs = [(str(media[0]), len(media))]
        else:
            runs = [(str(medium), sum(1 for _ in same)) for medium, same in itertools.groupby(media)]
        return _looked_up, (self.store, self.request, self.num_blocks, self.lease, runs, self.more, self.peer)


def _looked_up(
    store: StoreLife,
    request: RequestId,
    num_blocks: int,
    lease: LeaseId | None,
    runs: list[tuple[str, int]],
    more: bool,
    peer: str,
) -> LookedUp:
    media = itertools.chain.from_iterable((Medium(name),) * count for name, count in runs)
    return LookedUp(store, request, num_blocks, lease, tuple(media), more, peer)


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Copy blocks out of the engine's KV cache. By KV group: `hashes[g]` (concatenated) and `block_ids[g]`.

    `tenants[g]`: whose blocks they are, in runs of (`admin_messages.tenant_tag`, how many); () all over: nobody's.
    """

    job: JobId
    hashes: tuple[bytes, ...]
    block_ids: tuple[tuple[int, ...], ...]
    tenants: tuple[tuple[tuple[bytes, int], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Copy leased blocks into the engine's KV cache.

    By KV group: `indices[g]`, places in the leased prefix, and as many `block_ids[g]` to fill.
    """

    job: JobId
    lease: LeaseId
    indices: tuple[tuple[int, ...], ...]
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class JobDone:
    """A job has ended on one rank: nothing touches its blocks for it any more.

    A save with `ok` may be committed; blocks that found no room were `skipped` and are no failure. A load with `ok`
    filled all its blocks; else `bad_blocks` are the block ids that must not be used. `media`: blocks loaded by medium.
    """

    job: JobId
    ok: bool
    bad_blocks: tuple[int, ...] = ()
    skipped: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    media: dict[Medium, int] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Settle:
    """From the scheduler half: these saves are complete on all ranks, these must not be seen, these leases are over.

    Jobs are settled once every rank has reported its JobDone or is dead.
    """

    commits: tuple[JobId, ...] = ()
    aborts: tuple[JobId, ...] = ()
    releases: tuple[LeaseId, ...] = ()


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier in figures: slots in all, used (committed), being written, out of use; and counts since the start."""

    medium: Medium
    path: str | None
    slot_nbytes: int
    slots: int
    used: int
    writing: int
    quarantined: int
    evicted: int
    hits: int
    bad_reads: int
    off: str = ""
    """Why the tier is switched off; empty while it serves."""
    draining: bool = False
    """Nothing new goes there, by an operator's word."""


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """What a store lends to other nodes' stores and reads from them, in blocks; counts since the start.

    `lent_now`: slots that leases of peers keep at this moment. `bad_blocks` were read, were not what the peer had said,
    and were not used; they are not among `read_blocks`.
    """

    lent_blocks: int
    lent_now: int
    read_blocks: int
    bad_blocks: int


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """A store in figures, for people and metrics. `peer` None: it has no peer tier."""

    store: StoreLife
    name: str
    pid: int
    tiers: tuple[TierStatus, ...]
    engines: tuple[EngineId, ...]
    leases: int
    look_ups: int
    hit_blocks: int
    missed_blocks: int
    saved_blocks: int
    skipped_blocks: int
    loaded_blocks: int
    peer: PeerStatus | None = None
    drain: str = ""
    """How far it is drained, for people; empty: it is not."""


@dataclass(frozen=True, slots=True)
class DrainReport:
    """How far a store's drain has come. `left_blocks` of the host tier lie nowhere else, as far as it knows.

    `moved_nbytes` were copied for it, by all its drains; a block that lay elsewhere already counts as moved and cost
    nothing.
    `disk_blocks` stay on the node's disk. `skipped_blocks` were not saved, because it is drained. `problem`: why not
    all could be moved.
    """

    store: StoreLife
    moved_blocks: int = 0
    moved_nbytes: int = 0
    left_blocks: int = 0
    disk_blocks: int = 0
    skipped_blocks: int = 0
    running: bool = False
    problem: str = ""

    def __str__(self) -> str:
        line = f"{self.moved_blocks:,} blocks moved ({self.moved_nbytes / 1e6:,.1f} MB), {self.left_blocks:,} left"
        if self.disk_blocks:
            line += f", {self.disk_blocks:,} stay on its disk"
        return f"{line}: {self.problem}" if self.problem else line
