"""The stories of one engine: collected while requests run, summed up when they end, the last ones kept.

`Stories` is written by the scheduler's thread: a few microseconds an event, nothing that waits. What has ended lies in
a bounded queue, from which another thread takes it; making it a Story is that thread's work. `StoryRing` keeps the last
ones where they are asked for.
"""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

from raykv.core.story import Asked, Key, Record, Source, Took, check_story
from raykv.engine_messages import Missed, Story, Why
from raykv.errors import IntegrityError, RayKVError
from raykv.types import EngineId, RequestId

DEFAULT_LAST = 1000
MAX_HASH_NBYTES = 32 << 20
"""Of all stories' hashes in a ring: a million blocks."""
OWN_PART = re.compile(r"(\d+_)?(cmpl|chatcmpl|embd|pool|score|rerank|classify|resp|gen|tok)[-_]")
"""What vLLM's server puts before a client's request id, and for several samples before that (0.32)."""


class Stories:
    """Collects. `arrived`, then for each pass `matched`, `planned` and what becomes of the load, then `ended`."""

    def __init__(self, engine: EngineId, block_size: int, last: int = DEFAULT_LAST, key: Key | None = None) -> None:
        """`last`: how many that nobody has taken are kept; 0: none, only the sums. `key` makes their hashes."""
        self.engine, self.block_size, self._key, self.last = engine, block_size, key, last
        self.tokens: Counter[str] = Counter()
        """Prompt tokens by source, of all requests that have ended."""
        self.prompt_tokens = 0
        self._live: dict[RequestId, Record] = {}
        self._ended: deque[Record] = deque(maxlen=last)

    # -- the scheduler's thread -------------------------------------------------------------------------------

    def arrived(
        self,
        request: RequestId,
        source: Source,
        prompt_tokens: int,
        *,
        explain: bool = False,
        tenant: str = "",
        skips: str = "",
    ) -> None:
        """A new request. `skips`: why nothing is to be read for it."""
        self._live[request] = Record(
            request,
            source,
            prompt_tokens,
            self.block_size,
            time.time(),
            time.monotonic(),
            explain=explain,
            tenant=tenant,
            skips=skips,
        )

    def matched(self, request: RequestId, computed: int, num_tokens: int, preemptions: int) -> None:
        """vLLM asks, from the start of the request: its own cache has `computed` of the `num_tokens` there are now."""
        record = self._live.get(request)
        if record is not None:
            record.matched = (computed, num_tokens - 1)
            record.preemptions = preemptions

    def answered(self, request: RequestId) -> None:
        """Every child has answered, or its time was up."""
        record = self._live.get(request)
        if record is not None and not record.answered:
            record.answered = time.monotonic()

    def is_new_pass(self, request: RequestId) -> bool:
        """Whether an allocation now is the first one after a `matched`: with another one nothing begins."""
        record = self._live.get(request)
        return record is not None and record.matched is not None

    def planned(self, request: RequestId, took: Sequence[Took], asked: Sequence[Asked], is_async: bool) -> None:
        """Blocks were allocated: a new pass. A synchronous load is taken to go well until `lost`."""
        record = self._live.get(request)
        if record is None or record.matched is None:
            return
        (record.local, record.reach), record.matched = record.matched, None
        record.took, record.asked = tuple(took), tuple(asked)
        record.loading = is_async and bool(took)
        record.load_began = time.monotonic()

    def retaken(self, request: RequestId, begin: int, took: Sequence[Took], why: str) -> None:
        """A part that failed, from `begin` on, is loaded by somebody else within the same load."""
        record = self._live.get(request)
        if record is None or not took:
            return
        end = took[-1].end
        for old in record.took:
            if begin <= old.begin < end:
                record.failures += (_failed(old, why),)
        kept = [old for old in record.took if not begin <= old.begin < end]
        record.took = tuple(sorted([*kept, *took], key=lambda one: one.begin))

    def loaded(self, request: RequestId) -> None:
        """The load has ended well."""
        record = self._live.get(request)
        if record is not None and record.loading:
            record.loading = False
            record.load_s += time.monotonic() - record.load_began

    def lost(self, request: RequestId, behind: int = 0, failed: Iterable[str] | None = None, why: str = "") -> None:
        """The load has failed: what lies behind token `behind` is computed. `failed`: who is to blame; None: all."""
        record = self._live.get(request)
        if record is None:
            return
        if record.loading:
            record.loading = False
            record.load_s += time.monotonic() - record.load_began
        record.lost(behind, [one.child for one in record.took] if failed is None else list(failed), why)

    def saved(self, request: RequestId, child: str, tokens: int) -> None:
        """So many of its tokens, decoded ones too, were given to a child to save, in all."""
        record = self._live.get(request)
        if record is not None and tokens:
            record.saved = {**record.saved, child: tokens}

    def salted(self, request: RequestId, salt: bytes) -> None:
        """The salt of its blocks' keys in the store."""
        record = self._live.get(request)
        if record is not None:
            record.salt = salt

    def ended(self, request: RequestId, prefill_rate: float = 0.0) -> Record | None:
        """The request finished, was aborted or failed: sum up. Returns it if its client asked to hear of it."""
        record = self._live.pop(request, None)
        if record is None or record.source is None:
            return None
        record.prefill_rate = prefill_rate
        record.ranges = record.where()
        record.hashes, record.source = record.source.block_hashes, None  # vLLM's request must not be kept alive
        record.ended = time.time()
        for one in record.ranges:
            self.tokens[one.source] += one.last - one.first
        self.prompt_tokens += record.prompt_tokens
        self._ended.append(record)
        return record if record.explain else None

    # -- any thread -------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._live)

    def take(self, most: int = DEFAULT_LAST) -> list[Story]:
        """Those that have ended since the last call, oldest first; one caller at a time."""
        taken: list[Story] = []
        while self._ended and len(taken) < most:
            taken.append(self._ended.popleft().story(self.engine, self._key))
        return taken

    def of_running(self, wanted: str) -> Story | None:
        """The story so far of a request that has not ended; None if there is none, or several fit."""
        found = matching(list(self._live), wanted)
        record = self._live.get(RequestId(found[0])) if len(found) == 1 else None
        return record.story(self.engine, self._key) if record is not None else None

    def keep_none(self) -> None:
        """Nobody will take any: from here on only the sums are kept."""
        self._ended = deque(maxlen=0)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the sums are those of the prompts, and each story covers its prompt."""
        if sum(self.tokens.values()) != self.prompt_tokens:
            raise IntegrityError(f"{dict(self.tokens)} are not {self.prompt_tokens} tokens of prompts")
        for record in (*self._live.values(), *self._ended):
            check_story(record.story(self.engine))


class StoryRing:
    """The last stories, by request. One thread, or the caller's lock."""

    def __init__(self, last: int = DEFAULT_LAST, max_hash_nbytes: int = MAX_HASH_NBYTES) -> None:
        """The oldest go when there are more than `last`, or more bytes of hashes."""
        self._last, self._max = last, max_hash_nbytes
        self._stories: OrderedDict[str, Story] = OrderedDict()
        self._nbytes = 0

    def add(self, story: Story) -> None:
        """A request's newer story takes the place of its older one."""
        old = self._stories.pop(story.request, None)
        self._stories[story.request] = story
        self._nbytes += len(story.hashes) - (len(old.hashes) if old is not None else 0)
        while self._stories and (len(self._stories) > self._last or self._nbytes > self._max):
            _, gone = self._stories.popitem(last=False)
            self._nbytes -= len(gone.hashes)

    def find(self, wanted: str) -> Story | None:
        """By vLLM's id or its client's. Raises RayKVError if several fit."""
        found = matching(self._stories, wanted)
        if len(found) > 1:
            names = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
            raise RayKVError(f"{wanted!r} fits {len(found)} requests: {names}. Name one of them.")
        return self._stories[found[0]] if found else None

    def latest(self, count: int) -> tuple[Story, ...]:
        """The newest ones, newest first."""
        names = list(self._stories)
        return tuple(self._stories[name] for name in names[: -count - 1 : -1]) if count > 0 else ()

    def __len__(self) -> int:
        return len(self._stories)


def matching(ids: Iterable[str], wanted: str) -> list[str]:
    """The requests that are meant: the one with this id, else those whose id, without what vLLM puts before a client's,
    is this or begins with it and a dash, else those that begin with it."""
    if not wanted:
        return []
    ids = list(ids)
    if wanted in ids:
        return [wanted]
    own = [one for one in ids if f"{_client_part(one)}-".startswith(f"{wanted}-") or one.startswith(f"{wanted}-")]
    return own or [one for one in ids if one.startswith(wanted) or _client_part(one).startswith(wanted)]


def _client_part(request: str) -> str:
    return OWN_PART.sub("", request, count=1) if OWN_PART.match(request) else request


def _failed(old: Took, detail: str) -> Missed:
    return Missed(old.begin, old.end, old.child, Why.FAILED, detail)
