"""What has to be told next of a store's blocks: what the Directory's log and the event stream's have in common.

The theory. Just before a block becomes READY in a tier, or ceases to be, its table calls `touch`. The log notes how it
was *then*, once; who takes it compares with *now*. So what comes and goes between two takes makes nothing to tell.

A stream begins with what is held: a walk through the slots, a few at a time, since a copy of a large index would hold
the store's lock for long. What is touched meanwhile is told as it is at that time, wherever the walk is.

When more than `limit` changes wait, because nobody takes them, they are dropped, and a new stream begins.
Not thread-safe; the owner of the book has the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from raykv.core.tiers import Tiers

LIMIT = 100_000
"""Waiting changes; about 15 MB."""

Then = TypeVar("Then")


class StreamLog(Generic[Then]):
    """Off until `begin`."""

    def __init__(self, tiers: Tiers, state: Callable[[bytes], Then], limit: int = LIMIT) -> None:
        """`state`: how a block is at this moment, as far as it is told."""
        self._tiers, self._state, self._limit = tiers, state, limit
        self._then: dict[bytes, Then] = {}
        self._on = self._fresh = False
        self._at: tuple[int, int] | None = None  # tier and slot from which on the walk has told nothing
        self.dropped = 0
        """How often too much was waiting."""

    @property
    def waiting(self) -> int:
        """Blocks that were touched and not taken."""
        return len(self._then)

    @property
    def walking(self) -> bool:
        """Whether not all that was held at the stream's beginning has been told yet."""
        return self._at is not None

    def begin(self) -> None:
        """A new stream."""
        self._then.clear()
        self._on = self._fresh = True
        self._at = (0, 0)

    def begin_again(self) -> None:
        """A new stream, if there is one: what was told may be wrong from now on."""
        if self._on:
            self.begin()

    def stop(self) -> None:
        """Nobody listens: note nothing until the next `begin`."""
        self._then.clear()
        self._on = self._fresh = False
        self._at = None

    def touch(self, key: bytes) -> None:
        """The block is about to become READY in a tier, or to cease to be."""
        if not self._on or key in self._then:
            return
        if len(self._then) >= self._limit:
            self.dropped += 1
            self.begin()
        self._then[key] = self._state(key)

    def take_fresh(self) -> bool:
        """Whether a stream begins with what is taken now; True once."""
        fresh, self._fresh = self._fresh, False
        return fresh

    def take(self, limit: int) -> Iterator[tuple[bytes, Then]]:
        """Up to `limit` blocks that were touched, each with how it was before."""
        then = self._then
        for _ in range(min(limit, len(then))):
            yield then.popitem()

    def walk(self, limit: int, told: Callable[[int], bool]) -> Iterator[bytes]:
        """Up to `limit` blocks more that are READY in the tiers that are `told`. To be used up: its end is noted."""
        if self._at is None or limit <= 0:
            return
        first, slot = self._at
        tables = self._tiers.tables
        for tier in range(first, len(tables)):
            table = tables[tier]
            found = table.ready_from(slot) if told(tier) else None
            while found is not None:
                yield table.key(found)
                limit, slot = limit - 1, found + 1
                if not limit:
                    self._at = (tier, slot)
                    return
                found = table.ready_from(slot)
            slot = 0
        self._at = None
