"""Tells the Directory what a store holds: one thread of the store's, one batch on its way at a time.

It never makes the store wait: it has the store's lock for a millisecond at a time, and what it could not send is
bounded by the log (`core.content_log`), which begins anew when too much has gathered. While there is no Directory
nothing is logged at all; once there is, it is told everything.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from raykv.actors.directory_call import DirectoryCaller, FindDirectory
from raykv.core.block_marks import pack_keys
from raykv.core.content_log import ContentLog
from raykv.directory_messages import Publish, PublishReply
from raykv.errors import HostError, HostTimeout, RayKVError
from raykv.types import StoreLife

logger = logging.getLogger("raykv")

PERIOD_S = 0.1
BATCH_KEYS = 10_000
"""80 KB: larger messages than 100 KB take Ray's object store."""
LOCK_KEYS = 1000
"""Keys for one hold of the store's lock: about a millisecond."""
HEARTBEAT_S = 5.0
ANSWER_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0
LEAVE_S = 1.0


class Log(Protocol):
    """What a publisher tells of; the store's lock is held around each call."""

    def begin(self) -> None: ...

    def stop(self) -> None: ...


class Publisher:
    """Started by `start`, ended by `close`. `step` is what its thread does, for tests without one."""

    longest_pause_s = LONGEST_PAUSE_S
    """Between two looks for a Directory that is not there."""

    def __init__(
        self,
        content: Log,
        lock: AbstractContextManager[object],
        find: FindDirectory,
        node: str,
        store: str,
        life: StoreLife,
    ) -> None:
        """`lock` is the one around the store's book. `store` is the name of its actor, `node` its node's id."""
        self._content, self._lock, self._find = content, lock, find
        self._node, self._store, self._life = node, store, life
        self._caller: DirectoryCaller | None = None
        self._unsent: Any = None  # sent, perhaps more than once, and not answered yet
        self._stream, self._number = -1, 0
        self._more = False  # than is in the last batch
        self._failures = 0
        self._sent_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raykv-publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop, and tell the Directory that the store is gone, if it hears it within LEAVE_S."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(LEAVE_S)
        caller = self._caller
        if caller is not None:
            with suppress(HostError):
                caller.call("leave", self._node, self._store, self._life, timeout=LEAVE_S)

    def _run(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            try:
                pause = self.step(time.monotonic())
            except Exception:  # a defect; the store serves on, and the Directory forgets it after a while
                logger.exception("publishing what store %s holds", self._store)
                self._lose()
                pause = self.longest_pause_s

    def step(self, now: float) -> float:
        """Send one batch, if there is something to say; in how many seconds to come again. May block for ANSWER_S."""
        if self._caller is None and not self._found():
            return self._pause()
        assert self._caller is not None
        batch = self._unsent or self._next(now)
        if batch is None:
            return PERIOD_S
        self._unsent = batch
        try:
            reply: PublishReply = self._caller.call("publish", batch, timeout=ANSWER_S)
        except HostTimeout:  # it may have been taken: the same batch again is refused without harm
            return self._pause()
        except HostError as error:
            logger.info("store %s publishes no more for now: %s", self._store, error)
            self._lose()
            return self._pause()
        self._unsent, self._sent_at = None, now
        if reply.again:
            with self._lock:
                self._content.begin()
            return self._pause()
        self._failures = 0
        return 0.0 if self._more else PERIOD_S

    def _found(self) -> bool:
        """Look for the Directory. A new one is told everything."""
        try:
            self._caller = self._find()
        except RayKVError as error:
            logger.debug("store %s finds no Directory: %s", self._store, error)
        if self._caller is None:
            return False
        with self._lock:
            self._content.begin()
        return True

    def _lose(self) -> None:
        self._caller = self._unsent = None
        with self._lock:
            self._content.stop()

    def _pause(self) -> float:
        """Doubles with each failure; at random, so that not all stores come at once to a Directory that is back."""
        longest = min(self.longest_pause_s, FIRST_PAUSE_S * 2 ** min(self._failures, 20))
        self._failures += 1
        return longest * random.uniform(0.5, 1.0)

    def _next(self, now: float) -> Any:
        """The next batch; None: there is nothing to say."""
        assert isinstance(self._content, ContentLog)
        last: dict[bytes, bool] = {}  # a key may be told of twice: what was said last holds
        fresh, whole, self._more = False, True, True
        while self._more and len(last) <= BATCH_KEYS - LOCK_KEYS:
            with self._lock:
                changes = self._content.take(LOCK_KEYS)
            if changes.fresh:
                last.clear()
                fresh = True
            last.update(dict.fromkeys(changes.removed, False))
            last.update(dict.fromkeys(changes.added, True))
            whole, self._more = changes.whole, changes.more
        if fresh:
            self._stream, self._number = self._stream + 1, 0
        elif not last and now - self._sent_at < HEARTBEAT_S:
            return None
        batch = Publish(
            self._node,
            self._store,
            self._life,
            self._stream,
            self._number,
            pack_keys(key for key, held in last.items() if held),
            pack_keys(key for key, held in last.items() if not held),
            whole,
        )
        self._number += 1
        return batch
