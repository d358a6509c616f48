"""Who loads a request's prefix: the answers of the children, and the choice between them.

Every child is asked once for each number of locally computed tokens; an answer is kept until the load is
planned, and a child that says "not yet" is polled. A child that has not answered within its limit counts as a
miss, so that a queue of requests never stands still.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raykv.config import LoadPolicy
from raykv.messages import ChildIndex
from raykv.types import RequestId


class Outcome(enum.Enum):
    """What is known of a request's hit. PENDING: a child that counts has not answered yet."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"


@dataclass(frozen=True, slots=True)
class Answer:
    """A child's hit beyond `computed` tokens. `tokens` None: not known yet."""

    tokens: int | None
    is_async: bool
    computed: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Who loads how much. Without a HIT nobody does."""

    outcome: Outcome
    child: ChildIndex = -1
    tokens: int = 0
    is_async: bool = False


@dataclass(slots=True)
class _Lookup:
    started: float
    answers: dict[ChildIndex, Answer] = field(default_factory=dict)


class LookupBook:
    """The open look-ups of one engine. One thread: the scheduler's."""

    def __init__(self, policy: LoadPolicy, limits_s: Sequence[float]) -> None:
        """`limits_s`: by child, how long it may say "not yet"."""
        self._policy = policy
        self._limits = tuple(limits_s)
        self._open: dict[RequestId, _Lookup] = {}
        self._chosen: dict[RequestId, Choice] = {}
        self.timed_out: dict[ChildIndex, int] = {}

    def to_ask(self, request: RequestId, computed: int, now: float) -> list[ChildIndex]:
        """The children whose answer is missing, open, or for another number of computed tokens."""
        lookup = self._open.setdefault(request, _Lookup(now))
        ask = []
        for child in range(len(self._limits)):
            answer = lookup.answers.get(child)
            if answer is None or answer.tokens is None or answer.computed != computed:
                ask.append(child)
        return ask

    def answer(self, request: RequestId, child: ChildIndex, answer: Answer) -> None:
        self._open[request].answers[child] = answer

    def choose(self, request: RequestId, eligible: Mapping[ChildIndex, bool], now: float) -> Choice:
        """The plan for now. `eligible`: children whose tokens may be used for this request."""
        lookup = self._open[request]
        best = Choice(Outcome.MISS)
        for child, limit in enumerate(self._limits):
            answer = lookup.answers.get(child)
            if answer is None or not eligible.get(child, False):
                continue
            if answer.tokens is None:
                if now - lookup.started >= limit:
                    self.timed_out[child] = self.timed_out.get(child, 0) + 1
                    lookup.answers[child] = Answer(0, False, answer.computed)
                    continue
                # Not decided yet. With policy FIRST an earlier hit has already ended this loop.
                self._chosen.pop(request, None)
                return Choice(Outcome.PENDING)
            if answer.tokens > best.tokens:
                best = Choice(Outcome.HIT, child, answer.tokens, answer.is_async)
                if self._policy is LoadPolicy.FIRST:
                    break
        self._chosen[request] = best
        return best

    def take(self, request: RequestId) -> Choice:
        """Blocks were allocated: the choice made for the request, which ends its look-up."""
        self._open.pop(request, None)
        return self._chosen.pop(request, Choice(Outcome.MISS))

    def chosen(self, request: RequestId) -> Choice | None:
        """The choice made, not taken yet."""
        return self._chosen.get(request)

    def forget(self, request: RequestId) -> None:
        self._open.pop(request, None)
        self._chosen.pop(request, None)

    def __len__(self) -> int:
        return len(self._open)
