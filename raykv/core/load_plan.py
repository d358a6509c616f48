"""Which child loads which range of a request's prefix: the plan of a composed load.

Each child has the request's tokens from 0 up to some end. The children are walked in their order, which is the user's
word on who is cheaper: each one is asked with the end of the ranges before it as the number of computed tokens, and
takes what it has beyond. So a block comes from the first child that has it.

    A has [0, 100), B has [0, 512), blocks of 16:       A: [0, 96)   B: [96, 512)

Two kinds of child load asynchronously. One that takes *any range* may stand in the middle: its range is cut down to
whole blocks, and the next child goes on there. Any other child can't be stopped before its own hit's end, so it can
only be the last contributor. A plan with more contributors than another one must reach a block further to be better.
A synchronous load is over before any asynchronous one has begun, so it is never a part of such a plan: it stands
against all of them, alone and from the start, and wins only if it is longer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from raykv.engine_messages import Why
from raykv.messages import ChildIndex


@dataclass(frozen=True, slots=True)
class Answer:
    """A child's hit beyond `computed` tokens. `tokens` None: not known yet. `unused`: tokens that it has and that are
    not taken, for `why`; without them `why` says why it has none."""

    tokens: int | None
    is_async: bool
    computed: int
    unused: int = 0
    why: Why | None = None
    detail: str = ""

    @property
    def is_sync_hit(self) -> bool:
        return bool(self.tokens) and not self.is_async


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens [begin, end) of a request that a child loads."""

    child: ChildIndex
    begin: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.begin


def cut(parts: tuple[Part, ...], tokens: int) -> tuple[Part, ...]:
    """The same load for `tokens` in all, as vLLM may give fewer than it was promised: the tail goes first."""
    if not parts or tokens <= 0:
        return ()
    end = parts[0].begin + tokens
    kept = [part for part in parts if part.begin < end]
    kept[-1] = replace(kept[-1], end=end)
    return tuple(kept)


class Walk:
    """One walk over the children in their order. `take` them one by one; between, `end` is where the next is asked."""

    def __init__(self, computed: int, num_tokens: int, block_size: int) -> None:
        """`computed`: what vLLM has itself, in whole blocks; `num_tokens`: the request's."""
        self.end = computed
        self._computed, self._num_tokens, self._block_size = computed, num_tokens, block_size
        self._chain: tuple[Part, ...] = ()  # up to `end`, of children that take any range
        self._best: tuple[Part, ...] = ()
        self._alone: Part | None = None

    def take(self, child: ChildIndex, answer: Answer, any_range: bool) -> None:
        """A child's answer beyond `end`; a synchronous hit's is beyond the tokens that vLLM has itself."""
        end = answer.computed + (answer.tokens or 0)
        if answer.is_sync_hit:
            if answer.computed == self._computed and (self._alone is None or end > self._alone.end):
                self._alone = Part(child, answer.computed, end)
            return
        if answer.computed != self.end or end <= self.end:
            return
        plan = (*self._chain, Part(child, self.end, end))
        more_hands = bool(self._best) and len(plan) > len(self._best)
        if end - self._best_end >= (self._block_size if more_hands else 1):
            self._best = plan
        whole = end - end % self._block_size
        if any_range and whole > self.end:
            self._chain = (*self._chain, Part(child, self.end, whole))
            self.end = whole

    @property
    def is_complete(self) -> bool:
        """Whether no child behind can bring a block more."""
        return bool(self._best) and self._num_tokens - self._best_end < self._block_size

    @property
    def _best_end(self) -> int:
        return self._best[-1].end if self._best else self._computed

    def plan(self) -> tuple[tuple[Part, ...], bool]:
        """Who loads what, without gap and overlap, and whether that is asynchronous. Empty: nobody has anything."""
        if self._alone is not None and self._alone.end > self._best_end:
            return (self._alone,), False
        return self._best, bool(self._best)
