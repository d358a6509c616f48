"""What the book of a store answers: plain frozen records, each a list of things for the store to carry out.

Headers. The store keeps on media one header a slot, and they mirror the book: READY has a header with its key, every
other slot has none (or says "quarantined"). So that nobody else can take a slot in between, the store changes headers
in the same lock hold as the call that says so: `publish` after a commit or a move, `clear` at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from raykv.store_messages import Medium
from raykv.types import EngineId, JobId, LeaseId, Rank, RequestId


class Place(NamedTuple):
    """A slot of a tier. `tier` is the position in the store's list: 0 is the fastest."""

    tier: int
    slot: int


Published = tuple[bytes, Place]
"""A key and where its bytes are complete now: write the header."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A promise to keep the first `num_blocks` blocks of a prompt. `places[rank][group][i]`: None = not needed there.

    `rank` counts the fingerprints that were asked for. `media[i]`: the slowest medium that block i comes from.
    `pins`: every place once for each time it is needed.
    """

    id: LeaseId
    engine: EngineId
    request: RequestId
    expires: float
    num_blocks: int
    places: tuple[tuple[tuple[Place | None, ...], ...], ...]
    media: tuple[Medium, ...]
    pins: tuple[Place, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class SavePlan:
    """One rank's part of a save job. Numbers are indices into the list of keys it was asked with.

    `write`: copy these blocks into these places, which are WRITING and this plan's alone until `end_write(plan, ok)`.
    `known`: held already, or being written by anybody. `skipped`: no room. `clear`: evicted for it.
    """

    engine: EngineId
    rank: Rank
    job: JobId
    ticket: int
    write: tuple[tuple[int, Place], ...] = ()
    known: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()
    clear: tuple[Place, ...] = ()


class Move(NamedTuple):
    """Copy a slot's bytes, and check them, from one tier to another. Meanwhile `source` is pinned, `target` WRITING."""

    key: bytes
    source: Place
    target: Place


@dataclass(frozen=True, slots=True)
class MovePlan:
    """Moves to carry out, each ended by `end_move`, and what was evicted for them."""

    moves: tuple[Move, ...] = ()
    clear: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True)
class MoveEnd:
    """A move has ended: write these headers, clear those."""

    publish: tuple[Published, ...] = ()
    clear: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True)
class TierFigures:
    """One tier: slots by state now, and what happened since the start. `off`: why it is off, empty while it serves."""

    medium: Medium
    slots: int
    used: int
    writing: int
    quarantined: int
    pinned: int
    evicted: int
    hits: int
    bad_reads: int
    off: str


@dataclass(frozen=True, slots=True)
class BookFigures:
    """The whole book. `dropped`: blocks evicted to nowhere though a slower tier serves (it did not keep up)."""

    tiers: tuple[TierFigures, ...]
    leases: int
    open_jobs: int
    open_moves: int
    waiting_moves: int
    look_ups: int
    hit_blocks: int
    missed_blocks: int
    saved_blocks: int
    skipped_blocks: int
    loaded_blocks: int
    demoted_blocks: int
    promoted_blocks: int
    dropped_blocks: int
    queue_overflows: int
    unknown_releases: int
