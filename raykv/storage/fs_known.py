"""What one node knows of a shared directory: numbered entries, in the place of the headers that other pools keep.

An entry is knowledge, not a block: the file may be gone, and files may be there that no entry is about.
"""

from __future__ import annotations

import time

from raykv.admin_messages import NO_TENANT
from raykv.storage.headers import Header, SlotState

_FREE = Header(SlotState.FREE)


class KnownFiles:
    """As `SlotHeaders`, in memory alone. Any thread; who may change an entry is the caller's business."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._headers: list[Header] = [_FREE] * slots
        self._seen_at = [0.0] * slots

    def publish(self, slot: int, key: bytes, nbytes: int, checksum: int | None, tenant: bytes = NO_TENANT) -> None:
        """The file was there just now. `tenant` is known for what this node wrote: files don't say it."""
        self._seen_at[slot] = time.monotonic()
        self._headers[slot] = Header(SlotState.READY, key, nbytes, checksum, tenant=tenant)

    def grow(self, slots: int) -> None:
        """So many entries from now on, not fewer than before."""
        more = max(0, slots - self.slots)
        self._seen_at += [0.0] * more
        self._headers += [_FREE] * more
        self.slots += more

    def seen(self, slot: int) -> None:
        """The file was there just now, once more."""
        self._seen_at[slot] = time.monotonic()

    def age_s(self, slot: int) -> float:
        """Seconds since the file was seen."""
        return time.monotonic() - self._seen_at[slot]

    def clear(self, slot: int) -> None:
        self._headers[slot] = _FREE

    def quarantine(self, slot: int) -> None:
        """The file is gone, or was bad. The entry can be used again: it is no medium."""
        self.clear(slot)

    def read(self, slot: int) -> Header:
        return self._headers[slot]

    def quarantined(self) -> list[int]:
        return []
