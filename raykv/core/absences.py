"""Why blocks are not here (any more), and since when: what an operator is told of a miss.

The theory. Each key that leaves, or was not taken in, is remembered by 64 bits of it in a table of fixed size, two
places a pair; of a pair the older one is overwritten. So some keys of the last `capacity` are lost to collisions, and
none costs an object. What is remembered of a block that is held again is out of date and does no harm: who asks looks
for the block first.

Why a block leaves is known to who has it leave, and not to the table that it leaves: he says so around the call.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raykv.engine_messages import Why
from raykv.errors import IntegrityError

CAPACITY = 100_000
_MASK = (1 << 64) - 1
_WHYS = (Why.EVICTED, Why.EXPIRED, Why.CLEARED, Why.CORRUPT, Why.OVER_QUOTA, Why.NO_ROOM)
_EVICTED, _EXPIRED = 0, 1  # of these


class Absences:
    """About the last `capacity` keys; 34 bytes each. Not thread-safe; the owner of the book has the lock."""

    def __init__(self, capacity: int = CAPACITY, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch."""
        self._pairs = max(1, capacity)
        self._marks = array("Q", bytes(16 * self._pairs))  # 0: nothing
        self._when = array("d", bytes(16 * self._pairs))
        self._why = bytearray(2 * self._pairs)
        self._clock = clock
        self._because = _EVICTED
        self._kept = 0

    def __len__(self) -> int:
        """How many keys are remembered now."""
        return self._kept

    @contextmanager
    def because(self, why: Why) -> Iterator[None]:
        """What leaves within the block leaves for this reason; else for want of room."""
        before, self._because = self._because, _WHYS.index(why)
        try:
            yield
        finally:
            self._because = before

    def left(self, key: bytes) -> None:
        """A block leaves. One that was kept by a pin until that expired has expired."""
        at = self._place(mark := hash(key) & _MASK or 1)
        code, found = self._because, self._marks[at]
        if code == _EVICTED and found == mark and self._why[at] == _EXPIRED:
            code = _EXPIRED
        self._kept += not found
        self._marks[at], self._when[at], self._why[at] = mark, self._clock(), code

    def note(self, key: bytes, why: Why) -> None:
        """The block is not here, or (EXPIRED) will leave, for this reason."""
        mark = hash(key) & _MASK or 1
        at = self._place(mark)
        self._kept += not self._marks[at]
        self._marks[at], self._when[at], self._why[at] = mark, self._clock(), _WHYS.index(why)

    def find(self, key: bytes) -> tuple[Why, float] | None:
        """Why the block is not here, and since when (seconds since the epoch), if it is remembered."""
        at = self._place(mark := hash(key) & _MASK or 1)
        return (_WHYS[self._why[at]], self._when[at]) if self._marks[at] == mark else None

    def _place(self, mark: int) -> int:
        """Where the key is, or is to be put."""
        at = 2 * (mark % self._pairs)
        marks = self._marks
        if marks[at] == mark:
            return at
        return at + 1 if marks[at + 1] == mark or self._when[at + 1] < self._when[at] else at

    def check_integrity(self) -> None:
        """Raise IntegrityError if somebody left a reason standing, or more is counted than there is room for."""
        if self._because != _EVICTED or not 0 <= self._kept <= 2 * self._pairs:
            raise IntegrityError(
                f"{self._kept} absences are counted, and things leave because they are {_WHYS[self._because]}"
            )
