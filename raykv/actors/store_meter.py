"""What a store counts of its own work beside the book: bytes by medium and direction, how long things took, faults.

Called once for each job, never for each block; a call costs a microsecond and holds a lock of its own for it. What was
counted is read as plain numbers (`NodeStore.metrics`).
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from raykv.core.histogram import Histogram

LARGE = 256 << 10
"""The rate of fewer bytes says more of overheads and caches than of the medium."""

READ, WRITE = "read", "write"
ENGINE, MOVE, PEER = "engine", "move", "peer"
"""Why bytes went to or from a medium: for an engine, to another tier, for a peer's blocks."""
LOOK_UP, LOAD, SAVE, REACH = "look_up", "load", "save", "reach"
"""What is timed; `REACH` is the part of a look-up that asks other nodes."""


class Meter:
    """One per store. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[str, str, str]] = Counter()
        self._busy: dict[tuple[str, str, str], float] = {}
        self._best: dict[tuple[str, str], float] = {}
        self._seconds = {what: Histogram() for what in (LOOK_UP, LOAD, SAVE, REACH)}
        self._faults: Counter[str] = Counter()

    def moved(self, medium: str, direction: str, why: str, nbytes: int, seconds: float) -> None:
        """Bytes were read from a medium, or written to it, and it took so long."""
        if not nbytes:
            return
        with self._lock:
            at = (medium, direction, why)
            self._bytes[at] += nbytes
            self._busy[at] = self._busy.get(at, 0.0) + seconds
            if nbytes >= LARGE and seconds > 0:
                rate = nbytes / seconds
                if rate > self._best.get((medium, direction), 0.0):
                    self._best[medium, direction] = rate

    def took(self, what: str, seconds: float) -> None:
        """A look-up, a load or a save took so long."""
        with self._lock:
            self._seconds[what].add(seconds)

    def fault(self, cause: str) -> None:
        """Something went wrong. `cause` is one of a few fixed words."""
        with self._lock:
            self._faults[cause] += 1

    def read(self) -> dict[str, Any]:
        """All of it: `bytes` and `busy_s` by (medium, direction, why), `best` bytes/s by (medium, direction), `seconds`
        as Buckets by what was timed, `faults` by cause."""
        with self._lock:
            return {
                "bytes": dict(self._bytes),
                "busy_s": dict(self._busy),
                "best": dict(self._best),
                "seconds": {what: histogram.read() for what, histogram in self._seconds.items()},
                "faults": dict(self._faults),
            }
