"""How many read each slot: one byte a slot, whatever the count, and changes by runs of slots at memory speed.

The theory. The byte of a slot is 0 for no pin, else the last digit of its count in base 255 with the digits 1 to 255;
the other digits are in a dictionary, for the few slots that more than 255 read at once. So "is it pinned" is one byte
also for those, and a run of slots is counted up or down by one `bytes.translate`.
"""

from __future__ import annotations

from raykv.errors import IntegrityError

BASE = 255
_UP = bytes((*range(1, BASE + 1), 1))
_DOWN = bytes((0, *range(BASE)))  # 1 becomes 0; where there are higher digits that is set right afterwards


class SlotPins:
    """The pins of one tier's slots. Not thread-safe. A run is `count` slots from `slot` on, all of them in range."""

    def __init__(self, slots: int) -> None:
        self._low = bytearray(slots)
        self._high: dict[int, int] = {}

    def none(self, slot: int) -> bool:
        """Whether nobody reads the slot."""
        return not self._low[slot]

    def count(self, slot: int) -> int:
        return self._low[slot] + BASE * self._high.get(slot, 0)

    def all(self) -> dict[int, int]:
        """By slot: its pins, where there are any. Reads all slots."""
        return {slot: self.count(slot) for slot, low in enumerate(self._low) if low}

    def any(self, slot: int) -> bool:
        """Whether a slot from this one on has a pin."""
        return self._low.count(0, slot) != len(self._low) - slot

    def resize(self, slots: int) -> None:
        """So many slots from now on; those that go have no pins."""
        if slots < len(self._low) and self.any(slots):
            raise IntegrityError(f"slots from {slots} on have pins")
        del self._low[slots:]
        self._low.extend(bytes(slots - len(self._low)))

    def add(self, slot: int, count: int) -> int:
        """One more reads each slot of a run; how many of them had no pin."""
        before = self._low[slot : slot + count]
        self._low[slot : slot + count] = before.translate(_UP)
        if BASE in before:
            for at in _where(before, BASE):
                self._high[slot + at] = self._high.get(slot + at, 0) + 1
        return before.count(0)

    def take(self, slot: int, count: int) -> int:
        """One less reads each slot of a run; how many of them have no pin now. Raises, and changes nothing, if one of
        them has none to give back."""
        before = self._low[slot : slot + count]
        if 0 in before:
            raise IntegrityError(f"slot {slot + before.index(0)} has no pin to give back")
        self._low[slot : slot + count] = before.translate(_DOWN)
        return before.count(1) - (self._borrow(slot, before) if self._high else 0)

    def _borrow(self, slot: int, before: bytearray) -> int:
        """Set right what has higher digits and lost its last one; how many that were."""
        short = [slot + at for at in _where(before, 1) if slot + at in self._high]
        for one in short:
            self._low[one] = BASE
            self._high[one] -= 1
            if not self._high[one]:
                del self._high[one]
        return len(short)

    def check_integrity(self) -> None:
        """Raise IntegrityError where a slot has higher digits and no last one."""
        wrong = [slot for slot, high in self._high.items() if high < 1 or not self._low[slot]]
        if wrong:
            raise IntegrityError(f"the pins of slots {wrong} are miscounted")


def _where(digits: bytearray, digit: int) -> list[int]:
    found, at = [], digits.find(digit)
    while at >= 0:
        found.append(at)
        at = digits.find(digit, at + 1)
    return found
