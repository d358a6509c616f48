"""What a store has to tell the event stream: in which media each block lies, and what changes.

As `content_log`, which see, but by medium: just before a block becomes READY in a tier, or ceases to be, the log notes
where it lay *then*, once; `take` says where it lies *now*, unless that is the same. What is said of a block replaces
what was said before, so that to say it twice changes nothing. Shared tiers count too: as far as this store knows.
Not thread-safe; the owner of the book has the lock.
"""

from __future__ import annotations

from typing import NamedTuple

from raykv.core.tiers import Tiers
from raykv.event_messages import MEDIUM_BIT

LIMIT = 100_000
"""Waiting changes; about 15 MB."""


class Lying(NamedTuple):
    """`now`: by block the media that it lies in (MEDIUM_BIT), 0: none. The rest as in `content_log.Changes`."""

    fresh: bool
    now: dict[bytes, int]
    whole: bool
    more: bool


class MediaLog:
    """Off until `begin`."""

    def __init__(self, tiers: Tiers, limit: int = LIMIT) -> None:
        self._tiers, self._limit = tiers, limit
        self._touched: dict[bytes, int] = {}
        self._on = self._fresh = False
        self._walk: tuple[int, int] | None = None  # tier and slot from which on nothing has been told
        self.dropped = 0
        """How often too much was waiting."""

    @property
    def waiting(self) -> int:
        return len(self._touched)

    def begin(self) -> None:
        """A new stream."""
        self._touched.clear()
        self._on = self._fresh = True
        self._walk = (0, 0)

    def stop(self) -> None:
        """Nobody listens: note nothing until the next `begin`."""
        self._touched.clear()
        self._on = self._fresh = False
        self._walk = None

    def touch(self, key: bytes) -> None:
        """The block is about to become READY in a tier, or to cease to be."""
        if not self._on or key in self._touched:
            return
        if len(self._touched) >= self._limit:
            self.dropped += 1
            self.begin()
        self._touched[key] = self._media(key)

    def tiers_changed(self) -> None:
        """A tier is asked nothing any more, or there is another one."""
        if self._on:
            self.begin()

    def take(self, limit: int) -> Lying:
        """Up to `limit` blocks to tell of next. About a microsecond each."""
        fresh, self._fresh = self._fresh, False
        now: dict[bytes, int] = {}
        touched, walking = self._touched, self._walk is not None
        for _ in range(min(limit, len(touched))):
            key, was = touched.popitem()
            media = self._media(key)
            if walking or media != was:
                now[key] = media
        if walking:
            self._walk_on(now, limit - len(now))
        whole = self._walk is None
        return Lying(fresh, now, whole, more=not whole or bool(touched))

    def _media(self, key: bytes) -> int:
        tiers, found = self._tiers, 0
        for tier in tiers.serving:
            if tiers.tables[tier].find(key) is not None:
                found |= MEDIUM_BIT[tiers.media[tier]]
        return found

    def _walk_on(self, now: dict[bytes, int], limit: int) -> None:
        assert self._walk is not None
        tier, slot = self._walk
        tables = self._tiers.tables
        for _ in range(limit):
            while tier < len(tables):
                found = tables[tier].ready_from(slot) if tier in self._tiers.serving else None
                if found is not None:
                    key = tables[tier].key(found)
                    now[key] = self._media(key)
                    slot = found + 1
                    break
                tier, slot = tier + 1, 0
            else:
                self._walk = None
                return
        self._walk = (tier, slot)
