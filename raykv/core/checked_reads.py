"""Slots that are read on an operator's order: to be checked where they lie, or to be copied up to the fastest tier.

The theory. While it is read a slot has a pin. What is copied up (a *lift*) has a WRITING slot of the fastest tier from
`begin_lifts` to `end_lift`, as a move has, and is only begun where nothing is lost for it: into a free slot, or into
one whose block lies in a slower tier too. Its source stays where it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from raykv.core.store_plans import Move, MovePlan, Place, Published
from raykv.core.tiers import Tiers
from raykv.errors import IntegrityError


class CheckedReads:
    """The reads that run. Not thread-safe; the owner of the book has the lock."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._reads: Counter[Place] = Counter()
        self._lifts: dict[Place, Move] = {}  # by target

    def begin(self, tier: int, first: int, most: int) -> tuple[list[Published], int | None]:
        """The next READY blocks of a tier from slot `first` on, pinned until `end`; where to go on, None at the end."""
        if tier not in self._tiers.serving:
            return [], None
        table = self._tiers.tables[tier]
        found: list[Published] = []
        slot = table.ready_from(first)
        while slot is not None and len(found) < most:
            found.append((table.key(slot), Place(tier, slot)))
            slot = table.ready_from(slot + 1)
        places = [place for _, place in found]
        self._tiers.pin(places)
        self._reads.update(places)
        return found, slot

    def end(self, place: Place, ok: bool) -> bool:
        """It is not read any more. Whether it is quarantined by that: not `ok`, and nobody else has done so yet."""
        if self._reads[place] < 1:
            raise IntegrityError(f"{place} is not being read")
        self._reads[place] -= 1
        self._reads += Counter()  # without the zeros
        self._tiers.unpin([place])
        return not ok and self._tiers.is_ready(place) and self._tiers.quarantine(place)

    def begin_lifts(self, places: Sequence[Place]) -> MovePlan:
        """Copy what is READY there and not in the fastest tier up to it, as far as there is room, from the first on."""
        tiers, target = self._tiers, self._tiers.fastest
        if target is None:
            return MovePlan()
        table = tiers.tables[target]
        wanted: dict[bytes, Place] = {}
        for place in places:
            if place.tier in tiers.serving and tiers.is_ready(place) and not table.holds(key := tiers.key(place)):
                wanted.setdefault(key, place)
        sources = list(wanted.values())
        tiers.pin(sources)  # making room must not take them
        clear = tiers.make_room(target, len(sources), lossless=True)
        kept = sources[: table.free]
        tiers.unpin(sources[len(kept) :])
        keys = list(wanted)[: len(kept)]
        slots = table.reserve(keys) or []
        moves = [Move(k, s, Place(target, slot)) for k, s, slot in zip(keys, kept, slots, strict=True)]
        self._lifts.update((move.target, move) for move in moves)
        return MovePlan(tuple(moves), tuple(clear))

    def end_lift(self, move: Move, ok: bool, bad_source: bool) -> list[Published]:
        """A copy has ended: publish what is returned. `bad_source`: the source failed its check; so its header says."""
        if self._lifts.get(move.target) != move:
            raise IntegrityError(f"{move} does not run")
        del self._lifts[move.target]
        tiers = self._tiers
        tiers.unpin([move.source])
        if bad_source:
            tiers.quarantine(move.source)
        if not ok or bad_source or not tiers.is_ready(move.source) or move.target.tier not in tiers.serving:
            tiers.discard([move.target])
            return []
        return tiers.publish([move.target])

    def pinned(self) -> Counter[Place]:
        """By place: how many pins are these reads'."""
        return self._reads + Counter(move.source for move in self._lifts.values())

    def targets(self) -> list[Place]:
        """The places that lifts write."""
        return list(self._lifts)
