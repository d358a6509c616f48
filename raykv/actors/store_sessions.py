"""Who is attached to a store: engines, their ranks, and each rank's KV cache as it is mapped here.

A rank's mapping is used by copies and ends when the last of them has; no copy begins once it is ended. An engine has
ended when any of its workers has (vLLM does not go on without one), or when all have detached. One that comes back
under the same id is another engine to the book: jobs are numbered anew.

A rank that attaches again from the same process, because its first answer was lost, replaces itself.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import cloudpickle
import torch

from raykv.actors.processes import Pidfd
from raykv.errors import KVCacheOpenError, StoreError
from raykv.kvcache.blocks import LayerLayout
from raykv.kvcache.fence import MappedFence, open_fence
from raykv.kvcache.handles import CacheHandles
from raykv.kvcache.share import MappedKVCache, open_kv_caches
from raykv.kvcache.slot_copy import SlotMover
from raykv.storage.checksum import checksum
from raykv.storage.row_copy import row_copy
from raykv.store_messages import FINGERPRINT_NBYTES, RankAttach
from raykv.types import EngineId, Rank

MOST_ROWS = 8
"""Sets of rows that a session has movers for."""


@dataclass(eq=False)
class Session:
    """One attached rank. `layouts[g]` and `nbytes[g]` of KV group g; `users` and `ended` under the sessions' lock."""

    attach: RankAttach
    process: Pidfd
    mapped: MappedKVCache
    fence: MappedFence
    layouts: tuple[tuple[LayerLayout, ...], ...]
    nbytes: tuple[int, ...]
    users: int = 0
    ended: bool = False
    _movers: dict[tuple[int, int], tuple[SlotMover, ...]] = field(default_factory=dict)

    def mover(self, group: int, rows: torch.Tensor) -> SlotMover:
        """What copies between the group's blocks and these slots. While the session is in use."""
        # A store has few sets of rows, of its host tier and for staging. They stay; a host tier may change its length.
        key = (rows.data_ptr(), len(rows))
        movers = self._movers.get(key)
        if movers is None:
            if len(self._movers) >= MOST_ROWS:  # none of a copy that runs: it has its own reference
                self._movers.clear()
            movers = tuple(SlotMover(layouts, rows, checksum, row_copy()) for layouts in self.layouts)
            self._movers[key] = movers
        return movers[group]

    def close(self) -> None:
        self._movers.clear()
        self.layouts = ()
        self.mapped.close()


@dataclass(eq=False)
class Engine:
    """One life of an engine. `key` is its name in the book, never used again."""

    id: EngineId
    key: EngineId
    num_ranks: int
    sessions: dict[Rank, Session] = field(default_factory=dict)
    _rows: list[bytes] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all its ranks are attached: before that nothing can be held for all of them."""
        return len(self.sessions) == self.num_ranks

    def fingerprints(self) -> list[bytes]:
        """One per writing rank, in their order. Ranks that don't write have that of one that does."""
        if not self._rows and self.complete:  # once: leases count by it, also when a rank has detached
            attaches = [self.sessions[rank].attach for rank in sorted(self.sessions)]
            self._rows = list(dict.fromkeys(attach.fingerprint for attach in attaches if attach.writes))
        return self._rows

    def row(self, fingerprint: bytes) -> int | None:
        """The place of a rank's bytes in a lease of this engine."""
        return self._rows.index(fingerprint) if fingerprint in self._rows else None

    @property
    def windows(self) -> list[int]:
        first = self.sessions[min(self.sessions)]
        return [group.window_blocks for group in first.attach.groups]


