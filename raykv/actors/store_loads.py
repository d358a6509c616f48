"""Carries out the loads of engines: leased slots into blocks, checked, outside of the book's lock.

While a load is open its slots are not evicted. Blocks in memory are compared and copied in one go. Blocks of a slower
tier are read several at a time, into the slot of the fastest tier that they are promoted to or into a staging row,
and are copied on from there.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from raykv.actors import store_meter
from raykv.actors.peer_loads import PeerLoader, Wanted
from raykv.actors.store_sessions import Engine, Session
from raykv.actors.store_stock import Stock
from raykv.actors.store_tiers import Written
from raykv.core.peer_part import PeerPart
from raykv.core.store_book import block_key
from raykv.core.store_plans import Move, Place
from raykv.errors import DiskError
from raykv.storage.headers import Header
from raykv.store_messages import JobDone, LoadJob, Medium, SaveJob

logger = logging.getLogger("raykv")

READ_WINDOW = 16
"""Reads of one load that are under way: four per reading thread, so that none waits for this one."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One block of a load."""

    group: int
    block_id: int
    place: Place


@dataclass(eq=False)
class _Loaded:
    """How a load goes. `quarantine`: the bad bytes among what is bad (others could only not be read now)."""

    good: list[_Wanted] = field(default_factory=list)
    bad: list[_Wanted] = field(default_factory=list)
    quarantine: list[Place] = field(default_factory=list)
    error: str = ""

    def is_bad(self, wanted: _Wanted, why: str, quarantine: bool) -> None:
        """This block is not loaded. `quarantine`: its bytes are wrong, not just out of reach."""
        self.bad.append(wanted)
        self.error = self.error or why
        if quarantine:
            self.quarantine.append(wanted.place)


@dataclass(eq=False, slots=True)
class _Read:
    """One read under way, into the target of a promotion or into a staging row; without a future it has ended."""

    wanted: _Wanted
    header: Header | None
    move: Move | None
    staged: int | None
    future: Future[bool] | None


