"""Who loads a request's prefix: the answers of the children, and the choice between them.

Children are asked in the order of `eligible`, which may change from poll to poll as the chain does. Every child is
asked once for each number of computed tokens; an answer is kept until the load is planned, and a
child that says "not yet" is polled. A child that has not answered within its limit counts as a miss, so that a queue
of requests never stands still. Composed loads ask a child with the end of the ranges before it (see `load_plan`).

One poll is `to_ask`, an `answer` to each question before the next one is taken, then `choose`:

    for child, computed in book.to_ask(...):
        book.answer(request, child, ...)
    choice = book.choose(request, now)
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from raykv.config import LoadPolicy
from raykv.core.load_plan import Answer, Part, Walk
from raykv.engine_messages import Why
from raykv.messages import ChildIndex
from raykv.types import RequestId


class Outcome(enum.Enum):
    """What is known of a request's hit. PENDING: a child that counts has not answered yet."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"


@dataclass(frozen=True, slots=True)
class Choice:
    """Who loads how much: without a HIT nobody does. Only asynchronous loads have several parts."""

    outcome: Outcome
    parts: tuple[Part, ...] = ()
    is_async: bool = False

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)


MISS = Choice(Outcome.MISS)


@dataclass(slots=True)
class _Lookup:
    """A request's open look-up. What is below `answers` is that of its last poll."""

    started: float
    answers: dict[ChildIndex, Answer] = field(default_factory=dict)
    computed: int = 0
    num_tokens: int = 0
    eligible: tuple[ChildIndex, ...] = ()


class LookupBook:
    """The open look-ups of one engine. One thread: the scheduler's."""

    def __init__(
        self,
        policy: LoadPolicy,
        limits_s: Sequence[float] | Mapping[ChildIndex, float],
        block_size: int = 1,
        any_range: Collection[ChildIndex] = (),
    ) -> None:
        """`limits_s`: by child, how long it may say "not yet". `any_range`: children that load any whole blocks. Both
        are read when they are needed, so their owner may go on to change them."""
        self._policy = policy
        self._limits = limits_s
        self._block_size = block_size
        self._any_range = any_range
        self._open: dict[RequestId, _Lookup] = {}
        self._chosen: dict[RequestId, Choice] = {}
        self.timed_out: dict[ChildIndex, int] = {}

    def to_ask(
        self, request: RequestId, computed: int, num_tokens: int, eligible: Mapping[ChildIndex, bool], now: float
    ) -> Iterator[tuple[ChildIndex, int]]:
        """The children whose answer is missing, open, or for another number of computed tokens than the one that
        comes with them. A question that gets no answer is one to a child that has no tokens.

        `eligible`: by child, first asked first, whether its tokens may be used for this request; it holds for the
        whole poll. A child that is not in it is not asked."""
        lookup = self._open.setdefault(request, _Lookup(now))
        lookup.computed, lookup.num_tokens = computed, num_tokens
        lookup.eligible = tuple(child for child, may in eligible.items() if may)
        walk = self._walk(lookup)
        for child in eligible:
            if self._known(lookup, child, walk.end) is None:
                yield child, walk.end
                answer = lookup.answers.get(child)
                if answer is not None and answer.is_sync_hit and answer.computed != computed:
                    yield child, computed  # it can only load alone, so that is what it must be ready for
            if self._policy is LoadPolicy.COMPOSE:
                self._go_on(walk, lookup, child)

    def answer(self, request: RequestId, child: ChildIndex, answer: Answer) -> None:
        self._open[request].answers[child] = answer

    def choose(self, request: RequestId, now: float) -> Choice:
        """The plan for now."""
        lookup = self._open[request]
        decide = self._compose if self._policy is LoadPolicy.COMPOSE else self._pick
        choice = decide(lookup, now)
        if choice.outcome is Outcome.PENDING:
            self._chosen.pop(request, None)
        else:
            self._chosen[request] = choice
        return choice

    def _pick(self, lookup: _Lookup, now: float) -> Choice:
        """One child for all: the first one with tokens, or the one with most of them."""
        best = MISS
        for child in lookup.eligible:
            if self._must_wait(lookup, child, now):
                # With policy FIRST an earlier hit has already ended this loop.
                return Choice(Outcome.PENDING)
            answer = self._known(lookup, child, lookup.computed)
            if answer is not None and answer.tokens and answer.tokens > best.tokens:
                part = Part(child, answer.computed, answer.computed + answer.tokens)
                best = Choice(Outcome.HIT, (part,), answer.is_async)
                if self._policy is LoadPolicy.FIRST:
                    break
        return best

    def _compose(self, lookup: _Lookup, now: float) -> Choice:
        walk = self._walk(lookup)
        for child in lookup.eligible:
            if not walk.is_complete and self._must_wait(lookup, child, now):
                return Choice(Outcome.PENDING)
            self._go_on(walk, lookup, child)
        parts, is_async = walk.plan()
        return Choice(Outcome.HIT, parts, is_async) if parts else MISS

    def _walk(self, lookup: _Lookup) -> Walk:
        return Walk(lookup.computed, lookup.num_tokens, self._block_size)

    def _go_on(self, walk: Walk, lookup: _Lookup, child: ChildIndex) -> None:
        answer = self._known(lookup, child, walk.end)
        if answer is not None and child in lookup.eligible:
            walk.take(child, answer, child in self._any_range)

    def _known(self, lookup: _Lookup, child: ChildIndex, computed: int) -> Answer | None:
        """The child's answer beyond `computed` tokens, if it has given one. A synchronous hit counts from the start."""
        answer = lookup.answers.get(child)
        if answer is None or answer.tokens is None:
            return None
        fits = answer.computed == computed or (answer.is_sync_hit and answer.computed == lookup.computed)
        return answer if fits else None

    def _must_wait(self, lookup: _Lookup, child: ChildIndex, now: float) -> bool:
        """Whether the child has said "not yet" and has time left. Else it is a miss from here on."""
        answer = lookup.answers.get(child)
        if answer is None or answer.tokens is not None:
            return False
        if now - lookup.started < self._limits[child]:
            return True
        self.timed_out[child] = self.timed_out.get(child, 0) + 1
        detail = f"no answer within {self._limits[child]:g} s"
        lookup.answers[child] = Answer(0, False, answer.computed, why=Why.TIMED_OUT, detail=detail)
        return False

    def answers(self, request: RequestId) -> Mapping[ChildIndex, Answer]:
        """The answers so far of a look-up that is open."""
        lookup = self._open.get(request)
        return lookup.answers if lookup is not None else {}

    def take(self, request: RequestId) -> Choice:
        """Blocks were allocated: the choice made for the request, which ends its look-up."""
        self._open.pop(request, None)
        return self._chosen.pop(request, MISS)

    def chosen(self, request: RequestId) -> Choice | None:
        """The choice made, not taken yet."""
        return self._chosen.get(request)

    def forget(self, request: RequestId) -> None:
        self._open.pop(request, None)
        self._chosen.pop(request, None)

    def clear(self) -> None:
        """No answer holds any more: all that is open is asked again."""
        self._open.clear()
        self._chosen.clear()

    def __len__(self) -> int:
        return len(self._open)
