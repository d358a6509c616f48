"""Stores whose hints come to nothing: nobody waits for these for a while.

Engines that hash or lay out their blocks differently never find each other's, and every request would wait its whole
time for what can't come.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_IN_VAIN = 3
"""Times in a row that nothing at all came."""
PAUSE_S = 30.0
MOST_STORES = 1000
"""A hint may name any."""


@dataclass(slots=True)
class _Record:
    times: int = 0
    until: float = 0.0


class VainHints:
    """By the store that a hint names. `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def may(self, store: str, now: float) -> bool:
        """Whether it is worth to wait for what is announced there."""
        record = self._records.get(store)
        return record is None or record.times < MOST_IN_VAIN or now >= record.until

    def in_vain(self, store: str, since: float, now: float) -> bool:
        """Nothing came in all the time from `since` on; whether nobody waits from here on. Several that wait at once
        count as one."""
        if len(self._records) >= MOST_STORES and store not in self._records:
            self._records.clear()
        record = self._records.setdefault(store, _Record())
        if since < record.until:
            return False
        record.times += 1
        record.until = now + (PAUSE_S if record.times >= MOST_IN_VAIN else 0.0)
        return record.times >= MOST_IN_VAIN

    def well(self, store: str) -> None:
        """Something came."""
        self._records.pop(store, None)
