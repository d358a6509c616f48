"""The scheduler half's end of a node's store: questions out, answers in, and what is settled. It never waits.

A thread of its own opens the store and sends what has gathered. Every question is answered exactly once: by the
store, or by a miss when the store can't be reached or is late. A lease that comes with a late answer is given back.

An answer that other nodes may add to is held back while the store looks there, for a limit of its own: what takes
longer adds nothing, and the answer that there was stands.

What is settled is sent until the store has confirmed it. That is safe in any order and to any life of the store:
jobs and leases of another life mean nothing to it, and a job that was settled is unknown.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from raykv.actors.store_call import OpenStore, StoreCaller, reason
from raykv.errors import HostError, RayKVError
from raykv.store_messages import LookedUp, LookUp, Settle
from raykv.types import EngineId, LeaseId, StoreLife

logger = logging.getLogger("raykv")

FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 5.0
MAX_SETTLE = 1000
"""Ids in one call: a message of Ray's is cheap up to 100 KB."""
MAX_HASH_NBYTES = 64 << 10
"""Hashes in one call, for the same reason."""
MAX_UNSETTLED = 100_000
"""Ids kept for a store that can't be reached; beyond it the oldest go (its engine's end settles them too)."""
TIMEOUTS_TO_DOWN = 3
LEAST_REACH_S = 0.005
"""Looking at other nodes takes two round trips of Ray's at least."""
MAX_LATE = 1000
"""Answers from other nodes that are waited for though nobody needs them: only to give back what they have leased."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """A call has ended. `token` 0: the one that settles."""

    token: int
    result: Any
    error: HostError | None


@dataclass(frozen=True, slots=True)
class _Reaching:
    """The store looks at other nodes for more than `have`, which is the answer at `limit`."""

    have: LookedUp
    limit: float


class StoreAsker:
    """Public methods: any thread, a few microseconds each, but for `close`."""

    def __init__(self, open_handle: OpenStore, engine: EngineId, timeout_s: float, reach_s: float = 0.0) -> None:
        """`reach_s`: how long after a question other nodes may be looked at for it; 0: they never are."""
        self._open_handle, self._engine, self._timeout_s = open_handle, engine, timeout_s
        self._reach_s = reach_s
        self._inbox: queue.SimpleQueue[LookUp | Settle | _Answer | None] = queue.SimpleQueue()
        self._answers: deque[LookedUp] = deque()
        self._closed = threading.Event()
        self._tried = threading.Event()
        self._up = False
        self._life: StoreLife | None = None
        # The thread's own from here on.
        self._handle: StoreCaller | None = None
        self._asked: dict[int, tuple[list[LookUp], float]] = {}
        self._reaching: dict[int, _Reaching] = {}
        self._late: dict[int, LookedUp] = {}  # what was answered instead
        self._token = 0
        self._unsettled: deque[Settle] = deque()
        self._settling: list[Settle] = []
        self._settle_limit = 0.0
        self._settle_token = 0
        self._try_at, self._pause = 0.0, FIRST_PAUSE_S
        self._timeouts = 0
        self._thread = threading.Thread(target=self._run, name="raykv-store-asker", daemon=True)
        self._thread.start()

    # -- the scheduler's thread -----------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """Whether asking makes sense: the store answered when it was last heard."""
        return self._up

    @property
    def life(self) -> StoreLife | None:
        """The life that was heard last."""
        return self._life

    def wait_tried(self, timeout_s: float) -> bool:
        """Block until the store was reached for the first time, or could not be; whether it is up. For start-up."""
        self._tried.wait(timeout_s)
        return self._up

    def ask(self, look_up: LookUp) -> None:
        """Its answer is in a later `take_answers`, after `timeout_s` and a little at most."""
        if self._up:
            self._inbox.put(look_up)
        else:
            self._miss([look_up])

    def take_answers(self) -> list[LookedUp]:
        """What was answered since the last call."""
        taken: list[LookedUp] = []
        while self._answers:
            taken.append(self._answers.popleft())
        return taken

    def settle(self, settle: Settle) -> None:
        """Will reach the store, merged with others, unless that dies first."""
        self._inbox.put(settle)

    def release(self, leases: Iterable[LeaseId]) -> None:
        """`settle` of leases alone."""
        self.settle(Settle(releases=tuple(leases)))

    def close(self, timeout: float = 2.0) -> None:
        """End the thread; what is not settled then is settled by the engine's end. Idempotent."""
        self._closed.set()
        self._up = False
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    # -- the asker's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._turn()
            except Exception:
                logger.exception("asking the store of engine %s", self._engine)
                self._lost()
        self._miss([look_up for asked, _ in self._asked.values() for look_up in asked])
        self._answers.extend(reaching.have for reaching in self._reaching.values())

    def _turn(self) -> None:
        now = time.monotonic()
        if not self._up and not self._settling and now >= self._try_at:
            self._say_hello()
        look_ups: list[LookUp] = []
        for item in self._gather():
            match item:
                case LookUp():
                    look_ups.append(item)
                case Settle():
                    self._unsettled.append(item)
                    self._bound()
                case _Answer():
                    self._take(item)
        self._overdue(time.monotonic())
        if self._handle is not None and self._up:
            self._send_look_ups(look_ups)
            self._send_settles()
        else:
            self._miss(look_ups)

    def _gather(self) -> list[LookUp | Settle | _Answer | None]:
        """Blocks for the first item, or until something is due."""
        limits = [limit for _, limit in self._asked.values()] + [one.limit for one in self._reaching.values()]
        if self._settling:
            limits.append(self._settle_limit)
        elif not self._up:
            limits.append(self._try_at)
        wait = max(0.0, min(limits) - time.monotonic()) if limits else None
        items: list[LookUp | Settle | _Answer | None] = []
        try:
            items.append(self._inbox.get(timeout=wait))
            while True:
                items.append(self._inbox.get_nowait())
        except queue.Empty:
            return items

    def _send_look_ups(self, look_ups: list[LookUp]) -> None:
        while look_ups and self._handle is not None:
            count, nbytes = 0, 0
            while count < len(look_ups) and (count == 0 or nbytes + len(look_ups[count].hashes) <= MAX_HASH_NBYTES):
                nbytes += len(look_ups[count].hashes)
                count += 1
            batch, look_ups = look_ups[:count], look_ups[count:]
            self._token += 1
            self._asked[self._token] = (batch, time.monotonic() + self._timeout_s)
            self._submit(self._token, "look_ups", self._engine, batch)
        self._miss(look_ups)

    def _send_settles(self) -> None:
        if self._settling or not self._unsettled:
            return
        ids = 0
        while self._unsettled and (ids == 0 or ids + _size(self._unsettled[0]) <= MAX_SETTLE):
            ids += _size(self._unsettled[0])
            self._settling.append(self._unsettled.popleft())
        self._submit_settle(_merged(self._settling))

    def _submit_settle(self, settle: Settle) -> None:
        self._token += 1
        self._settle_token = self._token
        self._settle_limit = time.monotonic() + max(self._timeout_s, FIRST_PAUSE_S)
        self._submit(self._token, "settle", self._engine, settle)

    def _submit(self, token: int, method: str, *args: Any) -> None:
        assert self._handle is not None
        try:
            self._handle.submit(
                method, *args, done=lambda result, error: self._inbox.put(_Answer(token, result, error))
            )
        except RayKVError as error:
            self._inbox.put(_Answer(token, None, HostError(str(error))))

    def _say_hello(self) -> None:
        """Find the store, and have it settle nothing: an answer is a sign of life."""
        self._try_at = time.monotonic() + self._pause
        self._pause = min(LAST_PAUSE_S, self._pause * 2)
        try:
            if self._handle is None:
                self._handle = self._open_handle()
        except RayKVError as error:
            logger.warning("engine %s can't reach its store: %s", self._engine, error)
            self._tried.set()
            return
        self._settling = [Settle()]
        self._submit_settle(Settle())

    # -- answers --------------------------------------------------------------------------------------------

    def _take(self, answer: _Answer) -> None:
        if answer.token == self._settle_token:
            self._take_settled(answer)
            return
        if answer.token in self._reaching or answer.token in self._late:
            self._take_reached(answer)
            return
        asked, limit = self._asked.pop(answer.token, ([], 0.0))
        if answer.error is not None:
            self._miss(asked)
            if asked:
                self._lost(answer.error)
            return
        if not asked:
            self._too_late(answer.result)
            return
        found: list[LookedUp] = answer.result
        self._timeouts = 0
        if found:
            self._life = found[0].store
        for look_up, one in zip(asked, found, strict=True):
            if one.more and self._reach_s > 0:
                self._reach(look_up, one, limit - self._timeout_s + self._reach_s)
            else:
                self._answers.append(one)

    def _reach(self, look_up: LookUp, have: LookedUp, limit: float) -> None:
        left = limit - time.monotonic()
        if left < LEAST_REACH_S:
            self._answers.append(have)
            return
        self._token += 1
        self._reaching[self._token] = _Reaching(have, limit)
        self._submit(self._token, "reach", self._engine, look_up, have, left)

    def _take_reached(self, answer: _Answer) -> None:
        """A store that is lost shows by its other calls: here the answer that there was is as good as any."""
        reaching = self._reaching.pop(answer.token, None)
        if reaching is not None:
            self._answers.append(answer.result if answer.error is None else reaching.have)
            return
        have = self._late.pop(answer.token)
        if answer.error is None and have.lease is None and answer.result.lease is not None:
            self._unsettled.append(Settle(releases=(answer.result.lease,)))

    def _too_late(self, result: Any) -> None:
        """Somebody was told that it is a miss. (A late settlement was sent again meanwhile.)"""
        leases = tuple(one.lease for one in result if one.lease is not None) if isinstance(result, list) else ()
        if leases:
            self._unsettled.append(Settle(releases=leases))

    def _take_settled(self, answer: _Answer) -> None:
        settled, self._settling, self._settle_token = self._settling, [], 0
        if answer.error is not None:
            self._unsettled.extendleft(reversed([one for one in settled if _size(one)]))
            self._bound()
            self._lost(answer.error)
        else:
            self._life, self._up = answer.result, True
            self._pause, self._timeouts = FIRST_PAUSE_S, 0
        self._tried.set()

    def _overdue(self, now: float) -> None:
        for token in [token for token, (_, limit) in self._asked.items() if limit <= now]:
            asked, _ = self._asked.pop(token)
            self._miss(asked)
            self._timeouts += 1
        for token in [token for token, one in self._reaching.items() if one.limit <= now]:
            have = self._reaching.pop(token).have
            self._answers.append(have)
            self._late[token] = have
            if len(self._late) > MAX_LATE:
                del self._late[next(iter(self._late))]
        if self._settling and self._settle_limit <= now:
            late = HostError(f"it settled nothing within {self._timeout_s:g} s")
            self._take_settled(_Answer(self._settle_token, None, late))
        if self._up and self._timeouts >= TIMEOUTS_TO_DOWN:
            self._lost(HostError(f"{self._timeouts} look-ups took longer than {self._timeout_s:g} s"))

    def _miss(self, look_ups: Iterable[LookUp]) -> None:
        life = self._life or StoreLife("")
        self._answers.extend(LookedUp(life, look_up.request, 0) for look_up in look_ups)

    def _lost(self, error: HostError | None = None) -> None:
        """Not asked again before it has given a sign of life."""
        if self._up:
            why = reason(error) if error is not None else "an error of its link"
            logger.warning("engine %s lost its store (%s); it goes on without", self._engine, why)
        self._up, self._timeouts = False, 0
        self._try_at = time.monotonic() + self._pause

    def _bound(self) -> None:
        if len(self._unsettled) <= MAX_SETTLE:  # so that the sum costs nothing while all is well
            return
        kept = sum(map(_size, self._unsettled))
        while kept > MAX_UNSETTLED:
            kept -= _size(self._unsettled.popleft())


def _size(settle: Settle) -> int:
    return len(settle.commits) + len(settle.aborts) + len(settle.releases)


def _merged(settles: Iterable[Settle]) -> Settle:
    several = list(settles)
    return Settle(
        commits=tuple(job for settle in several for job in settle.commits),
        aborts=tuple(job for settle in several for job in settle.aborts),
        releases=tuple(lease for settle in several for lease in settle.releases),
    )
