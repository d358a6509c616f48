"""What the book of a store answers: plain frozen records, each a list of things for the store to carry out.

Headers. The store keeps on media one header a slot, and they mirror the book: READY has a header with its key, every
other slot has none (or says "quarantined"). So that nobody else can take a slot in between, the store changes headers
in the same lock hold as the call that says so: `publish` after a commit or a move, `clear` at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from raykv.store_messages import HASH_NBYTES, Medium
from raykv.types import EngineId, JobId, LeaseId, Rank, RequestId


class Place(NamedTuple):
    """A slot of a tier. `tier` is the position in the store's list: 0 is the fastest."""

    tier: int
    slot: int


class Run(NamedTuple):
    """`length` slots of a tier next to each other, from `slot` on."""

    tier: int
    slot: int
    length: int

    def places(self) -> Iterable[Place]:
        return map(Place, repeat(self.tier), range(self.slot, self.slot + self.length))


Published = tuple[bytes, Place]
"""A key and where its bytes are complete now: write the header."""


class Row(NamedTuple):
    """Where blocks `first`, `first` + 1, ... of a prompt lie, of one rank and KV group."""

    first: int
    runs: tuple[Run, ...]

    @property
    def end(self) -> int:
        """The number of the block behind the last one."""
        return self.first + sum(run.length for run in self.runs)

    def cut(self, end: int) -> Row:
        """The row up to block `end`."""
        runs, left = list(self.runs), self.end - end
        while left > 0 and runs:
            last = runs.pop()
            if last.length > left:
                runs.append(last._replace(length=last.length - left))
            left -= last.length
        return Row(self.first, tuple(runs))

    def past(self, first: int) -> Row:
        """The row from block `first` on."""
        runs: list[Run] = []
        skip = max(0, first - self.first)
        for tier, slot, length in self.runs:
            if skip < length:
                runs.append(Run(tier, slot + skip, length - skip))
            skip = max(0, skip - length)
        return Row(max(first, self.first), tuple(runs))

    def places(self) -> list[Place]:
        """Block by block, from `first` on."""
        return [place for run in self.runs for place in run.places()]


def row_of(key: bytes) -> bytes:
    """What the keys of one rank and KV group have in common."""
    return key[:-HASH_NBYTES]


def runs_of(places: Iterable[Place]) -> list[Run]:
    """The places, in their order, as few runs."""
    found: list[Run] = []
    tier, slot, count = -1, -1, 0
    for place in places:
        if place.tier == tier and place.slot == slot + count:
            count += 1
            continue
        if count:
            found.append(Run(tier, slot, count))
        (tier, slot), count = place, 1
    if count:
        found.append(Run(tier, slot, count))
    return found


@dataclass(frozen=True, slots=True)
class Lease:
    """A promise to keep the first `num_blocks` blocks of a prompt, as far as they are needed: `rows[rank][group]`.

    `rank` counts the fingerprints that were asked for. `media[i]`: the slowest medium that block i comes from. All
    runs of all rows are pinned once.
    """

    id: LeaseId
    engine: EngineId
    request: RequestId
    expires: float
    num_blocks: int
    rows: tuple[tuple[Row, ...], ...]
    media: tuple[Medium, ...]

    def runs(self) -> list[Run]:
        """What is pinned."""
        return [run for by_group in self.rows for row in by_group for run in row.runs]

    @property
    def num_pins(self) -> int:
        return sum(run.length for run in self.runs())

    def covers(self, place: Place) -> bool:
        return any(run.tier == place.tier and 0 <= place.slot - run.slot < run.length for run in self.runs())

    def places(self, rank: int, group: int, wanted: Sequence[int]) -> tuple[Place, ...] | None:
        """Where these blocks of the prompt lie; None if the lease does not cover all of them."""
        row = self.rows[rank][group]
        held, first = row.places(), row.first
        if wanted and not (first <= min(wanted) and max(wanted) < first + len(held)):
            return None
        return tuple(held[i - first] for i in wanted)


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
    tier: int = 0
    """Its number; `BookFigures.tiers` has them in their order."""
    shut: bool = False
    """It is drained: nothing new goes there."""


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
