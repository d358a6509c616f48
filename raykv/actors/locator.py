"""Asks the Directory who holds a prefix. Never waits and never fails: without a Directory, nobody holds anything.

One thread of its own looks for the Directory and ends questions that are past their time. Ray restarts a Directory
under the same handle, so it is looked for again only when a call says that it is gone.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from raykv.actors.directory_call import DirectoryCaller, FindDirectory
from raykv.directory_messages import Locate, Located
from raykv.errors import HostDied, HostError, RayKVError

logger = logging.getLogger("raykv")

NOBODY = Located(())
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0

Found = Callable[[Located], None]
"""Called once, in a thread of somebody else's, so it must be short."""


class _Question:
    """One question; the first answer counts, be it that time is up."""

    def __init__(self, done: Found) -> None:
        self._done: Found | None = done
        self._lock = threading.Lock()

    def answer(self, located: Located) -> None:
        with self._lock:
            done, self._done = self._done, None
        if done is not None:
            done(located)


class Locator:
    """Every method may be called from any thread."""

    def __init__(self, find: FindDirectory) -> None:
        self._find = find
        self._caller: DirectoryCaller | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._deadlines: list[tuple[float, int, _Question]] = []  # a heap
        self._numbers = itertools.count()
        self._next_search, self._pause = 0.0, FIRST_PAUSE_S
        self._threads = [
            threading.Thread(target=self._search, name="raykv-find-directory", daemon=True),
            threading.Thread(target=self._watch_deadlines, name="raykv-locate-limit", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def up(self) -> bool:
        """Whether a Directory was found and not lost since."""
        return self._caller is not None

    def locate(self, wanted: Locate, timeout: float, done: Found) -> None:
        """Ask; `done` hears within `timeout` seconds. Costs what a submit costs, 0.1 to 0.4 ms."""
        caller, question = self._caller, _Question(done)
        if caller is None:
            question.answer(NOBODY)
            return
        deadline = time.monotonic() + timeout
        with self._changed:
            earliest = not self._deadlines or deadline < self._deadlines[0][0]
            heapq.heappush(self._deadlines, (deadline, next(self._numbers), question))
            if earliest:
                self._changed.notify_all()

        def answered(located: Located | None, error: HostError | None) -> None:
            if error is not None:
                self._lost(caller, error)
            question.answer(located or NOBODY)

        try:
            caller.submit("locate", wanted, done=answered)
        except HostError as error:
            answered(None, error)

    def close(self) -> None:
        """Open questions are answered: nobody."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads[1].join()

    # -- parts ----------------------------------------------------------------------------------------------

    def _lost(self, caller: DirectoryCaller, error: HostError) -> None:
        logger.debug("a look-up in the Directory failed: %s", error)
        if isinstance(error, HostDied):
            with self._changed:
                if self._caller is caller:
                    self._caller, self._pause = None, FIRST_PAUSE_S
                    self._changed.notify_all()

    def _search(self) -> None:
        pause = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause)
                self._changed.wait_for(lambda: self._closed or self._caller is None)
                if self._closed:
                    return
            found = None
            try:
                found = self._find()
            except RayKVError as error:
                logger.debug("no Directory is found: %s", error)
            except Exception:
                logger.exception("looking for the Directory")
            with self._changed:
                self._caller = found
                pause = self._pause
                self._pause = FIRST_PAUSE_S if found is not None else min(2 * self._pause, LONGEST_PAUSE_S)

    def _watch_deadlines(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._deadlines or self._deadlines[0][0] > time.monotonic()):
                    left = self._deadlines[0][0] - time.monotonic() if self._deadlines else None
                    self._changed.wait(left)
                now = time.monotonic()
                late = []
                while self._deadlines and (self._closed or self._deadlines[0][0] <= now):
                    late.append(heapq.heappop(self._deadlines)[2])
                closed = self._closed
            for question in late:
                question.answer(NOBODY)
            if closed:
                return
