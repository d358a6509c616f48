"""The merged stream of KV events without its sockets: what stores tell becomes numbered messages that can be replayed.

A replay from a number that is still kept is the messages from there on. Any other, and one from 0, is a snapshot: first
AllBlocksCleared (topic EVERYTHING), then all that is held, numbered up to the last message before it began, so that who
has read it goes on with the next one. What changed while it was read is in those.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from raykv.actors import event_wire
from raykv.core.event_book import EventBook, Message
from raykv.core.event_log import EventLog, Numbered
from raykv.event_messages import Tell
from raykv.types import StoreLife


class EventSource:
    """Any thread."""

    def __init__(self, int_hashes: bool = True, log: EventLog | None = None) -> None:
        self._int_hashes = int_hashes
        self._book = EventBook()
        self._log = log if log is not None else EventLog(time.time())  # an empty one is falsy
        self._lock = threading.Lock()  # around book and log
        self._told_at = time.monotonic()
        self.counts: Counter[str] = Counter()
        """Since the start: messages, replays, snapshots."""
        self.wake: Callable[[], None] = lambda: None
        """Called, with the lock held, when there is a message more."""

    # -- what stores tell -----------------------------------------------------------------------------------

    def publish(self, batch: Tell) -> bool:
        """Take a batch; whether the store must begin a new stream. Raises ValueError for one that can't be read."""
        with self._lock:
            again, messages = self._book.tell(batch, time.monotonic())
            self._tell(messages)
        return again

    def leave(self, node: str, store: str, life: StoreLife) -> None:
        """A store ends in order."""
        with self._lock:
            self._tell(self._book.leave(node, store, life))

    def forget_nodes(self, nodes: Iterable[str]) -> None:
        """These nodes are gone."""
        with self._lock:
            self._tell(self._book.forget_nodes(nodes))

    def forget_silent(self, before: float) -> None:
        """Stores that were last heard before that (monotonic) time are gone."""
        with self._lock:
            self._tell(self._book.forget_silent(before))

    def sign_of_life(self, after_s: float) -> None:
        """An empty message, if there was none for so long: else who missed the last one would not know it."""
        with self._lock:
            if time.monotonic() - self._told_at >= after_s:
                self._add(event_wire.EVERYTHING, event_wire.batch([]))

    def _tell(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._add(event_wire.topic(message), event_wire.payload(message, self._int_hashes))

    def _add(self, topic: bytes, payload: bytes) -> None:
        self._log.add(topic, payload)
        self.counts["messages"] += 1
        self._told_at = time.monotonic()
        self.wake()

    # -- what readers get -----------------------------------------------------------------------------------

    @property
    def last(self) -> int:
        """The number of the last message."""
        return self._log.last

    def after(self, number: int) -> Numbered | None:
        """The first message that is kept behind this number; None: there is none yet."""
        with self._lock:
            return self._log.get(max(number + 1, self._log.oldest))

    def replay(self, number: int) -> Iterator[Numbered]:
        """All from a number on, up to now; made as it is read, each message in its own hold of the lock."""
        with self._lock:
            self.counts["replays"] += 1
            if number and self._log.has_all_from(number):
                return self._kept(number)
            self.counts["snapshots"] += 1
            snapshot = self._book.snapshot()
            return self._numbered(self._log.last - snapshot.total, snapshot.messages)

    def _kept(self, number: int) -> Iterator[Numbered]:
        while True:
            with self._lock:
                message = self._log.get(number)
            if (
                message is None
            ):  # the end; or who reads is so slow that they have gone, which he sees by what comes next
                return
            yield message
            number += 1

    def _numbered(self, first: int, messages: Iterator[Message]) -> Iterator[Numbered]:
        yield Numbered(first, event_wire.EVERYTHING, event_wire.cleared())
        number = first
        while True:
            with self._lock:
                message = next(messages, None)
            if message is None:
                return
            number += 1
            yield Numbered(number, event_wire.topic(message), event_wire.payload(message, self._int_hashes))

    # -- figures --------------------------------------------------------------------------------------------

    def figures(self) -> tuple[int, int, int, int, int]:
        """The last number; stores; blocks, and of them those without a name; messages that are kept."""
        with self._lock:
            return self._log.last, self._book.stores, *self._book.blocks, len(self._log)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the book agrees with itself."""
        with self._lock:
            self._book.check_integrity()
