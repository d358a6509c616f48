"""Pauses between tries of what keeps failing: each is twice the one before, up to a limit; success for long resets."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

FIRST_S = 1.0
LONGEST_S = 60.0
SOUND_S = 120.0
"""What ran well for this long and fails then has failed for the first time."""


@dataclass
class _Record:
    failures: int = 0
    total: int = 0
    not_before: float = 0.0
    well_since: float | None = None


class Backoff:
    """By key. `now` is in seconds of any clock that does not go back."""

    def __init__(self) -> None:
        self._records: dict[Hashable, _Record] = {}

    def failed(self, key: Hashable, now: float) -> float:
        """It failed now; returns the pause in seconds."""
        record = self._records.setdefault(key, _Record())
        if record.well_since is not None and now - record.well_since >= SOUND_S:
            record.failures = 0
        record.well_since = None
        record.failures += 1
        record.total += 1
        pause: float = min(LONGEST_S, FIRST_S * 2 ** min(record.failures - 1, 30))
        record.not_before = now + pause
        return pause

    def well(self, key: Hashable, now: float) -> None:
        """It runs as it should."""
        record = self._records.get(key)
        if record is not None and record.well_since is None:
            record.well_since = now

    def may(self, key: Hashable, now: float) -> bool:
        """Whether it may be tried now."""
        record = self._records.get(key)
        return record is None or now >= record.not_before

    def failures(self, key: Hashable) -> int:
        """How often it failed, ever."""
        record = self._records.get(key)
        return 0 if record is None else record.total

    def forget(self, key: Hashable) -> None:
        """As if it had never failed."""
        self._records.pop(key, None)
