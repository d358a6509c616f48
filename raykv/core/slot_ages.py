"""When the block of a slot came, and whether it was ever read: what an operator is told of what a tier throws out.

Times are whole seconds of the store's clock, told once a second by its owner (`now`): exact enough for the age of a
block, and no slot costs a call of the clock. Five bytes a slot.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from raykv.core.histogram import AGES_S, Histogram


class SlotAges:
    """Of one tier. Not thread-safe; the owner of the book has the lock."""

    def __init__(self, slots: int) -> None:
        self.now = 0
        self.never_read = 0
        """Blocks that were thrown out and had never been read, since the start."""
        self.evicted = Histogram(AGES_S)
        """How old blocks were when they were thrown out."""
        self.was_read = bytearray(slots)
        """By slot: 1 once its block was read. Set by the owner, in whose hot path a call more would be felt."""
        self._came = array("I", bytes(4 * slots))

    def tick(self, now: float) -> None:
        """It is `now`, in seconds of a clock that never goes back."""
        if not self.now:  # what came before the first word of the time came about now
            self._came = array("I", (int(now),)) * len(self._came)
        self.now = max(self.now, int(now))

    def resize(self, slots: int) -> None:
        """So many slots from now on."""
        del self.was_read[slots:], self._came[slots:]
        self.was_read.extend(bytes(slots - len(self.was_read)))
        self._came.extend(array("I", bytes(4 * (slots - len(self._came)))))

    def came(self, slot: int) -> None:
        """A block is READY in a slot."""
        self._came[slot] = self.now
        self.was_read[slot] = 0

    def age(self, slot: int) -> int:
        """Seconds since the block of this slot came to it."""
        return self.now - self._came[slot]

    def went(self, slots: Sequence[int]) -> None:
        """These blocks are thrown out."""
        for slot in slots:
            self.never_read += not self.was_read[slot]
            self.evicted.add(self.now - self._came[slot])