class Loader:
    """One per store. Any number of threads, each inside a use of the session."""

    def __init__(self, stock: Stock, peers: PeerLoader | None = None) -> None:
        self._stock, self._peers = stock, peers

    def load(self, engine: Engine, session: Session, job: LoadJob) -> JobDone:
        """Fill the job's blocks with what its lease covers, every byte checked."""
        started, stock = time.monotonic(), self._stock
        lease, row = stock.lease_in(job.lease), engine.row(session.attach.fingerprint)
        far: list[Wanted] = []
        with stock.lock:
            part = stock.parts.get(lease)
            here = job if part is None else _split(part, job, far)
            places = stock.book.begin_load(lease, row, here.indices) if row is not None else None
        if places is None or row is None:
            return not_done(job, "its lease is over")
        wanted = [
            _Wanted(group, block_id, place)
            for group, (block_ids, found) in enumerate(zip(here.block_ids, places, strict=True))
            for block_id, place in zip(block_ids, found, strict=True)
        ]
        loaded = _Loaded()
        far_good: list[Wanted] = []
        try:
            begun = time.monotonic()
            self._load_from_memory(session, wanted, loaded)
            self._count(session, loaded.good, begun)
            slower = [one for one in wanted if stock.tiers.rows(one.place.tier) is None]
            if slower:
                begun, so_far = time.monotonic(), len(loaded.good)
                self._load_through(session, slower, loaded)
                self._count(session, loaded.good[so_far:], begun)
            if part is not None and far and not loaded.bad and self._peers is not None:
                begun = time.monotonic()
                from_peer = self._peers.load(session, row, part, far)
                far_good, loaded.error = from_peer.good, from_peer.error
                nbytes = sum(session.nbytes[one.group] for one in far_good)
                seconds = time.monotonic() - begun
                stock.meter.moved(Medium.PEER, store_meter.READ, store_meter.ENGINE, nbytes, seconds)
        except Exception as error:
            logger.exception("a load of engine %s, rank %d", session.attach.engine, session.attach.rank)
            settled = {one.block_id for one in loaded.good}
            loaded.bad = [one for one in wanted if one.block_id not in settled]
            loaded.error = f"{type(error).__name__}: {error}"
        with stock.lock:
            stock.tiers.quarantine(stock.book.end_load(lease, row, loaded.quarantine))
        groups = [one.group for one in loaded.good] + [one.group for one in far_good]
        bad = [one.block_id for one in loaded.bad]
        if len(far_good) < len(far):
            good = {(one.group, one.index) for one in far_good}
            bad += [one.block_id for one in far if (one.group, one.index) not in good]
            loaded.error = loaded.error or "the store has no peer tier"
        media = Counter(stock.tiers.medium(one.place.tier) for one in loaded.good)
        seconds = time.monotonic() - started
        stock.meter.took(store_meter.LOAD, seconds)
        if bad:
            stock.meter.fault("load failed")
        return JobDone(
            job.job,
            ok=not bad,
            bad_blocks=tuple(bad),
            nbytes=sum(session.nbytes[group] for group in groups),
            seconds=seconds,
            media=dict(media + Counter({Medium.PEER: len(far_good)})),
            error=loaded.error,
        )

    def _count(self, session: Session, good: Sequence[_Wanted], begun: float) -> None:
        """These came in so long a time, from one tier mostly: each medium is said to have taken its share of it."""
        nbytes: Counter[Medium] = Counter()
        for one in good:
            nbytes[self._stock.tiers.medium(one.place.tier)] += session.nbytes[one.group]
        seconds, total = time.monotonic() - begun, sum(nbytes.values())
        for medium, count in nbytes.items():
            share = seconds * count / total
            self._stock.meter.moved(medium, store_meter.READ, store_meter.ENGINE, count, share)

    def _load_from_memory(self, session: Session, wanted: Sequence[_Wanted], loaded: _Loaded) -> None:
        tiers = self._stock.tiers
        batches: dict[tuple[int, int], list[tuple[_Wanted, Header]]] = {}
        for one in wanted:
            if tiers.rows(one.place.tier) is not None:
                header = self._header(session, one, loaded)
                if header is not None:
                    batches.setdefault((one.place.tier, one.group), []).append((one, header))
        for (tier, group), batch in batches.items():
            rows = tiers.rows(tier)
            assert rows is not None
            expect = [header.checksum or 0 for _, header in batch] if tiers.spec.checksum else None
            slots, block_ids = [one.place.slot for one, _ in batch], [one.block_id for one, _ in batch]
            bad = set(session.mover(group, rows).load(slots, block_ids, expect=expect))
            for index, (one, _) in enumerate(batch):
                if index in bad:
                    loaded.is_bad(one, "a checksum did not match", quarantine=True)
                else:
                    loaded.good.append(one)

    def _load_through(self, session: Session, wanted: Sequence[_Wanted], loaded: _Loaded) -> None:
        """From tiers that are read. A block that is promoted is read into its new slot, any other into staging."""
        moves = self._promotions(wanted)
        reads = deque(wanted)
        flying: deque[_Read] = deque()
        try:
            while reads or flying:
                while reads and len(flying) < READ_WINDOW:
                    read = self._begin_read(session, reads[0], moves, loaded, wait=not flying)
                    if read is None:
                        break
                    reads.popleft()
                    if read.future is not None:
                        flying.append(read)
                if flying:
                    self._finish_read(session, flying.popleft(), loaded)
        finally:
            for read in flying:  # an error has left them: they still write into their rows
                if read.future is not None:
                    read.future.exception()
                self._give_up(read)
            for move in moves.values():
                self._stock.end_move(move, ok=False)

    def _promotions(self, wanted: Sequence[_Wanted]) -> dict[Place, Move]:
        stock = self._stock
        with stock.lock:
            if stock.tiers.rows(stock.takes) is None:
                return {}
            plan = stock.book.begin_promotion([one.place for one in wanted])
            stock.tiers.clear(plan.clear)
        return {move.source: move for move in plan.moves}

    def _begin_read(
        self, session: Session, one: _Wanted, moves: dict[Place, Move], loaded: _Loaded, wait: bool
    ) -> _Read | None:
        """None: no row is free now, and the caller holds some."""
        stock = self._stock
        header = self._header(session, one, loaded)
        if header is None:
            return _Read(one, None, None, None, None)
        move = moves.pop(one.place, None)
        rows = stock.tiers.rows(move.target.tier) if move is not None else None
        if move is not None and rows is not None:
            target, staged = rows[move.target.slot], None
        else:
            staged = stock.staging.take(wait)
            if staged is None:
                return None
            target = stock.staging.rows[staged]
        future = stock.readers.submit(stock.tiers.read, one.place, header, target)
        return _Read(one, header, move, staged, future)

    def _finish_read(self, session: Session, read: _Read, loaded: _Loaded) -> None:
        stock, one = self._stock, read.wanted
        assert read.future is not None and read.header is not None
        good = False
        try:
            good = read.future.result()
            if not good:
                loaded.is_bad(one, "a checksum did not match", quarantine=True)
        except DiskError as error:
            stock.switch_off(one.place.tier, error)
            loaded.is_bad(one, str(error), quarantine=False)
        except BaseException:
            self._give_up(read)
            raise
        if not good:
            self._give_up(read)
            return
        if read.move is not None:
            rows = stock.tiers.rows(read.move.target.tier)
            assert rows is not None
            try:
                session.mover(one.group, rows).load([read.move.target.slot], [one.block_id])
            finally:
                stock.tiers.note(read.move.target, Written(read.header.nbytes, read.header.checksum))
                stock.end_move(read.move, ok=True)
        else:
            assert read.staged is not None
            try:
                session.mover(one.group, stock.staging.rows).load([read.staged], [one.block_id])
            finally:
                stock.staging.give([read.staged])
        loaded.good.append(one)

    def _give_up(self, read: _Read) -> None:
        if read.staged is not None:
            self._stock.staging.give([read.staged])
        if read.move is not None:
            self._stock.end_move(read.move, ok=False)

    def _header(self, session: Session, one: _Wanted, loaded: _Loaded) -> Header | None:
        """What the slot's header promises, if that is this block; else the block is bad."""
        header = self._stock.tiers.header(one.place)
        if header is None:
            loaded.is_bad(one, "a slot's header is damaged", quarantine=True)
            return None
        if (
            not header.key.startswith(block_key(session.attach.fingerprint, one.group, b""))
            or header.nbytes != session.nbytes[one.group]
        ):
            # A slot of somebody else's, and good: never served here, and not quarantined either.
            logger.error("slot %s is not of engine %s, group %d", one.place, session.attach.engine, one.group)
            loaded.is_bad(one, "a slot holds another block than its lease says", quarantine=False)
            return None
        return header


def _split(part: PeerPart, job: LoadJob, far: list[Wanted]) -> LoadJob:
    """What of the job is leased in this store; what a peer has for it goes to `far`."""
    here, there = part.split(job.indices)
    for group, places in enumerate(there):
        far += [Wanted(group, job.indices[group][place], job.block_ids[group][place]) for place in places]
    return replace(
        job,
        indices=tuple(tuple(job.indices[group][place] for place in places) for group, places in enumerate(here)),
        block_ids=tuple(tuple(job.block_ids[group][place] for place in places) for group, places in enumerate(here)),
    )


def not_done(job: SaveJob | LoadJob, why: str) -> JobDone:
    """A job that touched nothing."""
    bad = tuple(block for ids in job.block_ids for block in ids) if isinstance(job, LoadJob) else ()
    return JobDone(job.job, ok=False, bad_blocks=bad, error=why)
