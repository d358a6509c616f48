"""Leases: what a store promised to keep, to whom, and until when.

The theory. A look-up promises blocks before anybody loads them; the promise is a *lease*. It is over when the
scheduler half releases it, when its request is asked for anew, when its engine is gone, or past its time. A load that
runs then still reads: the lease becomes *ending*, can't be used again, and gives its pins back at the end of its last
load.

This class decides only: a call that ends leases returns the runs of slots whose pins come free (one entry a pin), and
the caller gives them back at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from raykv.core.store_plans import Lease, Place, Run
from raykv.errors import IntegrityError
from raykv.types import EngineId, LeaseId, RequestId


@dataclass(slots=True, eq=False)
class _Held:
    lease: Lease
    uses: Counter[int]  # running loads by rank
    ending: bool = False


class LeaseBook:
    """The leases of one store. Not thread-safe; the owner of the book has the lock."""

    def __init__(self) -> None:
        self._held: dict[LeaseId, _Held] = {}
        self._current: dict[tuple[EngineId, RequestId], LeaseId] = {}
        self._next = 0
        self.unknown_releases = 0
        """Releases of leases that were over already: a lost race, no defect."""

    def __len__(self) -> int:
        """Leases that hold pins, ending ones too."""
        return len(self._held)

    # -- granting -------------------------------------------------------------------------------------------

    def next_id(self) -> LeaseId:
        """Ids count up from 0 and are never used again."""
        self._next += 1
        return LeaseId(self._next - 1)

    def grant(self, lease: Lease) -> list[Run]:
        """The caller has pinned `lease.runs()`. A request has one lease: what comes free is the older one's."""
        if lease.id in self._held:
            raise IntegrityError(f"lease {lease.id} was granted already")
        freed = self.drop_request(lease.engine, lease.request)
        self._held[lease.id] = _Held(lease, Counter())
        self._current[lease.engine, lease.request] = lease.id
        return freed

    # -- use ------------------------------------------------------------------------------------------------

    def get(self, lease: LeaseId) -> Lease | None:
        """A lease that may be used: not over."""
        held = self._held.get(lease)
        return held.lease if held is not None and not held.ending else None

    def begin_use(self, lease: LeaseId, rank: int) -> Lease | None:
        """A load starts; None if the lease is over. Else it holds its pins until the load's `end_use`."""
        usable = self.get(lease)
        if usable is not None:
            self._held[lease].uses[rank] += 1
        return usable

    def end_use(self, lease: LeaseId, rank: int) -> list[Run]:
        """A load that began has ended."""
        held = self._held.get(lease)
        if held is None or not held.uses[rank]:
            raise IntegrityError(f"no load of rank {rank} runs under lease {lease}")
        held.uses[rank] -= 1
        held.uses += Counter()  # without the zeros
        return self._end([held]) if held.ending else []

    def in_use(self, lease: LeaseId, rank: int) -> Lease | None:
        """The lease that a running load of this rank reads, ending or not."""
        held = self._held.get(lease)
        return held.lease if held is not None and rank in held.uses else None

    # -- ending ---------------------------------------------------------------------------------------------

    def release(self, lease: LeaseId) -> list[Run]:
        """It is over. A second time and an unknown one are fine, and counted."""
        held = self._held.get(lease)
        if held is None or held.ending:
            self.unknown_releases += 1
            return []
        return self._end([held])

    def drop_request(self, engine: EngineId, request: RequestId) -> list[Run]:
        """The request's lease is over, if it has one."""
        lease = self._current.get((engine, request))
        return self._end([self._held[lease]]) if lease is not None else []

    def expire(self, now: float) -> tuple[int, list[Run]]:
        """How many are past their time (at `expires` or later), and their pins."""
        late = [held for held in self._held.values() if not held.ending and held.lease.expires <= now]
        return len(late), self._end(late)

    def end_engine(self, engine: EngineId) -> list[Run]:
        """All of an engine's leases are over."""
        return self._end([held for held in self._held.values() if held.lease.engine == engine])

    def _end(self, over: Iterable[_Held]) -> list[Run]:
        freed: list[Run] = []
        for held in over:
            lease = held.lease
            held.ending = True
            if self._current.get((lease.engine, lease.request)) == lease.id:
                del self._current[lease.engine, lease.request]
            if not held.uses:
                del self._held[lease.id]
                freed.extend(lease.runs())
        return freed

    # -- checks ---------------------------------------------------------------------------------------------

    def pinned(self) -> Counter[Place]:
        """By place: how many pins are leases'."""
        return Counter(place for held in self._held.values() for run in held.lease.runs() for place in run.places())

    def check_integrity(self) -> None:
        """Raise IntegrityError unless each lease is current or ending, and an ending one is in use."""
        for lease, held in self._held.items():
            current = self._current.get((held.lease.engine, held.lease.request)) == lease
            if current == held.ending or (held.ending and not held.uses):
                raise IntegrityError(f"lease {lease}: current {current}, ending {held.ending}, uses {dict(held.uses)}")
            if min(held.uses.values(), default=1) < 1:
                raise IntegrityError(f"lease {lease} has uses {dict(held.uses)}")
        if len(self._current) != sum(not held.ending for held in self._held.values()):
            raise IntegrityError("a request names a lease that is over")
