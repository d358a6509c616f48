"""The store of one node: tiers of blocks that all its engines share, and that outlive them.

A plain class, and a front: its parts are in `store_machinery` once its pools are open, and in `store_admin`,
`store_look_ups` and `store_jobs` before that too. `store_handle` makes it a named Ray actor.

Its methods run in several threads at once: look-ups in one of their own, so that they stay fast while copies run. What
a store holds is decided by the book (`core.store_book`) under one lock; copies run outside of it. A kill at any
instruction loses no more than what was not committed.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from raykv.actors.host_base import be_as_nice_as_others, own_info
from raykv.actors.peer_finder import PeerDoor
from raykv.actors.peer_tier import PeerTier
from raykv.actors.processes import start_time
from raykv.actors.store_admin import StoreAdmin
from raykv.actors.store_files import SHM, host_path
from raykv.actors.store_jobs import Jobs
from raykv.actors.store_look_ups import StoreLookUps
from raykv.actors.store_machinery import Machinery
from raykv.actors.store_meter import REACH
from raykv.actors.store_metrics import metrics_of
from raykv.actors.store_room import room_of
from raykv.actors.store_sessions import Engine, Session, Sessions, open_session
from raykv.actors.store_status import figures_of, plain_spec
from raykv.actors.store_stock import Stock
from raykv.actors.store_tiers import Tiers, round_up
from raykv.admin_messages import Absence, BlockPlace, Operation, OperationState, Selection, StoreView
from raykv.admin_messages import Done as AdminDone
from raykv.errors import StorageError, StoreError
from raykv.peer_messages import Adopt, Adopted, Lend, Lent, Room
from raykv.store_messages import (
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
)
from raykv.types import EngineId, LeaseId, Rank, StoreLife

logger = logging.getLogger("raykv")

BACKLOG_NBYTES = 1 << 30
"""What saves may have under way; an engine that saves faster than memory is copied skips blocks."""
DETACH_S = 30.0
"""Seconds that copies have to end when a worker leaves, or the store ends."""


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
        self._look_ups = StoreLookUps(self._sessions, self.life)
        self._jobs = Jobs(self._sessions, self.life)
        self._attaching = threading.Lock()
        self._closed = False
        self._works: Machinery | None = None
        """None until the size of a slot is known, and in the end."""
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
        return {**own_info(), "store": str(self.life), "spec": plain_spec(self.spec, self._tiers_now)}

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
            works = self._works or self._open(self.spec.slot_nbytes or round_up(largest))
        except StorageError as error:
            raise StoreError(f"The store {self.spec.name} can't open its tiers. {error}") from error
        slot_nbytes = works.stock.tiers.slot_nbytes
        if largest > slot_nbytes:
            raise StoreError(
                f"Engine {session.attach.engine} has blocks of {largest} bytes, and the store {self.spec.name!r} has "
                f"slots of {slot_nbytes}, as its first engine (or `slot`) wanted them. Give this engine "
                "another `store` name and another disk path, or start it first with a larger `slot`."
            )
        return slot_nbytes

    def _open(self, slot_nbytes: int) -> Machinery:
        self._works = Machinery(
            self.spec,
            slot_nbytes,
            self._host,
            self.life,
            self._sessions,
            self._admin,
            self._look_ups,
            door=self._door,
            backlog_nbytes=self._backlog_nbytes,
            end_dead=self._end_dead,
        )
        return self._works

    @property
    def _stock(self) -> Stock | None:
        works = self._works
        return works.stock if works is not None else None

    @property
    def _peers(self) -> PeerTier | None:
        works = self._works
        return works.peers if works is not None else None

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
        stock = self._stock
        if stock is not None:
            for engine in engines:
                with stock.lock:
                    stock.book.end_engine(engine.key)

    def status(self) -> StoreStatus:
        """Figures of this moment. A short hold of the lock."""
        peers, engines = self._peers, self._sessions.engine_ids()
        drain = str(self.drain_report()) if self._draining else ""
        peer = peers.status() if peers is not None else None
        figures = figures_of(self._stock)
        return StoreStatus(self.life, self.spec.name, self._pid, engines=engines, drain=drain, peer=peer, **figures)

    def metrics(self) -> dict[str, Any]:
        """Figures of this moment as plain numbers and Buckets, for `observe.store`. Holds the lock as `status` does."""
        works, meter = self._works, self._look_ups.meter
        if works is None:
            return metrics_of(None, None, None, meter, 0.0)
        return metrics_of(works.stock, works.saver, works.peers, meter, works.opened_s)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the book agrees with itself. Holds its lock meanwhile."""
        self._admin.check_integrity()
        stock = self._stock
        if stock is not None:
            with stock.lock:
                stock.book.check_integrity()

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
            works = self._works
            if works is not None:
                works.close(remove_host)
                self._works = None
            else:
                self._admin.close()
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
        return self._look_ups.look_ups(engine, batch)

    def settle(self, engine: EngineId, settle: Settle) -> StoreLife:
        """As `StoreLookUps.settle`."""
        return self._look_ups.settle(engine, settle)

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
        peers = self._peers
        return peers.lender.lend(lend) if peers is not None else Lent(self.life)

    def give_back(self, leases: Sequence[LeaseId]) -> None:
        """Another node's store needs these leases no more."""
        peers = self._peers
        if peers is not None:
            peers.lender.give_back(leases)

    # -- a node that is to go, in threads of their own ---------------------------------------------------------

    def drain(self, timeout_s: float, targets: Sequence[str] = ()) -> DrainReport:
        """Save nothing new from now on, and move the host tier's blocks to where others find them.

        Into the fs tier if there is one, else to those of `targets` (names of stores' actors) that have room. Blocks
        for `timeout_s` at most, and may be called again: it goes on. Look-ups and loads are served all the time.
        """
        works = self._works
        return works.drainer.drain(timeout_s, targets) if works is not None else DrainReport(self.life)

    def undrain(self) -> None:
        """Take saves again. What has moved stays where it is too."""
        works = self._works
        if works is not None:
            works.drainer.undo()

    def drain_report(self) -> DrainReport:
        """How far it has come."""
        works = self._works
        return works.drainer.report() if works is not None else DrainReport(self.life)

    def room(self, slot_nbytes: int) -> Room:
        """What this store could take of one that is drained and has slots of this size."""
        if self._draining or self._closed:
            return Room(self.life, refused="it is drained itself")
        door = self._door is not None
        return room_of(self.life, self.spec, self._tiers_now, self._stock, slot_nbytes, door)

    def adopt(self, adopt: Adopt) -> Adopted:
        """Keep blocks of a store that is drained. Blocks for about as long as they take to be read."""
        refused = self.room(adopt.memory.slot_nbytes).refused
        if refused:
            return Adopted(self.life, refused=refused, full=True)
        if self._works is None:  # no engine has come here yet
            with self._attaching:
                if self._works is None and not self._closed:
                    self._open(adopt.memory.slot_nbytes)
        works = self._works
        if works is None:
            return Adopted(self.life, refused="it has ended", full=True)
        return works.adopt(adopt)

    @property
    def _tiers_now(self) -> tuple[TierSpec, ...]:
        """What is configured may have been changed since."""
        stock = self._stock
        return stock.tiers.specs if stock is not None else self.spec.tiers

    @property
    def _draining(self) -> bool:
        works = self._works
        return works is not None and works.drainer.active

    # -- copies, in threads of their own --------------------------------------------------------------------

    def save(
        self, life: StoreLife, engine: EngineId, rank: Rank, jobs: Sequence[SaveJob]
    ) -> tuple[StoreLife, list[JobDone]]:
        """Copy blocks out of the rank's KV cache. They are seen after `settle` has committed the job."""
        works = self._works
        if works is None:
            return self._jobs.run(life, engine, rank, jobs, None)
        save = works.drainer.skip if works.drainer.active else works.saver.save
        done = self._jobs.run(life, engine, rank, jobs, save)
        works.mover.wake()
        return done

    def load(
        self, life: StoreLife, engine: EngineId, rank: Rank, jobs: Sequence[LoadJob]
    ) -> tuple[StoreLife, list[JobDone]]:
        """Copy leased blocks into the rank's KV cache, checked."""
        works = self._works
        return self._jobs.run(life, engine, rank, jobs, works.loader.load if works is not None else None)
