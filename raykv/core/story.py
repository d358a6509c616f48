"""One request's story while it is told: from where its prompt's tokens came, and why the others did not come.

A request may pass through the scheduler more than once: after a preemption, or a load that failed whole, vLLM asks
again from the start. What counts is the last pass whose blocks were allocated; failures of earlier ones are kept.

    [0, local)         vLLM's own prefix cache            "gpu"
    each Took          a child's load that went well      a medium, or the child's name
    the rest           up to what was computed            "computed"
                       behind that                        "not run": the request ended before

The last token is never loaded, whatever was promised: one must be computed to go on from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from raykv.engine_messages import Missed, Story, TokenRange, Why
from raykv.errors import IntegrityError
from raykv.types import EngineId, RequestId

GPU, COMPUTED, NOT_RUN = "gpu", "computed", "not run"
NOT_LOADED = (COMPUTED, NOT_RUN)
FEWER = "vLLM took fewer tokens than were found"

Key = Callable[[bytes, bytes], bytes]
"""What a store knows a block by, from vLLM's hash and a salt."""


class Source(Protocol):
    """What of vLLM's request is looked at when the story is read."""

    num_computed_tokens: int
    block_hashes: Sequence[bytes]

    @property
    def num_output_tokens(self) -> int:
        """Tokens that were decoded."""


@dataclass(frozen=True, slots=True)
class Took:
    """Tokens [begin, end) that a child was told to load, all from one source; `node`: of a peer's the node."""

    begin: int
    end: int
    child: str
    source: str
    node: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """A child's answer: it has [base, base + tokens). `unused`: tokens that it had and was not taken at, for `why`;
    without them `why` says why it has no more."""

    child: str
    base: int = 0
    tokens: int = 0
    unused: int = 0
    why: Why = Why.NOT_FOUND
    detail: str = ""


