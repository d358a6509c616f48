"""How many blocks of each rank and KV group lie in which tier: which models a store holds, without a look at its slots.

A *head* is what the keys of one fingerprint and KV group begin with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from raykv.core.store_plans import row_of
from raykv.errors import IntegrityError
from raykv.store_messages import FINGERPRINT_NBYTES


class Census:
    """Counts by head. Not thread-safe; the owner of the book has the lock."""

    def __init__(self) -> None:
        self._counts: dict[bytes, dict[int, int]] = {}

    def came(self, tier: int, key: bytes) -> None:
        """A block is READY in a tier now."""
        counts = self._counts.setdefault(row_of(key), {})
        counts[tier] = counts.get(tier, 0) + 1

    def went(self, tier: int, key: bytes) -> None:
        """It is not any more."""
        head = row_of(key)
        counts = self._counts[head]
        counts[tier] -= 1
        if not counts[tier]:
            del counts[tier]
            if not counts:
                del self._counts[head]

    def heads(self) -> list[bytes]:
        """Of which there is a block."""
        return list(self._counts)

    def blocks(self, tiers: Collection[int]) -> dict[bytes, int]:
        """By fingerprint: its blocks in these tiers, one that lies in two counted twice."""
        found: Counter[bytes] = Counter()
        for head, counts in self._counts.items():
            found[head[:FINGERPRINT_NBYTES]] += sum(count for tier, count in counts.items() if tier in tiers)
        return dict(found)

    def check_integrity(self, keys: Iterable[Iterable[bytes]]) -> None:
        """Raise IntegrityError unless these are the keys of all READY slots, by tier."""
        found: dict[bytes, dict[int, int]] = {}
        for tier, mine in enumerate(keys):
            for key in mine:
                counts = found.setdefault(row_of(key), {})
                counts[tier] = counts.get(tier, 0) + 1
        if found != self._counts:
            raise IntegrityError(f"blocks by head are {found}, and were counted as {self._counts}")
