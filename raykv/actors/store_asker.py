"""The scheduler half's end of a node's store: questions out, answers in, and what is settled. It never waits.

A thread of its own opens the store and sends what has gathered. Every question is answered exactly once: by the
store, or by a miss when the store can't be reached or is late. A lease that comes with a late answer is given back.

An answer that other nodes may add to is held back while the store looks there, for a limit of its own: what takes
longer adds nothing, and the answer that there was stands.

What waits, and for how long, is decided in `core.hand_overs`, `core.reaches` and `core.unsettled`; this file is the one
thread that asks them, and longer than others for that.

What is settled is sent until the store has confirmed it (`core.unsettled`).
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from raykv.actors.store_call import OpenStore, StoreCaller, reason
from raykv.core.hand_overs import HandOvers
from raykv.core.reaches import Reaches
from raykv.core.unsettled import Unsettled
from raykv.core.vain_hints import MOST_IN_VAIN, PAUSE_S
from raykv.errors import HostError, RayKVError
from raykv.store_messages import LookedUp, LookUp, Settle
from raykv.types import EngineId, LeaseId, RequestId, StoreLife

logger = logging.getLogger("raykv")

FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 5.0
MAX_HASH_NBYTES = 64 << 10
"""Hashes in one call: a message of Ray's is cheap up to 100 KB."""
TIMEOUTS_TO_DOWN = 3
LEAST_REACH_S = 0.005
"""Looking at other nodes takes two round trips of Ray's at least."""
LEAST_AGAIN_S = 0.15
"""The same for a question that is asked again: a store that is busy must not count as failed for lack of time."""
VAIN = (
    "nothing came of what engines at %s announced, %d times in a row: it is not waited for during %g s. Do the engines "
    "have the same model, dtype, block size, parallel sizes and hashes (PYTHONHASHSEED)?"
)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A call has ended. `token` 0: the one that settles."""

    token: int
    result: Any
    error: HostError | None


@dataclass(frozen=True, slots=True)
class _Forget:
    """Nobody waits for this question any more."""

    request: RequestId


_Item: TypeAlias = LookUp | Settle | _Answer | _Forget | None
"""None: there is nothing but the end."""


class StoreAsker:
    """Public methods: any thread, a few microseconds each, but for `close`."""

    def __init__(
        self, open_handle: OpenStore, engine: EngineId, timeout_s: float, reach_s: float = 0.0, wait_s: float = 0.0
    ) -> None:
        """`reach_s`: how long after a question other nodes may be looked at for it; 0: they never are. `wait_s`: how
        long announced blocks are waited for; 0: they never are."""
        self._open_handle, self._engine, self._timeout_s = open_handle, engine, timeout_s
        self._reach_s = reach_s
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._answers: deque[LookedUp] = deque()
        self._closed = threading.Event()
        self._tried = threading.Event()
        self._up = False
        self._life: StoreLife | None = None
        self._store = ""
        # The thread's own from here on.
        self._handle: StoreCaller | None = None
        self._asked: dict[int, tuple[list[LookUp], float]] = {}
        self._reaches = Reaches()
        self._hand_overs = HandOvers(wait_s)
        self._token = 0
        self._unsettled = Unsettled()
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

    @property
    def store(self) -> str:
        """The name of the store's actor; empty while it is not up."""
        return self._store if self._up else ""

    def wait_tried(self, timeout_s: float) -> bool:
        """Block until the store was reached for the first time, or could not be; whether it is up. For start-up."""
        self._tried.wait(timeout_s)
        return self._up

    def ask(self, look_up: LookUp) -> None:
        """Its answer is in a later `take_answers`, after `timeout_s` and a little at most."""
        if self._up:
            self._inbox.put(look_up)
        else:
            self._answers.append(self._missed(look_up))

    def forget(self, request: RequestId) -> None:
        """Nobody waits for this question any more. It may be answered all the same."""
        self._inbox.put(_Forget(request))

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
        for look_up, have in self._reaches.overdue(math.inf):
            self._answer(look_up, have, final=True)
        self._answers.extend(self._hand_overs.over(math.inf))

    def _turn(self) -> None:
        if not self._up and not self._settle_token and time.monotonic() >= self._try_at:
            self._say_hello()
        look_ups: list[LookUp] = []
        for item in self._gather():
            match item:
                case LookUp():
                    look_ups.append(self._hand_overs.begin(item, time.monotonic()))
                case _Forget():
                    self._hand_overs.drop(item.request)
                case Settle():
                    self._unsettled.add(item)
                case _Answer():
                    self._take(item)
        now = time.monotonic()
        self._overdue(now)
        look_ups += self._hand_overs.due(now)
        self._tidy()
        if self._handle is not None and self._up:
            self._send_look_ups(look_ups)
            self._send_settles()
        else:
            self._miss(look_ups)

    def _gather(self) -> list[_Item]:
        """Blocks for the first item, or until something is due."""
        limits = [limit for _, limit in self._asked.values()]
        limits += [at for at in (self._reaches.next_at, self._hand_overs.next_at) if at is not None]
        if self._settle_token:
            limits.append(self._settle_limit)
        elif not self._up:
            limits.append(self._try_at)
        wait = max(0.0, min(limits) - time.monotonic()) if limits else None
        items: list[_Item] = []
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
        if not self._settle_token and self._unsettled:
            self._submit_settle(self._unsettled.take())

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
                self._store = self._handle.name
        except RayKVError as error:
            logger.warning("engine %s can't reach its store: %s", self._engine, error)
            self._tried.set()
            return
        self._submit_settle(Settle())

    # -- answers --------------------------------------------------------------------------------------------

    def _take(self, answer: _Answer) -> None:
        if answer.token == self._settle_token:
            self._take_settled(answer)
            return
        if answer.token in self._reaches:
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
            if self._reach_s > 0 and self._elsewhere(look_up, one):
                self._reach(look_up, one, limit - self._timeout_s + self._reach_s)
            else:
                self._answer(look_up, one)

    def _elsewhere(self, look_up: LookUp, one: LookedUp) -> bool:
        """Whether other nodes are to be looked at: where the blocks are announced each time, all of them once."""
        waits, said = self._hand_overs, look_up.hand_over
        if said is not None and said.store not in ("", self._store) and waits.short(look_up, one):
            return True
        return one.more and not waits.tried(look_up)

    def _reach(self, look_up: LookUp, have: LookedUp, limit: float) -> None:
        now = time.monotonic()
        left = min(limit - now, self._hand_overs.time_left(look_up, now))
        if left < (LEAST_AGAIN_S if self._hand_overs.tried(look_up) else LEAST_REACH_S):
            self._answer(look_up, have)
            return
        self._token += 1
        self._reaches.begin(self._token, look_up, have, now + left)
        self._submit(self._token, "reach", self._engine, look_up, have, left)

    def _answer(self, look_up: LookUp, found: LookedUp, final: bool = False) -> None:
        """What was found for it; `final`: and more will not be."""
        answer = self._hand_overs.found(look_up, found, time.monotonic(), final)
        if answer is not None:
            self._answers.append(answer)

    def _tidy(self) -> None:
        """What hand-overs and reaches leave behind."""
        spare = self._hand_overs.take_spare() + self._reaches.take_spare()
        if spare:
            self._unsettled.add(Settle(releases=tuple(spare)))
        for store in self._hand_overs.given_up:
            logger.warning(VAIN, store, MOST_IN_VAIN, PAUSE_S)
        self._hand_overs.given_up.clear()

    def _take_reached(self, answer: _Answer) -> None:
        """A store that is lost shows by its other calls: here the answer that there was is as good as any."""
        answered = self._reaches.end(answer.token, answer.result if answer.error is None else None)
        if answered is not None:
            self._answer(*answered)

    def _too_late(self, result: Any) -> None:
        """Somebody was told that it is a miss. (A late settlement was sent again meanwhile.)"""
        leases = tuple(one.lease for one in result if one.lease is not None) if isinstance(result, list) else ()
        if leases:
            self._unsettled.add(Settle(releases=leases))

    def _take_settled(self, answer: _Answer) -> None:
        self._settle_token = 0
        if answer.error is not None:
            self._unsettled.lost()
            self._lost(answer.error)
        else:
            self._unsettled.confirmed()
            self._life, self._up = answer.result, True
            self._pause, self._timeouts = FIRST_PAUSE_S, 0
        self._tried.set()

    def _overdue(self, now: float) -> None:
        for token in [token for token, (_, limit) in self._asked.items() if limit <= now]:
            asked, _ = self._asked.pop(token)
            self._miss(asked)
            self._timeouts += 1
        for look_up, have in self._reaches.overdue(now):
            self._answer(look_up, have)
        self._answers.extend(self._hand_overs.over(now))
        if self._settle_token and self._settle_limit <= now:
            late = HostError(f"it settled nothing within {self._timeout_s:g} s")
            self._take_settled(_Answer(self._settle_token, None, late))
        if self._up and self._timeouts >= TIMEOUTS_TO_DOWN:
            self._lost(HostError(f"{self._timeouts} look-ups took longer than {self._timeout_s:g} s"))

    def _miss(self, look_ups: Iterable[LookUp]) -> None:
        for look_up in look_ups:
            self._answer(look_up, self._missed(look_up), final=True)

    def _missed(self, look_up: LookUp) -> LookedUp:
        return LookedUp(self._life or StoreLife(""), look_up.request, 0)

    def _lost(self, error: HostError | None = None) -> None:
        """Not asked again before it has given a sign of life."""
        if self._up:
            why = reason(error) if error is not None else "an error of its link"
            logger.warning("engine %s lost its store (%s); it goes on without", self._engine, why)
        self._up, self._timeouts = False, 0
        self._try_at = time.monotonic() + self._pause
