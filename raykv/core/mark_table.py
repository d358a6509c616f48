"""Who holds which block, for many blocks: a mark (`block_marks`) and a set of holders, each a bit of an integer.

The table is some hundred dicts. One large dict would stop everything for a second when it grows past 10^7 entries, and
could not be swept of a holder that is gone in small steps; thousands of dicts do not stay in a processor's cache (a
look-up took twice as long with 4096). A set of holders that many blocks have is one object.

One thread changes the table. `masks` may be read by others meanwhile: each read sees a block before or after a change.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable

from raykv.errors import IntegrityError

SHARDS = 256
LAST = SHARDS - 1
MARK_NBYTES = sys.getsizeof(1 << 59)
_SETS = 1 << 16
"""So many sets of holders are remembered as shared; then it begins anew, and only memory is lost."""


class MarkTable:
    """`shards[mark & LAST].get(mark, 0)` is the set of holders: readers do that in their own loops."""

    def __init__(self) -> None:
        self.shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._sets: dict[int, int] = {}

    def __len__(self) -> int:
        """Marks with a holder, also with one whose bit is to be swept."""
        return sum(map(len, self.shards))

    @property
    def nbytes(self) -> int:
        """What the table takes, without the sets of holders."""
        return sum(map(sys.getsizeof, self.shards)) + len(self) * MARK_NBYTES

    def add(self, marks: Iterable[int], bit: int) -> int:
        """These blocks have this holder; for how many that is new."""
        shards, shared, new = self.shards, self._sets, 0
        for mark in marks:
            shard = shards[mark & LAST]
            old = shard.get(mark, 0)
            if not old:
                shard[mark] = bit
                new += 1
            elif not old & bit:
                holders = old | bit
                shard[mark] = shared.setdefault(holders, holders)
                new += 1
        if len(shared) > _SETS:
            shared.clear()
        return new

    def remove(self, marks: Iterable[int], bit: int) -> int:
        """These blocks no longer have this holder; how many had it."""
        shards, shared, gone = self.shards, self._sets, 0
        for mark in marks:
            shard = shards[mark & LAST]
            old = shard.get(mark, 0)
            if old & bit:
                gone += 1
                holders = old ^ bit
                if holders:
                    shard[mark] = shared.setdefault(holders, holders)
                else:
                    del shard[mark]
        return gone

    def sweep(self, number: int, bits: int) -> None:
        """Clear these bits in one shard."""
        shard, shared = self.shards[number], self._sets
        for mark, holders in [item for item in shard.items() if item[1] & bits]:
            left = holders & ~bits
            if left:
                shard[mark] = shared.setdefault(left, left)
            else:
                del shard[mark]
        if not shard:
            self.shards[number] = {}  # a dict that was emptied keeps its memory

    def counts(self) -> Counter[int]:
        """By the number of its bit: the blocks of each holder. Reads the whole table; raises IntegrityError."""
        by_set: Counter[int] = Counter()
        for number, shard in enumerate(self.shards):
            if any(mark & LAST != number for mark in shard):
                raise IntegrityError(f"shard {number} has a mark of another one")
            by_set.update(shard.values())
        found: Counter[int] = Counter()
        for holders, blocks in by_set.items():
            if holders <= 0:
                raise IntegrityError(f"{blocks} marks have the set of holders {holders}")
            for index in indices(holders):
                found[index] += blocks
        return found


def indices(bits: int) -> list[int]:
    """The numbers of the bits that are set, ascending."""
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found
