"""Save jobs: who writes which slots, and when these may be seen or must be given back.

The theory. A rank *begins* its part of a job and *ends* it, each once. The job is *settled* once: by a commit, an abort
or the end of its engine. A place belongs to its job from the begin on and leaves it

  to be published, at a commit that finds every part ended with ok, or
  to be discarded, when the job is settled otherwise and no part of it is being written any more.

So a place never gets a new owner under a copy. Parts are known by a ticket, never by their names: an engine may come
back under its old id and count its jobs from 0 while copies of its former life still run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from raykv.core.store_plans import Place
from raykv.errors import IntegrityError
from raykv.types import EngineId, JobId, Rank

REMEMBERED = 4096
"""So many settled jobs are remembered, so that a part that begins after the end finds no room instead of no end."""


class Settled(NamedTuple):
    """What is to be done at once with a job's places."""

    publish: Sequence[Place] = ()
    discard: Sequence[Place] = ()


@dataclass(slots=True, eq=False)
class _Job:
    places: list[Place] = field(default_factory=list)
    ranks: set[Rank] = field(default_factory=set)
    writing: int = 0
    failed: bool = False
    given_up: bool = False


class SaveJobs:
    """The uncommitted saves of one store. Not thread-safe; the owner of the book has the lock."""

    def __init__(self) -> None:
        self._named: dict[tuple[EngineId, JobId], _Job] = {}  # not settled
        self._tickets: dict[int, _Job] = {}  # parts being written, of settled jobs too
        self._settled: dict[tuple[EngineId, JobId], None] = {}
        self._next_ticket = 0

    def __len__(self) -> int:
        """Jobs that are not settled, or still written."""
        return len(self._jobs())

    def _jobs(self) -> list[_Job]:
        return list({id(job): job for job in (*self._named.values(), *self._tickets.values())}.values())

    def takes(self, engine: EngineId, rank: Rank, job: JobId) -> bool:
        """Whether a part that begins now can still be seen: not if its job is settled."""
        known = self._named.get((engine, job))
        if known is not None and rank in known.ranks:
            raise IntegrityError(f"rank {rank} of {engine} begins job {job} a second time")
        return (engine, job) not in self._settled

    def begin(self, engine: EngineId, rank: Rank, job: JobId, places: Sequence[Place]) -> int:
        """A part starts to write these places; its ticket."""
        if self.takes(engine, rank, job):
            entry = self._named.setdefault((engine, job), _Job())
        else:
            entry = _Job(given_up=True)
        entry.ranks.add(rank)
        entry.places.extend(places)
        entry.writing += 1
        self._next_ticket += 1
        self._tickets[self._next_ticket] = entry
        return self._next_ticket

    def end(self, ticket: int, ok: bool) -> Settled:
        """A part is no longer being written."""
        entry = self._tickets.pop(ticket, None)
        if entry is None:
            raise IntegrityError(f"no part of a save has ticket {ticket}, or it has ended")
        entry.writing -= 1
        entry.failed |= not ok
        return self._give_back(entry) if entry.given_up else Settled()

    def commit(self, engine: EngineId, job: JobId) -> Settled:
        """Publish the job, if all of it is there."""
        entry = self._settle(engine, job)
        if entry is None:
            return Settled()
        if entry.writing or entry.failed:
            return self._give_back(entry)
        return Settled(publish=entry.places)

    def abort(self, engine: EngineId, job: JobId) -> Settled:
        """Give the job up."""
        entry = self._settle(engine, job)
        return self._give_back(entry) if entry is not None else Settled()

    def end_engine(self, engine: EngineId) -> Settled:
        """Give all jobs of an engine up. It may come back under its name with new ones."""
        discard = [place for key in list(self._named) if key[0] == engine for place in self.abort(*key).discard]
        self._settled = {key: None for key in self._settled if key[0] != engine}
        return Settled(discard=discard)

    def _settle(self, engine: EngineId, job: JobId) -> _Job | None:
        self._settled[engine, job] = None
        if len(self._settled) > REMEMBERED:
            self._settled = dict.fromkeys(list(self._settled)[REMEMBERED // 2 :])
        return self._named.pop((engine, job), None)

    def _give_back(self, entry: _Job) -> Settled:
        entry.given_up = True
        if entry.writing:
            return Settled()
        places, entry.places = entry.places, []
        return Settled(discard=places)

    def places(self) -> list[Place]:
        """All places that belong to a job."""
        return [place for job in self._jobs() for place in job.places]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every job is either not settled, or given up and being written."""
        for job in self._named.values():
            if job.given_up:
                raise IntegrityError("a job that was given up is not settled")
        for job in self._jobs():
            if job.writing != sum(entry is job for entry in self._tickets.values()):
                raise IntegrityError("a job's count of parts being written is wrong")
        if any(not job.given_up and job not in self._named.values() for job in self._tickets.values()):
            raise IntegrityError("a settled job is being written and not given up")
