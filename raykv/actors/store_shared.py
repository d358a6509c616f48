"""Look-ups in a tier that all nodes share: what the book does not know is asked of the directory, for a short time.

Each look-up asks for the next blocks that its prefix lacks, file by file and many at a time, and no list of the
directory is kept. A list would be stale just where it counts, for blocks that another node wrote a moment ago, and to
refresh it every node would have to read all names again and again; a question costs a round trip or three, and a
prefix that is not there costs one question. By opening the file, not by its attributes: those an NFS client may have
cached, and an open asks the server. It also shows the header, so that a promise is rarely broken.

A directory that is slow delays nobody for long: after a round without any answer in time the next calls don't wait at
all for a while, and use what answers have come in since.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

from raykv.actors.store_stock import Stock
from raykv.admin_messages import NO_TENANT
from raykv.core.fs_lookup import Known, next_to_ask
from raykv.errors import DiskError
from raykv.storage.fs_header import BlockFile
from raykv.storage.fs_pool import FsPool

WAIT_S = 0.3
"""What one call of look-ups may wait: a third of the time that an engine waits for the answer (1 s by default)."""
SLOW_S = 10.0
FRESH_S = 30.0
"""What was seen so long ago is asked for again before it is promised: others evict it too."""
FIRST_ASKS, GROWTH, MOST_ASKS = 8, 4, 256
"""Per look-up and round: most prompts that are not there fail at the first."""
MOST_OPEN = 4096
"""Questions that have no answer yet. Beyond, none is asked: the directory does not keep up."""
HANGS_S = 20.0
CHECK_S = 10.0
CHECK = b""
"""In place of a key: whether the directory is there at all."""


class Prompt(NamedTuple):
    """As `StoreBook.look_up` has it, and the tag of whose it is (empty: nobody's), which no file says."""

    fingerprints: Sequence[bytes]
    windows: Sequence[int]
    hashes: bytes
    tenant: bytes = b""


@dataclass(eq=False)
class _Asked:
    future: Future[BlockFile | None] | Future[None]
    at: float
    tenant: bytes = b""


class SharedLookUps:
    """One per store, if it has a shared tier. Any thread; calls take turns."""

    def __init__(self, stock: Stock, tier: int, pool: FsPool, wait_s: float = WAIT_S) -> None:
        self._stock, self._tier, self._pool, self._wait_s = stock, tier, pool, wait_s
        self._asked: dict[bytes, _Asked] = {}
        self._turn = threading.Lock()
        self._slow_until = 0.0
        self._ended = False
        self._checked_at = time.monotonic()

    @classmethod
    def of(cls, stock: Stock) -> SharedLookUps | None:
        found = stock.tiers.shared()
        return cls(stock, *found) if found is not None else None

    def find(self, prompts: Sequence[Prompt]) -> None:
        """Let the book know what the directory has of these prompts. Blocks for `wait_s` at most."""
        deadline = time.monotonic() + self._wait_s
        if not self._turn.acquire(timeout=self._wait_s):
            return
        try:
            if self._ended or not self._stock.serves(self._tier):
                return
            self._find(prompts, deadline)
        except DiskError as error:
            self._stock.switch_off(self._tier, error)
        finally:
            self._turn.release()

    def end(self) -> None:
        """When this returns nothing is asked any more: the tier is gone. Blocks as `find` does."""
        with self._turn:
            self._ended = True

    def _find(self, prompts: Sequence[Prompt], deadline: float) -> None:
        self._take_in()
        self._check()
        absent: set[bytes] = set()
        most = FIRST_ASKS
        while True:
            fresh = self._to_ask(prompts, absent, most)
            if not fresh:
                return
            self._ask(fresh)
            mine: list[Future[Any]] = [self._asked[key].future for key in fresh if key in self._asked]
            now = time.monotonic()
            if not mine or now < self._slow_until:
                return
            done, late = wait(mine, max(0.0, deadline - now))
            absent.update(self._take_in())
            if not done:
                self._slow_until = time.monotonic() + SLOW_S
            if late:
                return
            most = min(most * GROWTH, MOST_ASKS)

    def _to_ask(self, prompts: Sequence[Prompt], absent: set[bytes], most: int) -> dict[bytes, bytes]:
        """By key: whose it is."""
        book, headers = self._stock.book, self._pool.headers

        def known(key: bytes) -> Known:
            if key in absent:
                return Known.ABSENT
            place = book.find(key)
            if place is None or (place.tier == self._tier and headers.age_s(place.slot) > FRESH_S):
                return Known.UNKNOWN
            return Known.HELD

        keys: dict[bytes, bytes] = {}
        for fingerprints, windows, hashes, tenant in prompts:
            with self._stock.lock:
                keys.update(dict.fromkeys(next_to_ask(known, fingerprints, windows, hashes, most), tenant))
        return keys

    def _ask(self, keys: Mapping[bytes, bytes]) -> None:
        now = time.monotonic()
        for key, tenant in keys.items():
            if key not in self._asked and len(self._asked) < MOST_OPEN:
                self._asked[key] = _Asked(self._pool.look(key), now, tenant)

    def _take_in(self) -> list[bytes]:
        """Answers that have come; the keys that are absent. Raises a fatal DiskError, also if there are none for
        long."""
        found: dict[bytes, BlockFile] = {}
        missing: list[bytes] = []
        tenants: dict[bytes, bytes] = {}
        for key, asked in list(self._asked.items()):
            if not asked.future.done():
                if time.monotonic() - asked.at > HANGS_S:
                    raise DiskError(f"The folder {self._pool.path} does not answer.", fatal=True)
                continue
            del self._asked[key]
            block = self._answer(asked.future)
            if block is not None:
                found[key] = block
                if asked.tenant:
                    tenants[key] = asked.tenant
            elif key != CHECK:
                missing.append(key)
        if found or missing:
            self._note(found, missing, tenants)
        return missing

    def _answer(self, future: Future[BlockFile | None] | Future[None]) -> BlockFile | None:
        try:
            return future.result()
        except DiskError as error:
            if error.fatal:
                raise
        except CancelledError:
            pass
        return None

    def _note(self, found: dict[bytes, BlockFile], missing: Sequence[bytes], tenants: Mapping[bytes, bytes]) -> None:
        stock, headers = self._stock, self._pool.headers
        with stock.lock:
            for key in missing:
                place = stock.book.find(key)
                if place is not None and place.tier == self._tier and stock.book.forget(place):
                    stock.tiers.clear([place])
            added, forgotten = stock.book.adopt(self._tier, list(found), tenants)
            stock.tiers.clear(forgotten)
            for key, place in added:
                headers.publish(place.slot, *found.pop(key), tenants.get(key) or NO_TENANT)
            for key in found:  # known before
                place = stock.book.find(key)
                if place is not None and place.tier == self._tier:
                    headers.seen(place.slot)

    def _check(self) -> None:
        """An empty answer may mean that the directory is gone."""
        now = time.monotonic()
        if now - self._checked_at > CHECK_S:
            self._checked_at = now
            self._asked.setdefault(CHECK, _Asked(self._pool.check(), now))
