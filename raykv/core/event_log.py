"""The messages of a stream: numbered, and the last ones kept, for readers who missed some. No I/O.

Numbers go up by one. They begin with the time, so that a stream that was started anew goes on above the one before: who
reads it sees a gap, and asks for what it missed.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

MESSAGES = 10_000
NBYTES = 64 << 20
A_MILLISECOND = 1 << 20
"""Numbers: a stream that wrote as many messages in a millisecond, all its life, would run into the next one's."""


class Numbered(NamedTuple):
    """A message as it goes over the wire."""

    number: int
    topic: bytes
    payload: bytes


class EventLog:
    """Not thread-safe; its owner has a lock."""

    def __init__(self, started_s: float, messages: int = MESSAGES, nbytes: int = NBYTES) -> None:
        """`started_s`: since the epoch."""
        self.last = int(started_s * 1000) * A_MILLISECOND
        """The number of the last message."""
        self._kept: deque[Numbered] = deque()
        self._nbytes = 0
        self._messages, self._limit = messages, nbytes

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def oldest(self) -> int:
        """The first number that is kept; `last` + 1: none is."""
        return self.last - len(self._kept) + 1

    def add(self, topic: bytes, payload: bytes) -> None:
        """The next message. The oldest ones go, if there are too many or they are too large."""
        self.last += 1
        self._kept.append(Numbered(self.last, topic, payload))
        self._nbytes += len(payload)
        while len(self._kept) > self._messages or (self._nbytes > self._limit and len(self._kept) > 1):
            self._nbytes -= len(self._kept.popleft().payload)

    def get(self, number: int) -> Numbered | None:
        """None: it is not kept, or not written yet."""
        return self._kept[number - self.oldest] if self.oldest <= number <= self.last else None

    def has_all_from(self, number: int) -> bool:
        """Whether a reader who lacks this one and what follows can be given them."""
        return self.oldest <= number <= self.last + 1
