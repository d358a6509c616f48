"""Look-ups whose blocks are on their way: a prefill engine has computed them, and a store is about to have them.

Such a question is answered when what is held reaches what was announced, or when its time is over, then with the best
that was found; until then it is asked again and again, after pauses that grow. Each asking has a name of its own, so
that it has a lease of its own: what was found before stays leased until more is found.

This class decides only; its caller asks the store, and gives back the leases that come to be spare. One thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from raykv.core.vain_hints import VainHints
from raykv.store_messages import HandOver, LookedUp, LookUp
from raykv.types import LeaseId, RequestId

FIRST_PAUSE_S, LAST_PAUSE_S = 0.01, 0.2


@dataclass(slots=True, eq=False)
class _Waiting:
    """`due`: when it is asked again; None while it is being asked, under the name `asked`."""

    look_up: LookUp
    hand_over: HandOver
    since: float
    deadline: float
    asked: RequestId
    due: float | None = None
    best: LookedUp | None = None
    pause_s: float = FIRST_PAUSE_S
    tries: int = 1


class HandOvers:
    """The questions that wait. Times are monotonic seconds."""

    def __init__(self, wait_s: float) -> None:
        """`wait_s`: how long a question waits at most; 0: none ever waits."""
        self._wait_s, self._vain = wait_s, VainHints()
        self.given_up: list[str] = []
        """Stores whose hints are passed over for a while from now on; the caller empties it."""
        self._waiting: dict[RequestId, _Waiting] = {}
        self._names: dict[RequestId, _Waiting] = {}  # of what is being asked now
        self._spare: list[LeaseId] = []

    def begin(self, look_up: LookUp, now: float) -> LookUp:
        """What to ask for the first time: the same, without its announcement if that is not waited for."""
        said, name = look_up.hand_over, look_up.request
        if said is None or self._wait_s <= 0 or not self._vain.may(said.store, now):
            return replace(look_up, hand_over=None)
        self._waiting[name] = self._names[name] = _Waiting(look_up, said, now, now + self._wait_s, name)
        return look_up

    def found(self, asked: LookUp, answer: LookedUp, now: float, final: bool = False) -> LookedUp | None:
        """What was found: the answer to the question as it was first asked, or None, since it waits on or nobody waits
        any more. `final`: it can't be asked again."""
        if asked.hand_over is None:
            return answer
        waiting = self._names.pop(asked.request, None)
        if waiting is None:
            self._spare_of(answer)
            return None
        answer, best = replace(answer, request=waiting.look_up.request), waiting.best
        keeps = best is not None and best.store == answer.store and best.num_blocks > answer.num_blocks
        waiting.best, worse = (best, answer) if keeps else (answer, best)
        self._spare_of(worse)
        if final or not self.short(asked, waiting.best or answer) or now >= waiting.deadline:
            return self._answered(waiting, now)
        waiting.due = min(waiting.deadline, now + waiting.pause_s)
        waiting.pause_s = min(LAST_PAUSE_S, 2 * waiting.pause_s)
        return None

    def due(self, now: float) -> list[LookUp]:
        """What is to be asked again now, under new names."""
        asks = []
        for waiting in self._waiting.values():
            if waiting.due is not None and waiting.due <= now < waiting.deadline:
                waiting.due, waiting.asked = None, RequestId(f"{waiting.look_up.request}+{waiting.tries}")
                waiting.tries += 1
                self._names[waiting.asked] = waiting
                asks.append(replace(waiting.look_up, request=waiting.asked))
        return asks

    def over(self, now: float) -> list[LookedUp]:
        """Answers to questions whose time is over. One that has none yet is answered when it has its first."""
        late = [one for one in self._waiting.values() if now >= one.deadline and one.best is not None]
        return [answer for one in late if (answer := self._answered(one, now)) is not None]

    def _answered(self, waiting: _Waiting, now: float) -> LookedUp | None:
        best, store = self._end(waiting), waiting.hand_over.store
        if best is not None and best.num_blocks:
            self._vain.well(store)
        elif now >= waiting.deadline and self._vain.in_vain(store, waiting.since, now):
            self.given_up.append(store)
        return best

    def _end(self, waiting: _Waiting) -> LookedUp | None:
        """What is still being asked for it is nobody's from here on."""
        del self._waiting[waiting.look_up.request]
        self._names.pop(waiting.asked, None)
        return waiting.best

    def drop(self, request: RequestId) -> None:
        """Nobody waits for this question any more. Unknown ones are fine."""
        waiting = self._waiting.get(request)
        if waiting is not None:
            self._spare_of(self._end(waiting))

    def time_left(self, asked: LookUp, now: float) -> float:
        """Seconds until the question's time is over; infinite if nothing was announced for it."""
        waiting = self._names.get(asked.request)
        return math.inf if waiting is None else waiting.deadline - now

    def tried(self, asked: LookUp) -> bool:
        """Whether it was asked before."""
        waiting = self._names.get(asked.request)
        return waiting is not None and waiting.tries > 1

    def short(self, asked: LookUp, answer: LookedUp) -> bool:
        """Whether less was found than is announced; False if nothing is."""
        return asked.hand_over is not None and answer.num_blocks < asked.hand_over.blocks

    @property
    def next_at(self) -> float | None:
        """When `due` or `over` next has something; None: not before something is found."""
        times = []
        for waiting in self._waiting.values():
            if waiting.due is not None:
                times.append(waiting.due)
            elif waiting.best is not None:
                times.append(waiting.deadline)
        return min(times, default=None)

    def take_spare(self) -> list[LeaseId]:
        """Leases that nobody needs, each once."""
        spare, self._spare = self._spare, []
        return spare

    def _spare_of(self, answer: LookedUp | None) -> None:
        if answer is not None and answer.lease is not None:
            self._spare.append(answer.lease)

    def __len__(self) -> int:
        return len(self._waiting)
