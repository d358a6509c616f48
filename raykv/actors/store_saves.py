"""Carries out the saves of engines: blocks into slots of the fastest tier, outside of the book's lock.

What is about a slot is true while its plan is open: nobody else writes there, and it is not evicted. What was written
is seen after the engine's commit only (`NodeStore.settle`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from raykv.actors import store_meter
from raykv.actors.store_sessions import Engine, Session
from raykv.actors.store_stock import Stock
from raykv.actors.store_tiers import Written
from raykv.admin_messages import NO_TENANT
from raykv.core.store_book import block_key
from raykv.core.store_plans import Place, SavePlan
from raykv.engine_messages import Why
from raykv.errors import DiskError
from raykv.store_messages import HASH_NBYTES, JobDone, SaveJob

logger = logging.getLogger("raykv")

WRITE_WINDOW = 16
"""Blocks of one save that are on their way to a disk: four per thread."""


class Saver:
    """One per store. Any number of threads, each inside a use of the session."""

    def __init__(self, stock: Stock, backlog_nbytes: int) -> None:
        """`backlog_nbytes`: what all saves together may have under way; blocks beyond it are skipped."""
        self._stock, self._backlog_nbytes = stock, backlog_nbytes
        self._saving = 0
        self.over_backlog = 0
        """Blocks skipped since the start because too much was under way."""
        self._saving_lock = threading.Lock()

    def save(self, engine: Engine, session: Session, job: SaveJob) -> JobDone:
        """Write what is not held yet. What finds no room is skipped, from the tail of the prefix."""
        started, attach, stock = time.monotonic(), session.attach, self._stock
        blocks = _by_position(job) if attach.writes else []
        kept, reserved = self._reserve(session, blocks)
        try:
            keys = [block_key(attach.fingerprint, group, digest) for group, digest, _ in blocks]
            tenants = _tenants(job) if job.tenants and blocks else ()
            with stock.lock:
                for key in keys[kept:]:
                    stock.book.contents.absences.note(key, Why.NO_ROOM)
                plan = stock.book.begin_save(engine.key, attach.rank, job.job, keys[:kept], tenants[:kept])
                stock.tiers.clear(plan.clear)
            error = self._write(session, blocks, plan)
        finally:
            with self._saving_lock:
                self._saving -= reserved
        with stock.lock:
            stock.book.end_write(plan, ok=not error)
        seconds = time.monotonic() - started
        stock.meter.took(store_meter.SAVE, seconds)
        if error:
            stock.meter.fault("save failed")
        self.over_backlog += len(blocks) - kept
        return JobDone(
            job.job,
            ok=not error,
            skipped=len(plan.skipped) + len(blocks) - kept,
            nbytes=sum(session.nbytes[blocks[index][0]] for index, _ in plan.write),
            seconds=seconds,
            error=error,
        )

    @property
    def backlog_nbytes(self) -> int:
        """What saves have under way now."""
        return self._saving

    def _reserve(self, session: Session, blocks: Sequence[tuple[int, bytes, int]]) -> tuple[int, int]:
        """How many of the blocks may be under way now, and their bytes."""
        with self._saving_lock:
            kept, nbytes = 0, 0
            while kept < len(blocks):
                more = nbytes + session.nbytes[blocks[kept][0]]
                if self._saving + more > self._backlog_nbytes:
                    break
                kept, nbytes = kept + 1, more
            self._saving += nbytes
            return kept, nbytes

    def _write(self, session: Session, blocks: Sequence[tuple[int, bytes, int]], plan: SavePlan) -> str:
        """Returns why it failed, if so."""
        try:
            session.fence.wait()
            began = time.monotonic()
            by_group: dict[int, list[tuple[int, Place]]] = {}
            for index, place in plan.write:
                by_group.setdefault(blocks[index][0], []).append((blocks[index][2], place))
            for group, pairs in by_group.items():
                if self._stock.tiers.rows(pairs[0][1].tier) is not None:
                    self._write_to_memory(session, group, pairs)
                else:
                    self._write_through(session, group, pairs)
            if plan.write:
                medium = self._stock.tiers.medium(plan.write[0][1].tier)
                nbytes = sum(session.nbytes[blocks[index][0]] for index, _ in plan.write)
                seconds = time.monotonic() - began
                self._stock.meter.moved(medium, store_meter.WRITE, store_meter.ENGINE, nbytes, seconds)
        except DiskError as error:
            if error.fatal:
                self._stock.switch_off(plan.write[0][1].tier, error)
            return str(error)
        except Exception as error:
            logger.exception("a save of engine %s, rank %d", session.attach.engine, session.attach.rank)
            return f"{type(error).__name__}: {error}"
        return ""

    def _write_to_memory(self, session: Session, group: int, pairs: Sequence[tuple[int, Place]]) -> None:
        tiers = self._stock.tiers
        rows = tiers.rows(pairs[0][1].tier)
        assert rows is not None
        block_ids, slots = [block for block, _ in pairs], [place.slot for _, place in pairs]
        sums = session.mover(group, rows).save(block_ids, slots, checksums=tiers.spec.checksum)
        for index, (_, place) in enumerate(pairs):
            tiers.note(place, Written(session.nbytes[group], sums[index] if sums else None))

    def _write_through(self, session: Session, group: int, pairs: Sequence[tuple[int, Place]]) -> None:
        stock, staging = self._stock, self._stock.staging
        left = deque(pairs)
        while left:
            rows = staging.take_some(min(len(left), WRITE_WINDOW))
            writes: list[Future[None]] = []
            try:
                chunk = [left.popleft() for _ in rows]
                sums = session.mover(group, staging.rows).save(
                    [block for block, _ in chunk], rows, checksums=stock.spec.checksum
                )
                for index, (_, place) in enumerate(chunk):
                    written = Written(session.nbytes[group], sums[index] if sums else None)
                    writes.append(stock.readers.submit(stock.tiers.write, place, staging.rows[rows[index]], written))
            finally:
                failed = [error for write in writes if (error := write.exception()) is not None]
                staging.give(rows)
            if failed:
                raise failed[0]


def _by_position(job: SaveJob) -> list[tuple[int, bytes, int]]:
    """(group, hash, block id), position by position over all groups: a prefix of the list is a prefix of each."""
    groups = [[hashes[i : i + HASH_NBYTES] for i in range(0, len(hashes), HASH_NBYTES)] for hashes in job.hashes]
    found = []
    for position in range(max(map(len, groups), default=0)):
        for group, (digests, block_ids) in enumerate(zip(groups, job.block_ids, strict=True)):
            if position < len(digests):
                found.append((group, digests[position], block_ids[position]))
    return found


def _tenants(job: SaveJob) -> list[bytes]:
    """Whose each block is, in the order of `_by_position`; () of a group: all nobody's."""
    groups = [[tag for tag, count in runs for _ in range(count)] for runs in job.tenants]
    found = []
    for position in range(max(map(len, job.block_ids), default=0)):
        for group, block_ids in enumerate(job.block_ids):
            if position < len(block_ids):
                tags = groups[group] if group < len(groups) else []
                found.append(tags[position] if position < len(tags) else NO_TENANT)
    return found
