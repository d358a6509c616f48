"""The scrubber's round: every READY slot in turn, one at a time, pinned while it is read."""

from __future__ import annotations

from collections import Counter

from raykv.core.store_plans import Place, Published
from raykv.core.tiers import Tiers
from raykv.errors import IntegrityError

STEPS = 64
"""One call passes over so many pinned slots at most."""


class Scrub:
    """Which slots are being checked, and where each tier's round stands. Not thread-safe."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._next: dict[int, int] = {}
        self._checked: set[Place] = set()

    def begin(self, tier: int) -> Published | None:
        """The next READY slot without a pin; None if there is none in sight, and at the end of a round."""
        if tier not in self._tiers.serving:
            return None
        table = self._tiers.tables[tier]
        for _ in range(STEPS):
            slot = table.ready_from(self._next.get(tier, 0))
            if slot is None:
                self._next[tier] = 0
                return None
            self._next[tier] = slot + 1
            if not table.pins(slot):
                place = Place(tier, slot)
                self._tiers.pin([place])
                self._checked.add(place)
                return table.key(slot), place
        return None

    def end(self, place: Place, ok: bool) -> bool:
        """Whether the slot is quarantined by this check."""
        if place not in self._checked:
            raise IntegrityError(f"{place} is not being checked")
        self._checked.remove(place)
        self._tiers.unpin([place])
        return not ok and self._tiers.quarantine(place)

    def pinned(self) -> Counter[Place]:
        """By place: how many pins are the scrubber's."""
        return Counter(list(self._checked))