@dataclass(slots=True, eq=False)
class Record:
    """What has happened to one request. The scheduler's thread writes it; tuples are replaced, never changed, so that
    another thread may read. Times are monotonic seconds but for `arrived` and `ended`."""

    request: RequestId
    source: Source | None
    prompt_tokens: int
    block_size: int
    arrived: float
    began: float
    explain: bool = False
    tenant: str = ""
    skips: str = ""
    """Why nothing is read for it at all; empty: it is."""
    local: int = 0
    reach: int = 0
    """Tokens up to here may be loaded: all but the last one of the pass."""
    matched: tuple[int, int] | None = None
    """`local` and `reach` of the pass that is being asked for."""
    took: tuple[Took, ...] = ()
    asked: tuple[Asked, ...] = ()
    failures: tuple[Missed, ...] = ()
    loading: bool = False
    answered: float = 0.0
    load_began: float = 0.0
    load_s: float = 0.0
    saved: dict[str, int] = dataclasses.field(default_factory=dict)
    preemptions: int = 0
    prefill_rate: float = 0.0
    salt: bytes = b""
    ranges: tuple[TokenRange, ...] = ()
    ended: float = 0.0
    hashes: Sequence[bytes] = ()

    # -- where the tokens came from ---------------------------------------------------------------------------

    def ran(self) -> int:
        """How many tokens of the prompt were computed or are there, as vLLM counts them."""
        source = self.source
        if source is None or source.num_output_tokens > 0:
            return self.prompt_tokens
        if self.loading:  # vLLM counts what the load is to bring, from its first moment on
            return min(self.local, self.prompt_tokens)
        return min(source.num_computed_tokens, self.prompt_tokens)

    def where(self) -> tuple[TokenRange, ...]:
        """Ranges that cover the prompt exactly."""
        return tuple(self._where(self.ran(), min(self.reach, self.prompt_tokens)))

    def _where(self, ran: int, limit: int) -> Iterator[TokenRange]:
        local = min(self.local, limit)
        if local > 0:
            yield TokenRange(0, local, GPU)
        at = max(local, 0)
        for took in () if self.loading else self.took:
            begin, end = max(took.begin, at), min(took.end, limit)
            if begin < end:
                yield from _filled(at, begin, ran)
                yield TokenRange(begin, end, took.source, took.child, took.node)
                at = end
        yield from _filled(at, self.prompt_tokens, ran)

    def lost(self, behind: int, failed: Sequence[str], detail: str) -> None:
        """Of the load nothing counts from token `behind` on, because these children failed."""
        lost = [(max(one.begin, behind), one.end, one.child) for one in self.took if one.end > behind]
        late = f"it came, but behind what failed: {detail}" if detail else "it came, but behind what failed"
        self.failures += tuple(
            Missed(first, last, child, Why.FAILED, detail if child in failed else late) for first, last, child in lost
        )
        self.took = tuple(dataclasses.replace(one, end=min(one.end, behind)) for one in self.took if one.begin < behind)

    # -- why the others did not come --------------------------------------------------------------------------

    def missed(self, ranges: Sequence[TokenRange]) -> tuple[Missed, ...]:
        """By child, why it did not bring what was computed, and what of its hit was not needed."""
        loadable = max(0, self.prompt_tokens - 1) // self.block_size * self.block_size
        open_ = [(one.first, one.last) for one in ranges if one.source in NOT_LOADED]
        gaps = list(_cut(open_, 0, loadable))
        found: list[Missed] = [*self.failures]
        for asked in self.asked:
            if self.skips or not loadable:
                why = self.skips or "the prompt is shorter than a block and its last token"
                found += [Missed(*gap, asked.child, Why.NOT_ASKED, why) for gap in open_]
            else:
                found += self._missed_by(asked, gaps)
        found += [Missed(*gap, "", Why.ALWAYS_COMPUTED) for gap in _cut(open_, loadable, self.prompt_tokens)]
        end = self.prompt_tokens  # a load may reach into what was decoded before a preemption
        inside = (dataclasses.replace(one, last=min(one.last, end)) for one in found if one.first < end)
        return tuple(dict.fromkeys(inside))

    def _missed_by(self, asked: Asked, gaps: Sequence[tuple[int, int]]) -> Iterator[Missed]:
        has, end = asked.base + asked.tokens, asked.base + asked.tokens + asked.unused
        others = [one for one in self.took if one.child != asked.child]
        for first, last in _cut([(one.begin, one.end) for one in others], asked.base, has):
            yield Missed(first, last, asked.child, Why.OTHER_CHILD)
        for first, last in _cut(gaps, has, end):
            yield Missed(first, last, asked.child, asked.why, asked.detail)
        if len(others) == len(self.took) and others:
            for first, last in _cut(gaps, asked.base, has):
                yield Missed(first, last, asked.child, Why.OTHER_CHILD, "one child loads for a request")
        elif not self.failures:
            for first, last in _cut(gaps, asked.base, has):
                yield Missed(first, last, asked.child, Why.NOT_ASKED, FEWER)
        for first, last in _cut(gaps, max(end, asked.base), self.prompt_tokens):
            rest = (Why.NOT_FOUND, "") if asked.unused or asked.tokens else (asked.why, asked.detail)
            yield Missed(first, last, asked.child, *rest)

    # -- all of it --------------------------------------------------------------------------------------------

    def story(self, engine: EngineId, key: Key | None = None) -> Story:
        """As others see it. Without `key` it has no hashes. About 1 us for each block of the prompt with it."""
        ranges = self.ranges or self.where()
        loaded = sum(one.last - one.first for one in ranges if one.source not in (GPU, *NOT_LOADED))
        count = self.prompt_tokens // self.block_size
        hashes = self.hashes if self.source is None else self.source.block_hashes
        return Story(
            request=self.request,
            engine=engine,
            arrived=self.arrived,
            prompt_tokens=self.prompt_tokens,
            ranges=ranges,
            missed=self.missed(ranges),
            lookup_s=max(0.0, self.answered - self.began) if self.answered else 0.0,
            load_s=self.load_s,
            recompute_s=loaded / self.prefill_rate if self.prefill_rate > 0 else 0.0,
            saved_tokens=dict(self.saved),
            preemptions=self.preemptions,
            ended=self.ended,
            tenant=self.tenant,
            hashes=b"".join(key(one, self.salt) for one in hashes[:count]) if key is not None else b"",
        )


def _filled(first: int, last: int, ran: int) -> Iterator[TokenRange]:
    """What nobody loaded."""
    middle = min(max(first, ran), last)
    if first < middle:
        yield TokenRange(first, middle, COMPUTED)
    if middle < last:
        yield TokenRange(middle, last, NOT_RUN)


def _cut(ranges: Sequence[tuple[int, int]], first: int, last: int) -> Iterator[tuple[int, int]]:
    """What of the ranges lies in [first, last)."""
    for begin, end in ranges:
        if max(begin, first) < min(end, last):
            yield max(begin, first), min(end, last)


def check_story(story: Story) -> None:
    """Raise IntegrityError unless the ranges cover the prompt exactly, and nothing is said of tokens outside it."""
    at = 0
    for one in story.ranges:
        if one.first != at or one.last <= one.first:
            raise IntegrityError(f"story of {story.request}: a range [{one.first}, {one.last}) follows token {at}")
        at = one.last
    if at != story.prompt_tokens:
        raise IntegrityError(f"story of {story.request}: {at} of {story.prompt_tokens} tokens are covered")
    for miss in story.missed:
        if not 0 <= miss.first < miss.last <= story.prompt_tokens:
            raise IntegrityError(f"story of {story.request}: {miss} is outside its {story.prompt_tokens} tokens")


def as_json(story: Story) -> dict[str, Any]:
    """Plain values without the hashes, for a response."""
    told = dataclasses.asdict(story)
    del told["hashes"]
    told["ranges"] = [dict(one) for one in told["ranges"]]
    told["missed"] = [{**one, "why": str(one["why"])} for one in told["missed"]]
    return told
