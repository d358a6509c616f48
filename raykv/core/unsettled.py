"""What an engine has settled and its store has not confirmed: sent in batches, one at a time, again if one got lost.

Safe in any order, several times, and to any life of the store: jobs and leases of another life mean nothing to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from raykv.store_messages import Settle

MAX_SETTLE = 1000
"""Ids in one batch: a message of Ray's is cheap up to 100 KB."""
MAX_UNSETTLED = 100_000
"""Ids kept for a store that can't be reached; beyond it the oldest go (its engine's end settles them too)."""


class Unsettled:
    """One engine's. One thread. Falsy while nothing waits to be sent."""

    def __init__(self) -> None:
        self._waiting: deque[Settle] = deque()
        self._sent: list[Settle] = []

    def add(self, settle: Settle) -> None:
        self._waiting.append(settle)
        self._bound()

    def take(self) -> Settle:
        """The next batch as one, which is on its way from here on; empty if nothing waits."""
        ids = 0
        while self._waiting and (ids == 0 or ids + _size(self._waiting[0]) <= MAX_SETTLE):
            ids += _size(self._waiting[0])
            self._sent.append(self._waiting.popleft())
        return _merged(self._sent)

    def confirmed(self) -> None:
        """The batch has arrived."""
        self._sent = []

    def lost(self) -> None:
        """It may not have arrived: it is the next one again."""
        sent, self._sent = self._sent, []
        self._waiting.extendleft(reversed([one for one in sent if _size(one)]))
        self._bound()

    def _bound(self) -> None:
        if len(self._waiting) <= MAX_SETTLE:  # so that the sum costs nothing while all is well
            return
        kept = sum(map(_size, self._waiting))
        while kept > MAX_UNSETTLED:
            kept -= _size(self._waiting.popleft())

    def __len__(self) -> int:
        return len(self._waiting)


def _size(settle: Settle) -> int:
    return len(settle.commits) + len(settle.aborts) + len(settle.releases)


def _merged(settles: Iterable[Settle]) -> Settle:
    several = list(settles)
    return Settle(
        commits=tuple(job for settle in several for job in settle.commits),
        aborts=tuple(job for settle in several for job in settle.aborts),
        releases=tuple(lease for settle in several for lease in settle.releases),
    )
