"""A worker half's end of a node's store: jobs out, their ends in. It never waits, but for `start` and `close`.

**A job ends by its completion, or by the confirmed death of the store's process.** So a call that fails or runs past
its limit costs the store its process: it is killed by pidfd, and only when the kernel says that it is gone have the
jobs of that call failed. Then the link attaches to the store's next life. What was handed over while it is away ends
at once, as failed: nothing has touched it.

    UP --call failed, late, or process ended--> DOWN --process dead, pause over, attached--> UP

A job is sent to the life for which it was handed over, and names it: Ray may keep a call for an actor that dies and
deliver it to the next life, which must refuse it.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from raykv.actors.store_call import OpenStore, StoreCaller, StoreProcess, reason
from raykv.errors import HostError, RayKVError, StoreError
from raykv.store_messages import Attached, JobDone, LoadJob, RankAttach, SaveJob
from raykv.types import StoreLife

logger = logging.getLogger("raykv")

IDLE_CHECK_S = 0.25
"""How often the store's process is looked at (a pidfd poll, microseconds): Ray may take seconds to report a death."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 5.0
DEATH_LOG_S = 5.0
BATCH_NBYTES = 256 << 20
"""What goes in one call, unless a single job has more: its jobs end together."""
SLOWEST = 32 << 20
"""Bytes a second below which a copy counts as hung; on top of the time limit of a call."""

Job = TypeVar("Job", SaveJob, LoadJob)


@dataclass(frozen=True, slots=True)
class _Answer:
    token: int
    result: Any
    error: HostError | None


@dataclass(eq=False)
class _Lane(Generic[Job]):
    """Jobs of one kind. `waiting`: under the link's lock. The rest: the link's thread."""

    method: str
    timeout_s: float
    waiting: list[Job] = field(default_factory=list)
    flying: list[Job] = field(default_factory=list)
    token: int = 0
    limit: float = 0.0


