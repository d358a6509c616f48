"""The look-ups of one engine: asked once, polled as often as vLLM likes, taken once.

    PENDING --answered--> HELD or MISS        PENDING --time limit--> MISS
    HELD --kept too long--> STALE (its lease was given back)

Each question has a name of its own, so an answer is that of exactly one: the answer to a question that nobody waits
for any more, of a request that ended or of one that was asked for again, only has its lease given back.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from raykv.engine_messages import Why
from raykv.store_messages import HandOver, LookedUp, LookUp, Settle
from raykv.types import LeaseId, RequestId


class Asker(Protocol):
    """What of `actors.store_link.StoreAsker` is used here. Only `wait_tried` waits."""

    def wait_tried(self, timeout_s: float) -> bool: ...

    @property
    def store(self) -> str: ...

    def ask(self, look_up: LookUp) -> None: ...

    def forget(self, request: RequestId) -> None: ...

    def take_answers(self) -> list[LookedUp]: ...

    def settle(self, settle: Settle) -> None: ...

    def release(self, leases: Iterable[LeaseId]) -> None: ...

    def close(self) -> None: ...


class Outcome(enum.Enum):
    """What is known of a request's prefix."""

    PENDING = "pending"
    HELD = "held"
    MISS = "miss"
    STALE = "stale"


@dataclass(slots=True)
class _Asked:
    name: RequestId
    asked_at: float
    hand_over: HandOver | None = None
    answer: LookedUp | None = None
    answered_at: float = 0.0
    missed: bool = False
    why: Why | None = None


class TierLookUps:
    """Times are monotonic seconds. One thread: the scheduler's."""

    def __init__(self, asker: Asker, timeout_s: float, lease_s: float) -> None:
        self._asker, self._timeout_s = asker, timeout_s
        # A load must begin while its lease still holds; half of it leaves room for the load of a long prompt.
        self._keep_s = lease_s / 2
        self._asked: dict[RequestId, _Asked] = {}
        self._request_of: dict[RequestId, RequestId] = {}  # by the question's name
        self._numbers = itertools.count()
        self.asks = self.misses = self.timed_out = 0
        self.waited_s = 0.0
        """From the questions to their answers, added up."""

    def ask(
        self, request: RequestId, hashes: bytes, now: float, hand_over: HandOver | None = None, tenant: bytes = b""
    ) -> None:
        """Ask for the prefix with these block hashes; an earlier question of the request is dropped. The answer may
        wait for what `hand_over` announces."""
        self.drop(request)
        name = RequestId(f"{request}#{next(self._numbers)}")
        self._asked[request] = _Asked(name, now, hand_over, why=None if self._asker.store else Why.CHILD_OFF)
        self._request_of[name] = request
        self.asks += 1
        self._asker.ask(LookUp(name, hashes, hand_over, tenant))

    def drain(self, now: float) -> None:
        """Take in what was answered."""
        late: list[LeaseId] = []
        for answer in self._asker.take_answers():
            request = self._request_of.pop(answer.request, None)
            asked = self._asked.get(request) if request is not None else None
            if asked is None or asked.missed:
                if answer.lease is not None:
                    late.append(answer.lease)
                continue
            asked.answer, asked.answered_at = answer, now
            self.waited_s += now - asked.asked_at
            if not answer.num_blocks:
                asked.missed = True
                self.misses += 1
        if late:
            self._asker.release(late)

    def poll(self, request: RequestId, now: float) -> tuple[Outcome, int]:
        """What is known, and how many leading blocks are held."""
        self.drain(now)
        asked = self._asked.get(request)
        if asked is None or asked.missed:
            return Outcome.MISS, 0
        if asked.answer is None:
            if now - asked.asked_at < self._timeout_s:
                return Outcome.PENDING, 0
            asked.missed, asked.why = True, Why.TIMED_OUT
            self.timed_out += 1
            return Outcome.MISS, 0
        if now - asked.answered_at > self._keep_s:
            self.drop(request)
            return Outcome.STALE, 0
        return Outcome.HELD, asked.answer.num_blocks

    def take(self, request: RequestId) -> LookedUp | None:
        """End the look-up. With an answer that has blocks its lease is the caller's from here on."""
        asked = self._asked.get(request)
        if asked is None or asked.answer is None or asked.missed:
            self.drop(request)
            return None
        del self._asked[request]
        return asked.answer

    def drop(self, request: RequestId) -> None:
        """Nobody waits for it any more. Unknown requests are fine."""
        asked = self._asked.pop(request, None)
        if asked is None:
            return
        if asked.answer is None:
            # Its name stays unknown to `drain`, which then gives the lease back.
            self._request_of.pop(asked.name, None)
            if asked.hand_over is not None:
                self._asker.forget(asked.name)
        elif asked.answer.lease is not None:
            self._asker.release([asked.answer.lease])

    def why_missed(self, request: RequestId) -> Why | None:
        """Why it is a miss, if not because nothing was found."""
        asked = self._asked.get(request)
        return asked.why if asked is not None and asked.missed else None

    def waits_for(self, request: RequestId) -> int:
        """How many leading blocks must be there before its answer comes; 0 if it has come, or waits for none."""
        asked = self._asked.get(request)
        if asked is None or asked.answer is not None or asked.missed or asked.hand_over is None:
            return 0
        return asked.hand_over.blocks

    def requests(self) -> list[RequestId]:
        """Those with a look-up that nobody has taken."""
        return list(self._asked)

    @property
    def pending(self) -> bool:
        """Whether a request still waits for its answer."""
        return any(asked.answer is None and not asked.missed for asked in self._asked.values())

    def __len__(self) -> int:
        return len(self._asked)
