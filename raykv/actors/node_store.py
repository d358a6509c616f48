"""The store of one node: tiers of blocks that all its engines share, and that outlive them.

A plain class; `store_handle` makes it a named Ray actor. Its methods run in several threads at once: look-ups in one
of their own, so that they stay fast while copies run. What a store holds is decided by the book (`core.store_book`)
under one lock; copies run outside of it. A kill at any instruction loses no more than what was not committed.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from raykv.actors.event_feed import EventFeed, models_of
from raykv.actors.host_base import be_as_nice_as_others, own_info
from raykv.actors.peer_finder import PeerDoor
from raykv.actors.peer_tier import PeerTier
from raykv.actors.processes import start_time
from raykv.actors.publisher import Publisher
from raykv.actors.store_admin import StoreAdmin, long_ones
from raykv.actors.store_drain import Drainer
from raykv.actors.store_files import SHM, host_path
from raykv.actors.store_loads import Loader, not_done
from raykv.actors.store_meter import REACH
from raykv.actors.store_metrics import LookUpMeter, metrics_of
from raykv.actors.store_mover import Mover
from raykv.actors.store_saves import Saver
from raykv.actors.store_sessions import Engine, Session, Sessions, open_session
from raykv.actors.store_shared import Prompt, SharedLookUps
from raykv.actors.store_stock import Stock
from raykv.actors.store_tiers import Tiers, round_up
from raykv.actors.tier_operations import KINDS as TIER_KINDS
from raykv.actors.tier_operations import TierOperations
from raykv.admin_messages import Absence, BlockPlace, Operation, OperationState, Selection, StoreView
from raykv.admin_messages import Done as AdminDone
from raykv.errors import StorageError, StoreError
from raykv.peer_messages import Adopt, Adopted, Lend, Lent, Room
from raykv.store_messages import (
    HASH_NBYTES,
    Attached,
    DrainReport,
    JobDone,
    LoadJob,
    LookedUp,
    LookUp,
    Medium,
    RankAttach,
    SaveJob,
    Settle,
    StoreSpec,
    StoreStatus,
    TierSpec,
    TierStatus,
)
from raykv.types import EngineId, LeaseId, Rank, StoreLife

logger = logging.getLogger("raykv")

BACKLOG_NBYTES = 1 << 30
"""What saves may have under way; an engine that saves faster than memory is copied skips blocks."""
DETACH_S = 30.0

Job = TypeVar("Job", SaveJob, LoadJob)
Method = Callable[[Engine, Session, Job], JobDone]


class NodeStore:
    """One per node and store name. Every method may be called from any thread."""

    def __init__(
        self,
        spec: StoreSpec,
        namespace: str = "raykv",
        *,
        own_process: bool = False,
        shm: Path = SHM,
        backlog_nbytes: int = BACKLOG_NBYTES,
        door: PeerDoor | None = None,
        tag: str = "",
    ) -> None:
        """`own_process`: nothing else runs here, so its threads and niceness may be set. Does not raise for the media:
        what is wrong with them is raised by `attach`, where somebody hears it. `door`: to other nodes' stores.

        `tag` tells the host tier's file from that of a store of this name on another node of the same machine."""
        if own_process:
            torch.set_num_threads(1)
            be_as_nice_as_others()
        self.spec = spec
        self._host = host_path(namespace, f"{spec.name}-{tag}" if tag else spec.name, shm)
        self._pid, self._started = os.getpid(), start_time(os.getpid()) or 0
        self.life = StoreLife(f"{self._pid}.{self._started}.{secrets.token_hex(6)}")
        self._backlog_nbytes, self._door = backlog_nbytes, door
        self._sessions = Sessions()
        self._admin = StoreAdmin(spec, self._host, self.life, self._sessions)
        self._look_up_meter = LookUpMeter()
        self._opened_s = 0.0
        self._attaching = threading.Lock()
        self._closed = False
        self._stock: Stock | None = None
        self._saver: Saver | None = None
        self._loader: Loader | None = None
        self._mover: Mover | None = None
        self._drainer: Drainer | None = None
        self._adopting = threading.Lock()
        self._peers: PeerTier | None = None
        self._publisher: Publisher | None = None
        self._feed: EventFeed | None = None
        self._shared: SharedLookUps | None = None
        try:
            found = Tiers.found_slot_nbytes(spec, self._host)
            if found and not spec.slot_nbytes:
                self._open(found)
        except StorageError as error:
            logger.error("store %s can't open what an earlier life left: %s", spec.name, error)

    def __repr__(self) -> str:
        return f"NodeStore({self.spec.name})"

    def info(self) -> dict[str, Any]:
        """HostInfo and how this store was set up, as plain values: who asks may run another RayKV."""
        spec = {
            "tiers": _plain(self.spec.tiers),
            "tiers_now": _plain(self._tiers_now),
            "checksum": self.spec.checksum,
            "slot": self.spec.slot_nbytes,
            "peer": self.spec.peer,
        }
        return {**own_info(), "store": str(self.life), "spec": spec}

    # -- control --------------------------------------------------------------------------------------------

    def attach(self, attach: RankAttach) -> Attached:
        """A worker joins. Raises StoreError with the fix. Blocks while pools are made (seconds for many GiB)."""
        with self._attaching:
            if self._closed:
                raise StoreError(f"The store {self.spec.name} is being shut down.")
            session = open_session(attach)
            try:
                slot_nbytes = self._slot_for(session)
                ended = self._sessions.add(session)
            except BaseException:
                session.close()
                raise
            self._forget(ended)
        self._admin.attached(attach)
        return Attached(self.life, self._pid, self._started, slot_nbytes)

    def _slot_for(self, session: Session) -> int:
        """The bytes of a slot, with all pools open. Raises StoreError if the engine's blocks are larger."""
        largest = max(session.nbytes)
        try:
            stock = self._stock or self._open(self.spec.slot_nbytes or round_up(largest))
        except StorageError as error:
            raise StoreError(f"The store {self.spec.name} can't open its tiers. {error}") from error
        if largest > stock.tiers.slot_nbytes:
            raise StoreError(
                f"Engine {session.attach.engine} has blocks of {largest} bytes, and the store {self.spec.name!r} has "
                f"slots of {stock.tiers.slot_nbytes}, as its first engine (or `slot`) wanted them. Give this engine "
                "another `store` name and another disk path, or start it first with a larger `slot`."
            )
        return stock.tiers.slot_nbytes

    def _open(self, slot_nbytes: int) -> Stock:
        begun = time.monotonic()
        stock = Stock(Tiers.open(self.spec, slot_nbytes, self._host))
        try:
            self._peers = self._open_peers(stock)
        except BaseException:
            stock.close(remove_host=False)
            raise
        self._saver = Saver(stock, self._backlog_nbytes)
        self._loader = Loader(stock, self._peers.loader if self._peers is not None else None)
        self._mover = Mover(stock, self._sessions, self._end_dead)
        self._shared = SharedLookUps.of(stock)
        peers = self._peers
        memory = (lambda: peers.memory) if peers is not None else (lambda: None)
        name, find_peer = (self._door.store, self._door.open_peer) if self._door is not None else ("", None)
        self._drainer = Drainer(stock, self.life, name or self.spec.name, memory, find_peer)
        self._stock = stock
        self._admin.opened(stock)
        long_ones(self._admin, stock, self._shared, self._peers)
        tiers = TierOperations(stock, self._mover, self._host, self._peers, self._tiers_changed)
        for kind in TIER_KINDS:
            self._admin.operations_of.add(kind, tiers)
        self._opened_s = time.monotonic() - begun
        self._mover.start()
        door = self._door
        if door is not None and door.find_directory is not None:
            book, find = stock.book, door.find_directory
            self._publisher = Publisher(book.content, stock.lock, find, door.node, door.store, self.life)
            self._publisher.start()
        if door is not None and door.find_events is not None:
            media, models = stock.book.content.media, partial(models_of, self._sessions)
            self._feed = EventFeed(media, stock.lock, door.find_events, door.node, door.store, self.life, models)
            self._feed.start()
        return stock

    def _open_peers(self, stock: Stock) -> PeerTier | None:
        if not self.spec.peer or self._door is None:
            return None
        peers = PeerTier(stock, self._sessions, self.life, self._door, self._wake)
        peers.start()
        return peers

    def detach(self, engine: EngineId, rank: Rank) -> None:
        """A worker leaves: when this returns, nothing touches its KV cache any more."""
        ended = self._sessions.remove(engine, rank, DETACH_S)
        self._forget([ended] if ended is not None else [])

    def _end_dead(self) -> None:
        dead = self._sessions.end_dead()
        for engine in dead:
            logger.warning("engine %s is dead: its leases and uncommitted blocks are gone", engine.id)
        self._forget(dead)
        self._admin.tick()

    def _forget(self, engines: Sequence[Engine]) -> None:
        if self._stock is not None:
            for engine in engines:
                with self._stock.lock:
                    self._stock.book.end_engine(engine.key)

    def status(self) -> StoreStatus:
        """Figures of this moment."""
        stock = self._stock
        if stock is None:
            none: dict[str, Any] = dict.fromkeys(_FIGURES, 0)
            return StoreStatus(self.life, self.spec.name, self._pid, (), self._sessions.engine_ids(), **none)
        with stock.lock:
            figures = stock.book.figures()
        tiers = tuple(
            TierStatus(
                path=spec.path,
                slot_nbytes=stock.tiers.slot_nbytes,
                draining=tier.shut,
                **{name: getattr(tier, name) for name in _TIER_FIGURES} | stock.tiers.counts(tier.tier),
            )
            for tier, spec in ((tier, stock.tiers.spec_of(tier.tier)) for tier in figures.tiers)
        )
        counts: dict[str, Any] = {name: getattr(figures, name) for name in _FIGURES}
        drain = str(self.drain_report()) if self._draining else ""
        engines = self._sessions.engine_ids()
        peer = self._peers.status() if self._peers is not None else None
        return StoreStatus(self.life, self.spec.name, self._pid, tiers, engines, **counts, drain=drain, peer=peer)

    def metrics(self) -> dict[str, Any]:
        """Figures of this moment as plain numbers and Buckets, for `observe.store`. Holds the lock as `status` does."""
        return metrics_of(self._stock, self._saver, self._peers, self._look_up_meter, self._opened_s)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the book agrees with itself. Holds its lock meanwhile."""
        self._admin.check_integrity()
        if self._stock is not None:
            with self._stock.lock:
                self._stock.book.check_integrity()

    def clear(self, medium: Medium | None = None) -> int:
        """As `StoreAdmin.clear`."""
        return self._admin.clear(medium)

    def shutdown(self, remove_host: bool) -> None:
        """End all copies, let go of all memory and files. `remove_host` gives the host tier's memory back."""
        with self._attaching:
            if self._closed:
                return
            self._closed = True
            if not self._sessions.end_all(DETACH_S):
                raise StoreError(f"Copies of the store {self.spec.name} still run: its process must be killed.")
            for publisher in (self._publisher, self._feed):
                if publisher is not None:
                    publisher.close()
            if self._drainer is not None:
                self._drainer.close()
            self._admin.close()  # what it has under way needs the mover
            if self._mover is not None:
                self._mover.close()
            with self._adopting:
                pass  # it ends in time, and none begins any more
            if self._peers is not None:
                self._peers.close()
            stock, self._stock = self._stock, None
            if stock is not None:
                stock.close(remove_host)
            if remove_host:
                self._admin.host_removed()

    # -- operators, in threads of their own: see `store_admin` ---------------------------------------------------

    def view(self) -> StoreView:
        """As `StoreAdmin.view`, and so are those below."""
        return self._admin.view()

    def where(self, fingerprints: tuple[str, ...], hashes: bytes) -> tuple[BlockPlace, ...]:
        return self._admin.where(fingerprints, hashes)

    def why(self, fingerprints: tuple[str, ...], hashes: bytes, then: float = 0.0) -> tuple[Absence | None, ...]:
        return self._admin.why(fingerprints, hashes, then)

    def pin(self, number: str, selection: Selection, seconds: float, note: str) -> AdminDone:
        return self._admin.pin(number, selection, seconds, note)

    def unpin(self, number: str) -> AdminDone:
        return self._admin.unpin(number)

    def forget(self, selection: Selection) -> AdminDone:
        return self._admin.forget(selection)

    def set_quota(self, tenant: str, nbytes: int | None) -> AdminDone:
        return self._admin.set_quota(tenant, nbytes)

    def begin(self, operation: Operation) -> OperationState:
        return self._admin.begin(operation)

    def operation(self, number: str) -> OperationState:
        return self._admin.operation(number)

    def operations(self) -> tuple[OperationState, ...]:
        return self._admin.operations()

    # -- look-ups, in their own thread ----------------------------------------------------------------------

    def look_up(self, engine: EngineId, look_up: LookUp) -> LookedUp:
        """The longest prefix held for all ranks of the engine, leased to it. A stranger has no hits."""
        return self.look_ups(engine, [look_up])[0]

    def look_ups(self, engine: EngineId, batch: Sequence[LookUp]) -> list[LookedUp]:
        """Several in one call. With a shared tier it may wait for that a little."""
        begun = time.monotonic()
        found, shared = self._sessions.complete(engine), self._shared
        if shared is not None and found is not None:
            _, fingerprints, windows = found
            shared.find([Prompt(fingerprints, windows, look_up.hashes, look_up.tenant) for look_up in batch])
        answers = [self._look_up(engine, look_up) for look_up in batch]
        self._look_up_meter.took(time.monotonic() - begun)
        if self._peers is None or not self._peers.reacher.up:
            return answers
        asked = [len(look_up.hashes) // HASH_NBYTES for look_up in batch]
        return [replace(one, more=one.num_blocks < n) for one, n in zip(answers, asked, strict=True)]

    def _look_up(self, engine: EngineId, look_up: LookUp) -> LookedUp:
        stock, miss = self._stock, LookedUp(self.life, look_up.request, 0)
        found = self._sessions.complete(engine)
        if stock is None or found is None:
            return miss
        key, fingerprints, windows = found
        with stock.lock:
            lease = stock.book.look_up(key, look_up.request, fingerprints, windows, look_up.hashes, time.monotonic())
        self._look_up_meter.looked_up(fingerprints[0], look_up.hashes, lease.num_blocks if lease is not None else 0)
        if lease is None:
            return miss
        return LookedUp(self.life, look_up.request, lease.num_blocks, stock.lease_out(lease.id), lease.media)

    def settle(self, engine: EngineId, settle: Settle) -> StoreLife:
        """Commits become visible, aborts and releases are carried out. What this life doesn't know is passed over."""
        stock, found = self._stock, self._sessions.find(engine)
        if stock is not None and found is not None:
            for job in settle.commits:
                with stock.lock:  # one job at a time: a look-up must not wait for all of them
                    published = stock.book.commit(found.key, job)
                    stock.tiers.publish(published)
                self._look_up_meter.held(published)
            with stock.lock:
                for job in settle.aborts:
                    stock.book.abort(found.key, job)
                for lease in settle.releases:
                    stock.book.release(stock.lease_in(lease))
            if settle.releases and self._peers is not None:
                self._peers.released([stock.lease_in(lease) for lease in settle.releases])
            if settle.commits or settle.releases:
                self._wake()
        return self.life

    # -- other nodes' stores, in threads of their own -------------------------------------------------------

    def reach(self, engine: EngineId, look_up: LookUp, have: LookedUp, limit_s: float) -> LookedUp:
        """Look for what `have`, this store's answer, lacks at other nodes, and lease it there. `have` if there is none.

        Blocks for `limit_s` seconds at most. The longer answer has the lease of `have`, if that has one.
        """
        stock, peers = self._stock, self._peers
        if stock is None or peers is None:
            return have
        begun = time.monotonic()
        try:
            return peers.reacher.reach(engine, look_up, have, limit_s)
        finally:
            stock.meter.took(REACH, time.monotonic() - begun)

    def lend(self, lend: Lend) -> Lent:
        """Another node's store asks for blocks; it reads them where they are."""
        return self._peers.lender.lend(lend) if self._peers is not None else Lent(self.life)

    def give_back(self, leases: Sequence[LeaseId]) -> None:
        """Another node's store needs these leases no more."""
        if self._peers is not None:
            self._peers.lender.give_back(leases)

    # -- a node that is to go, in threads of their own ---------------------------------------------------------

    def drain(self, timeout_s: float, targets: Sequence[str] = ()) -> DrainReport:
        """Save nothing new from now on, and move the host tier's blocks to where others find them.

        Into the fs tier if there is one, else to those of `targets` (names of stores' actors) that have room. Blocks
        for `timeout_s` at most, and may be called again: it goes on. Look-ups and loads are served all the time.
        """
        drainer = self._drainer
        return drainer.drain(timeout_s, targets) if drainer is not None else DrainReport(self.life)

    def undrain(self) -> None:
        """Take saves again. What has moved stays where it is too."""
        if self._drainer is not None:
            self._drainer.undo()

    def drain_report(self) -> DrainReport:
        """How far it has come."""
        return self._drainer.report() if self._drainer is not None else DrainReport(self.life)

    def room(self, slot_nbytes: int) -> Room:
        """What this store could take of one that is drained and has slots of this size."""
        host = next((tier for tier in self._tiers_now if tier.medium is Medium.HOST), None)
        stock = self._stock
        refused = ""
        if self._draining or self._closed:
            refused = "it is drained itself"
        elif not self.spec.peer or self._door is None or not self.spec.checksum or host is None:
            refused = "it has no peer tier, no host tier or no checksums"
        elif (stock.tiers.slot_nbytes if stock is not None else self.spec.slot_nbytes or slot_nbytes) != slot_nbytes:
            refused = "its slots have another size"
        if refused or host is None:
            return Room(self.life, refused=refused)
        if stock is None:
            return Room(self.life, host.capacity // slot_nbytes)
        with stock.lock:
            return Room(self.life, stock.book.drain.free)

    def adopt(self, adopt: Adopt) -> Adopted:
        """Keep blocks of a store that is drained. Blocks for about as long as they take to be read."""
        refused = self.room(adopt.memory.slot_nbytes).refused
        if refused:
            return Adopted(self.life, refused=refused, full=True)
        if self._stock is None:  # no engine has come here yet
            with self._attaching:
                if self._stock is None and not self._closed:
                    self._open(adopt.memory.slot_nbytes)
        with self._adopting:
            peers = self._peers
            if self._closed or peers is None:
                return Adopted(self.life, refused="it has ended", full=True)
            adopted = peers.adopter.adopt(adopt)
        self._wake()
        return adopted

    @property
    def _tiers_now(self) -> tuple[TierSpec, ...]:
        """What is configured may have been changed since."""
        stock = self._stock
        return stock.tiers.specs if stock is not None else self.spec.tiers

    def _tiers_changed(self) -> None:
        """A tier has come or gone."""
        stock, before = self._stock, self._shared
        if stock is None:
            return
        self._shared = None
        if before is not None:
            before.end()
        self._shared = SharedLookUps.of(stock)
        long_ones(self._admin, stock, self._shared, self._peers)

    @property
    def _draining(self) -> bool:
        return self._drainer is not None and self._drainer.active

    # -- copies, in threads of their own --------------------------------------------------------------------

    def save(
        self, life: StoreLife, engine: EngineId, rank: Rank, jobs: Sequence[SaveJob]
    ) -> tuple[StoreLife, list[JobDone]]:
        """Copy blocks out of the rank's KV cache. They are seen after `settle` has committed the job."""
        saver, drainer = self._saver, self._drainer
        save = saver.save if saver is not None else None
        if drainer is not None and drainer.active:
            save = drainer.skip
        done = [self._run(life, engine, rank, job, save) for job in jobs]
        self._wake()
        return self.life, done

    def load(
        self, life: StoreLife, engine: EngineId, rank: Rank, jobs: Sequence[LoadJob]
    ) -> tuple[StoreLife, list[JobDone]]:
        """Copy leased blocks into the rank's KV cache, checked."""
        loader = self._loader
        done = [self._run(life, engine, rank, job, loader.load if loader is not None else None) for job in jobs]
        return self.life, done

    def _run(
        self,
        life: StoreLife,
        engine: EngineId,
        rank: Rank,
        job: Job,
        method: Callable[[Engine, Session, Job], JobDone] | None,
    ) -> JobDone:
        # Ray may deliver a call that was meant for the life before: its blocks belong to others by now.
        if life != self.life or method is None:
            return not_done(job, "it was meant for another life of the store")
        try:
            with self._sessions.use(engine, rank) as (found, session):
                return method(found, session, job)
        except StoreError as error:
            return not_done(job, str(error))
        except Exception as error:  # a defect; whatever it was, no copy runs any more when it gets here
            logger.exception("job %s of engine %s, rank %d", job.job, engine, rank)
            return not_done(job, f"{type(error).__name__}: {error}")

    def _wake(self) -> None:
        if self._mover is not None:
            self._mover.wake()


_FIGURES = (
    "leases",
    "look_ups",
    "hit_blocks",
    "missed_blocks",
    "saved_blocks",
    "skipped_blocks",
    "loaded_blocks",
)
_TIER_FIGURES = ("medium", "slots", "used", "writing", "quarantined", "evicted", "hits", "bad_reads", "off")


def _plain(tiers: Sequence[TierSpec]) -> list[tuple[str, int, str | None]]:
    return [(str(tier.medium), tier.capacity, tier.path) for tier in tiers]
