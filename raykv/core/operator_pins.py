"""Blocks that an operator keeps from eviction until a time.

The theory. A pin is a set of keys and, of each, the one place where it is kept: that slot has one pin in its table, as
a lease's has. It is built up part by part (`add`), since to look for its blocks takes a while, and what was found must
not go meanwhile; what turns out to be too much is taken back as a whole. When it ends the blocks are like any others.

Times are seconds since the epoch: a pin outlives the store's process, and `all` is what its owner keeps of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from raykv.core.store_plans import Place, Published
from raykv.core.tiers import Tiers
from raykv.errors import IntegrityError, StoreError

SHARE = 0.9
"""Of a tier's slots all pins together may keep so many: the rest must serve everybody else."""
MOST_BLOCKS = 200_000
"""Of all pins: they are written down, 49 bytes each, whenever one is made or ends."""
MOST_PINS = 1000


@dataclass(slots=True, eq=False)
class Pin:
    """`places` by key."""

    number: str
    expires: float
    note: str
    places: dict[bytes, Place] = field(default_factory=dict)


class OperatorPins:
    """The pins of one store. Not thread-safe; the owner of the book has the lock."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._pins: dict[str, Pin] = {}
        self._kept: Counter[Place] = Counter()
        self._by_tier: Counter[int] = Counter()  # of slots that are kept, by one pin or several

    def begin(self, number: str, expires: float, note: str) -> Pin:
        """A pin without a block. Raises StoreError if there are too many, IntegrityError if there is one of it."""
        if number in self._pins:
            raise IntegrityError(f"there is a pin {number} already")
        if len(self._pins) >= MOST_PINS:
            raise StoreError(f"There are {len(self._pins)} pins already: `unpin` one before {number} is made.")
        pin = self._pins[number] = Pin(number, expires, note)
        return pin

    def add(self, number: str, found: Sequence[Published]) -> None:
        """Keep these READY blocks too, each in the first place that is given; those of a shared tier are passed over.

        Raises StoreError if it would be too much; then nothing of this call is kept, and the caller ends the pin.
        """
        pin = self._pins.get(number)
        if pin is None:
            raise StoreError(f"The time of pin {number} was over before all its blocks were found: give it more.")
        new: dict[bytes, Place] = {}
        for key, place in found:
            if key not in pin.places and place.tier not in self._tiers.shared:
                new.setdefault(key, place)
        if self._kept.total() + len(new) > MOST_BLOCKS:
            raise StoreError(f"Pins keep {MOST_BLOCKS:,} blocks at most, and with {number} they would keep more.")
        more = Counter(place.tier for place in set(new.values()) if place not in self._kept)
        for tier, count in more.items():
            slots = self._tiers.tables[tier].slots
            if self._by_tier[tier] + count > SHARE * slots:
                raise StoreError(
                    f"Pins keep {SHARE:.0%} of a tier at most, {int(SHARE * slots):,} of the {slots:,} blocks of the "
                    f"{self._tiers.media[tier]} tier: select less for {number}, or `unpin` another one first."
                )
        self._tiers.pin(new.values())
        pin.places.update(new)
        self._count(new.values())

    def end(self, number: str) -> Pin | None:
        """The pin is over; None if there is none of this number."""
        pin = self._pins.pop(number, None)
        if pin is not None:
            self._count_off(pin.places.values())
            self._tiers.unpin(pin.places.values())
        return pin

    def expire(self, now: float) -> list[Pin]:
        """End those that are past their time."""
        late = [pin.number for pin in self._pins.values() if pin.expires <= now]
        return [pin for number in late if (pin := self.end(number)) is not None]

    def hand_on(self, key: bytes, source: Place, target: Place) -> None:
        """The block lies in `target` too (READY), and is kept there from now on rather than in `source`."""
        for pin in self._holding(key, source):
            self._tiers.pin([target])
            pin.places[key] = target
            self._count([target])
            self._count_off([source])
            self._tiers.unpin([source])

    def holders(self, key: bytes, place: Place) -> list[str]:
        """The numbers of the pins that keep the block there."""
        return [pin.number for pin in self._holding(key, place)]

    def keep_again(self, key: bytes, numbers: Iterable[str], target: Place) -> None:
        """The block was moved within its tier, where it was nowhere for a moment, and is READY in `target`: those of
        these pins that are not over keep it again."""
        for number in numbers:
            pin = self._pins.get(number)
            if pin is not None and key not in pin.places:
                self._tiers.pin([target])
                pin.places[key] = target
                self._count([target])

    def lost(self, key: bytes, place: Place) -> None:
        """The block ceases to be READY there, whoever keeps it: it has rotted, or its tier goes."""
        for pin in self._holding(key, place):
            del pin.places[key]
            self._count_off([place])
            self._tiers.unpin([place])

    def _holding(self, key: bytes, place: Place) -> list[Pin]:
        if place not in self._kept:
            return []
        return [pin for pin in self._pins.values() if pin.places.get(key) == place]

    def _count(self, places: Iterable[Place]) -> None:
        for place in places:
            self._by_tier[place.tier] += not self._kept[place]
            self._kept[place] += 1

    def _count_off(self, places: Iterable[Place]) -> None:
        for place in places:
            self._kept[place] -= 1
            if not self._kept[place]:
                del self._kept[place]
                self._by_tier[place.tier] -= 1

    # -- questions ------------------------------------------------------------------------------------------

    @property
    def any(self) -> bool:
        """Whether anything is kept."""
        return bool(self._pins)

    def get(self, number: str) -> Pin | None:
        return self._pins.get(number)

    def all(self) -> tuple[Pin, ...]:
        """In the order in which they were made."""
        return tuple(self._pins.values())

    def expires(self, key: bytes) -> float:
        """Until when the block is kept; 0.0: by no pin."""
        return max((pin.expires for pin in self._pins.values() if key in pin.places), default=0.0)

    def pinned(self) -> Counter[Place]:
        """By place: how many pins are operators'."""
        return Counter(place for pin in self._pins.values() for place in pin.places.values())

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the counts agree, and each place has the block that it is kept for."""
        pinned = self.pinned()
        if pinned != self._kept or Counter(place.tier for place in pinned) != +self._by_tier:
            raise IntegrityError(f"pins keep {pinned}, and are counted as {self._kept}, {self._by_tier}")
        for pin in self._pins.values():
            for key, place in pin.places.items():
                if not self._tiers.is_ready(place) or self._tiers.key(place) != key:
                    raise IntegrityError(f"pin {pin.number} keeps {place} for a block that is not there")