class Sessions:
    """All attached engines. Any thread; its lock is held for a few microseconds at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._engines: dict[EngineId, Engine] = {}
        self._serial = itertools.count(1)

    # -- joining --------------------------------------------------------------------------------------------

    def add(self, session: Session) -> list[Engine]:
        """Take a rank in. Returns engines that have ended by that. Raises StoreError if the id is another's."""
        attach = session.attach
        with self._changed:
            engine = self._engines.get(attach.engine)
            ended = []
            if engine is not None and not self._continues(engine, attach):
                ended.append(self._end(engine))
                engine = None
            if engine is None:
                key = EngineId(f"{attach.engine}#{next(self._serial)}")
                engine = self._engines[attach.engine] = Engine(attach.engine, key, attach.num_ranks)
            replaced = engine.sessions.get(attach.rank)
            engine.sessions[attach.rank] = session
            if replaced is not None:
                self._end_session(replaced)
            return ended

    def _continues(self, engine: Engine, attach: RankAttach) -> bool:
        """Whether this is one more rank of that engine, or one of its ranks again; else that engine is over."""
        same = engine.sessions.get(attach.rank)
        if same is not None and (same.attach.pid, same.attach.started) != (attach.pid, attach.started):
            if same.process.alive():
                raise StoreError(
                    f"The engine id {attach.engine!r} (rank {attach.rank}) is in use by the living process "
                    f"{same.attach.pid} at this store. Give each engine its own `engine_id`."
                )
            return False
        alive = all(session.process.alive() for session in engine.sessions.values())
        return alive and engine.num_ranks == attach.num_ranks

    # -- leaving --------------------------------------------------------------------------------------------

    def remove(self, engine_id: EngineId, rank: Rank, timeout: float) -> Engine | None:
        """Detach a rank and wait until its copies have ended. Returns its engine if that has ended by it."""
        with self._changed:
            engine = self._engines.get(engine_id)
            session = engine.sessions.pop(rank, None) if engine is not None else None
            if engine is None or session is None:
                return None
            if not engine.sessions:
                del self._engines[engine_id]
            self._end_session(session)
            if not self._changed.wait_for(lambda: session.users == 0, timeout):
                raise StoreError(f"Copies of engine {engine_id}, rank {rank} still run after {timeout:g} s.")
            return engine if not engine.sessions else None

    def end_dead(self) -> list[Engine]:
        """End the engines of which a worker has died, and return them."""
        with self._changed:
            engines = list(self._engines.values())
            dead = [e for e in engines if not all(session.process.alive() for session in e.sessions.values())]
            return [self._end(engine) for engine in dead]

    def end_all(self, timeout: float) -> bool:
        """No copy begins any more; True if all that ran have ended in time."""
        with self._changed:
            sessions = [session for engine in self._engines.values() for session in engine.sessions.values()]
            for engine in list(self._engines.values()):
                self._end(engine)
            return self._changed.wait_for(lambda: not any(session.users for session in sessions), timeout)

    def _end(self, engine: Engine) -> Engine:
        if self._engines.get(engine.id) is engine:
            del self._engines[engine.id]
        for session in engine.sessions.values():
            self._end_session(session)
        return engine

    def _end_session(self, session: Session) -> None:
        session.ended = True
        if session.users == 0:
            session.close()

    # -- use ------------------------------------------------------------------------------------------------

    def find(self, engine: EngineId) -> Engine | None:
        with self._changed:
            return self._engines.get(engine)

    def complete(self, engine: EngineId) -> tuple[EngineId, list[bytes], list[int]] | None:
        """The book's name of an engine with all its ranks, its fingerprints and windows; None: it can't look up."""
        with self._changed:
            found = self._engines.get(engine)
            if found is None or not found.complete:
                return None
            return found.key, found.fingerprints(), found.windows

    @contextlib.contextmanager
    def use(self, engine: EngineId, rank: Rank) -> Iterator[tuple[Engine, Session]]:
        """The mapping stays until the end of the block. Raises StoreError if the rank is not attached."""
        with self._changed:
            found = self._engines.get(engine)
            session = found.sessions.get(rank) if found is not None else None
            if found is None or session is None or session.ended:
                raise StoreError(f"engine {engine}, rank {rank} is not attached to this store")
            session.users += 1
        try:
            yield found, session
        finally:
            self._leave(session)

    def _leave(self, session: Session) -> None:
        with self._changed:
            session.users -= 1
            if session.ended and session.users == 0:
                session.close()
            self._changed.notify_all()

    def engine_ids(self) -> tuple[EngineId, ...]:
        with self._changed:
            return tuple(self._engines)

    def attaches(self) -> list[RankAttach]:
        """Of all ranks that are attached."""
        with self._changed:
            return [session.attach for engine in self._engines.values() for session in engine.sessions.values()]

    @property
    def busy(self) -> bool:
        """Whether any copy of an engine runs."""
        with self._changed:
            return any(session.users for engine in self._engines.values() for session in engine.sessions.values())


def open_session(attach: RankAttach) -> Session:
    """Map the KV cache of a worker. Raises StoreError with the fix."""
    if len(attach.fingerprint) != FINGERPRINT_NBYTES or not attach.groups:
        raise StoreError(f"Engine {attach.engine} attached without a fingerprint or without a KV group.")
    process = Pidfd.open(attach.pid, attach.started)
    if process is None:
        raise StoreError(
            f"The worker {attach.pid} of engine {attach.engine} can't be seen by the store: it has died, or both are "
            "in different PID namespaces. Run engine and Ray node in one container (or with a shared PID namespace)."
        )
    row_copy()  # 0.1 s once a process: here, and not in the first copy
    try:
        handles: CacheHandles = cloudpickle.loads(attach.caches)
        mapped = open_kv_caches(handles.caches)
        fence = open_fence(handles.fence)
    except KVCacheOpenError as error:
        raise StoreError(f"The store can't open the KV cache of engine {attach.engine}: {error}") from error
    try:
        layouts = tuple(
            tuple(LayerLayout.of(mapped.kv_caches[layer], attach.num_blocks) for layer in group.layers)
            for group in attach.groups
        )
    except (KeyError, ValueError) as error:
        mapped.close()
        raise StoreError(f"The KV cache of engine {attach.engine} can't be addressed by blocks: {error}") from error
    nbytes = tuple(sum(layout.block_nbytes for layout in group) for group in layouts)
    return Session(attach, process, mapped, fence, layouts, nbytes)