class StoreWorkerLink:
    """Public methods: any thread. The KV cache in `attach` must stay exported until `close` has returned."""

    def __init__(self, open_handle: OpenStore, attach: RankAttach, timeout_s: float, load_timeout_s: float) -> None:
        """`timeout_s`: of attaching and of a save, `load_timeout_s` of a load, and time for their bytes on top."""
        self._open_handle, self._attach, self._timeout_s = open_handle, attach, timeout_s
        self._saves: _Lane[SaveJob] = _Lane("save", timeout_s)
        self._loads: _Lane[LoadJob] = _Lane("load", load_timeout_s)
        self._inbox: queue.SimpleQueue[_Answer | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._done: list[JobDone] = []
        self._up = False
        self._attached: Attached | None = None  # of the life that is or was the last
        self._closed = threading.Event()
        self._handle: StoreCaller | None = None
        self._process: StoreProcess | None = None
        self._token = 0
        self._thread = threading.Thread(target=self._run, name="raykv-store-link", daemon=True)

    # -- the worker's thread --------------------------------------------------------------------------------

    def start(self, timeout_s: float) -> Attached:
        """Block until attached. Raises StoreError, with what the store has against it."""
        attached = self._join_store(timeout_s)
        self._thread.start()
        return attached

    @property
    def slot_nbytes(self) -> int:
        """Of the store's slots; 0 before `start`."""
        return self._attached.slot_nbytes if self._attached is not None else 0

    @property
    def pid(self) -> int | None:
        """The store's process, while this link is attached to it."""
        return self._attached.pid if self._up and self._attached is not None else None

    @property
    def life(self) -> StoreLife | None:
        """The life that jobs go to now; None: they fail at once."""
        return self._attached.store if self._up and self._attached is not None else None

    def save(self, jobs: Sequence[SaveJob]) -> None:
        """Each ends by one JobDone. The forward pass behind the blocks must be recorded in the fence before."""
        self._hand_over(self._saves, jobs)

    def load(self, jobs: Sequence[LoadJob]) -> None:
        """Each ends by one JobDone; until then the blocks belong to it."""
        self._hand_over(self._loads, jobs)

    def take_done(self) -> list[JobDone]:
        """The jobs that have ended since the last call."""
        if not self._done:  # a lock saved on most steps
            return []
        with self._lock:
            done, self._done = self._done, []
        return done

    def close(self, timeout: float = 5.0) -> None:
        """Detach: when this returns in time, the store has let go of the KV cache. Idempotent."""
        self._closed.set()
        with self._lock:
            was_up, self._up = self._up, False
        self._inbox.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        if was_up and self._handle is not None:
            try:
                self._handle.call("detach", self._attach.engine, self._attach.rank, timeout=timeout)
            except RayKVError as error:
                logger.warning("could not detach from the store (%s); it lets go when this process ends", reason(error))

    def _hand_over(self, lane: _Lane[Job], jobs: Sequence[Job]) -> None:
        with self._lock:
            if self._up:
                lane.waiting.extend(jobs)
            else:
                self._done.extend(_failed(job, "the store is away") for job in jobs)
        self._inbox.put(None)

    # -- the link's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        why: str | None = None
        while not self._closed.is_set():
            try:
                if why is not None:
                    self._lose(why)
                why = self._turn()
            except Exception as error:
                logger.exception("link to the store")
                why = f"the link to it failed: {error}"
                self._closed.wait(IDLE_CHECK_S)

    def _turn(self) -> str | None:
        """Send what waits, take one answer. Returns why the store has to go, if so."""
        self._send(self._saves)
        self._send(self._loads)
        limits = [lane.limit for lane in (self._saves, self._loads) if lane.flying]
        wait = min([IDLE_CHECK_S, *(limit - time.monotonic() for limit in limits)])
        try:
            answer = self._inbox.get(timeout=max(0.0, wait))
        except queue.Empty:
            answer = None
        why = self._take(answer) if answer is not None else None
        if why is None:
            why = self._overdue()
        if why is None and self._process is not None and not self._process.alive():
            why = "its process ended"
        return why

    def _send(self, lane: _Lane[Job]) -> None:
        if lane.flying or self._handle is None or self._attached is None:
            return
        with self._lock:
            nbytes, count = 0, 0
            while count < len(lane.waiting) and nbytes < BATCH_NBYTES:
                nbytes += _num_blocks(lane.waiting[count]) * self._attached.slot_nbytes
                count += 1
            lane.flying, lane.waiting = lane.waiting[:count], lane.waiting[count:]
        if not lane.flying:
            return
        self._token += 1
        token = lane.token = self._token
        lane.limit = time.monotonic() + lane.timeout_s + nbytes / SLOWEST
        try:
            self._handle.submit(
                lane.method,
                self._attached.store,
                self._attach.engine,
                self._attach.rank,
                lane.flying,
                done=lambda result, error: self._inbox.put(_Answer(token, result, error)),
            )
        except RayKVError as error:  # it may have been sent all the same
            self._inbox.put(_Answer(token, None, HostError(str(error))))

    def _take(self, answer: _Answer) -> str | None:
        """Returns why the store has to go, if so."""
        lane = self._saves if answer.token == self._saves.token else self._loads
        if answer.token != lane.token or not lane.flying:
            return None  # of a life that is over
        if answer.error is not None:
            return reason(answer.error)
        life, done = answer.result
        if self._attached is None or life != self._attached.store:
            return f"another life of it answered ({life})"
        if [one.job for one in done] != [job.job for job in lane.flying]:
            return "it answered for other jobs than it was given"
        with self._lock:
            self._done.extend(done)
        lane.flying = []
        return None

    def _overdue(self) -> str | None:
        now = time.monotonic()
        for lane in (self._saves, self._loads):
            if lane.flying and lane.limit <= now:
                return f"a {lane.method} took longer than {lane.timeout_s:g} s and the time for its bytes"
        return None

    # -- loss and return ------------------------------------------------------------------------------------

    def _lose(self, why: str) -> None:
        """Make sure that it is dead, settle by its death, and come back."""
        logger.warning("the store (pid %s) is lost: %s", self._attached.pid if self._attached else "?", why)
        with self._lock:
            self._up = False
            for lane in (self._saves, self._loads):
                self._done.extend(_failed(job, why) for job in lane.waiting)
                lane.waiting = []
        if not self._wait_dead():
            return  # closed meanwhile: nothing is known of the jobs in flight, so nothing is said
        with self._lock:
            for lane in (self._saves, self._loads):
                self._done.extend(_failed(job, why) for job in lane.flying)
                lane.flying, lane.token = [], 0
        self._come_back()

    def _wait_dead(self) -> bool:
        if self._process is None:
            return True
        self._process.signal(signal.SIGKILL)
        warn_at = time.monotonic() + DEATH_LOG_S
        while not self._process.wait(IDLE_CHECK_S):
            if self._closed.is_set():
                return False
            if time.monotonic() >= warn_at:
                warn_at = time.monotonic() + DEATH_LOG_S
                logger.error("the killed store does not end: it is stuck in the kernel; its jobs stay pinned")
        return True

    def _come_back(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._closed.wait(pause):
            pause = min(LAST_PAUSE_S, pause * 2)
            try:
                attached = self._join_store(max(self._timeout_s, LAST_PAUSE_S))
            except StoreError as error:
                logger.warning("the store is not back (%s); next try in %g s", error, pause)
            else:
                logger.info("the store is back: %s, pid %d", attached.store, attached.pid)
                return

    def _join_store(self, timeout_s: float) -> Attached:
        try:
            handle = self._open_handle()
            attached: Attached = handle.call("attach", self._attach, timeout=timeout_s)
        except StoreError:
            raise
        except RayKVError as error:
            raise StoreError(f"The store of this node can't be used: {reason(error)}") from error
        process = handle.process(attached)
        if process is None:
            raise StoreError(
                f"The store's process {attached.pid} can't be seen from here: it has died, or this process is in "
                "another PID namespace. Run engine and Ray node in one container (or with a shared PID namespace)."
            )
        self._handle, self._process = handle, process
        with self._lock:
            self._attached, self._up = attached, not self._closed.is_set()
        return attached


def _num_blocks(job: SaveJob | LoadJob) -> int:
    return sum(map(len, job.block_ids))


def _failed(job: SaveJob | LoadJob, why: str) -> JobDone:
    return JobDone(job.job, ok=False, bad_blocks=tuple(block for ids in job.block_ids for block in ids), error=why)
