"""Slots that blocks from a peer are read into, so that the next read finds them here.

The theory. A fetch owns a WRITING slot of the fastest tier from `begin` to `end`, as a move does its target. It is a
copy of what another node keeps, so it is only begun where nothing of this node's is lost for it: into a free slot, or
into one whose block lies in a slower tier too.
"""

from __future__ import annotations

from collections.abc import Sequence

from raykv.core.store_plans import Place, Published
from raykv.core.tiers import Tiers
from raykv.errors import IntegrityError


class Fetches:
    """The fetches that run. Not thread-safe; the owner of the book has the lock."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._open: set[Place] = set()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, keys: Sequence[bytes]) -> tuple[list[Place | None], list[Place]]:
        """Where each block is to be written; None: nowhere. And the places to clear the headers of."""
        tier = self._tiers.fastest
        if tier is None:
            return [None] * len(keys), []
        table = self._tiers.tables[tier]
        wanted = [key for key in dict.fromkeys(keys) if self._tiers.find(key) is None and not table.holds(key)]
        clear = self._tiers.make_room(tier, len(wanted), lossless=True)
        wanted = wanted[: table.free]
        places = [Place(tier, slot) for slot in table.reserve(wanted) or []]
        self._open.update(places)
        found = dict(zip(wanted, places, strict=True))
        return [found.pop(key, None) for key in keys], clear  # a block that is asked for twice is written once

    def end(self, good: Sequence[Place], bad: Sequence[Place]) -> list[Published]:
        """These are not written any more. Publish what is returned: the good ones, while their tier serves."""
        ended = [*good, *bad]
        if len(set(ended)) != len(ended) or not self._open.issuperset(ended):
            raise IntegrityError(f"no fetch writes all of {ended}")
        self._open.difference_update(ended)
        serving = [place for place in good if place.tier in self._tiers.serving]
        self._tiers.discard([place for place in ended if place not in serving])
        return self._tiers.publish(serving)

    def targets(self) -> list[Place]:
        """The places that fetches write."""
        return list(self._open)
