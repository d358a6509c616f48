"""What a store has to tell the Directory: which blocks it holds, and what changes.

The theory. Just before a block becomes READY in a tier, or ceases to be, its table calls `touch`. The log notes
whether the store held the block *then*, once; `take` compares with *now*. So a copy that goes while another tier has
one, and a block that comes and goes between two calls, make nothing to tell.

A stream begins with what is held: `take` walks through the slots, a few at a time, since a copy of a large index would
hold the store's lock for long. What is touched meanwhile is told as it is at that time, wherever the walk is: to add
twice, or to remove what was not added, changes nothing.

When more than `limit` changes wait, because nobody takes them, they are dropped, and a new stream begins.
Not thread-safe; the owner of the book has the lock.
"""

from __future__ import annotations

from typing import NamedTuple

from raykv.core.media_log import MediaLog
from raykv.core.tiers import Tiers

LIMIT = 100_000
"""Waiting changes; about 15 MB."""


class Changes(NamedTuple):
    """`fresh`: a stream begins with it. `whole`: all that was held at its beginning has been told by now.

    `more`: there is more to take now.
    """

    fresh: bool
    added: list[bytes]
    removed: list[bytes]
    whole: bool
    more: bool


class ContentLog:
    """Off until `begin`."""

    def __init__(self, tiers: Tiers, limit: int = LIMIT) -> None:
        self._tiers = tiers
        self._limit = limit
        self._touched: dict[bytes, bool] = {}
        self._on = self._fresh = False
        self._walk: tuple[int, int] | None = None  # tier and slot from which on nothing has been told
        self.dropped = 0
        """How often too much was waiting."""
        self.media = MediaLog(tiers)
        """The same by medium, for the event stream; off until somebody listens."""

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
        self.media.touch(key)
        if not self._on or key in self._touched:
            return
        if len(self._touched) >= self._limit:
            self.dropped += 1
            self.begin()
        self._touched[key] = self._tiers.own(key)

    def tier_off(self) -> None:
        """A tier is asked nothing any more: what it alone held is gone."""
        self.media.tiers_changed()
        if self._on:
            self.begin()

    def take(self, limit: int) -> Changes:
        """Up to `limit` keys to tell next. Costs about a microsecond each."""
        fresh, self._fresh = self._fresh, False
        added: list[bytes] = []
        removed: list[bytes] = []
        held, touched, walking = self._tiers.own, self._touched, self._walk is not None
        for _ in range(min(limit, len(touched))):
            key, was = touched.popitem()
            if not held(key):
                if was:
                    removed.append(key)
            elif walking or not was:
                added.append(key)
        if walking:
            self._walk_on(added, limit - len(added) - len(removed))
        whole = self._walk is None
        return Changes(fresh, added, removed, whole, more=not whole or bool(touched))

    def _walk_on(self, added: list[bytes], limit: int) -> None:
        assert self._walk is not None
        tier, slot = self._walk
        for _ in range(limit):
            while tier < len(self._tiers.tables):
                told = tier in self._tiers.serving and tier not in self._tiers.shared  # what all have is nobody's
                found = self._tiers.tables[tier].ready_from(slot) if told else None
                if found is not None:
                    added.append(self._tiers.tables[tier].key(found))
                    slot = found + 1
                    break
                tier, slot = tier + 1, 0
            else:
                self._walk = None
                return
        self._walk = (tier, slot)
