"""A part of a composed load that failed is tried once more from another child, inside the same load.

vLLM holds the request meanwhile and knows nothing of it. Who stands in must load any range (RayKV's own do) and have
the whole part; it is asked as for any look-up, step by step until it answers. If nobody has it, and the model has one
KV group, what lies in front of the part is kept and the rest is computed. Else all of the load has failed: then the
request asks all children again but those that failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raykv.connector.scheduler_child import SchedulerChild
from raykv.core.load_plan import Answer, Part
from raykv.messages import ChildIndex
from raykv.types import RequestId

if TYPE_CHECKING:
    from vllm.v1.request import Request

Ask = Callable[[SchedulerChild, "Request", int], Answer]
MayLoad = Callable[[RequestId, SchedulerChild], bool]


@dataclass(slots=True)
class _Retry:
    """A part that somebody else is sought for. `asked`: children that may hold something for the request."""

    request: Request
    part: Part
    since: float
    asked: list[SchedulerChild] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Found:
    """How a search ended: `child` loads the part, or nobody does. `asked`: the others that were asked for it."""

    request: Request
    part: Part
    child: SchedulerChild | None
    asked: tuple[SchedulerChild, ...]


class LoadRetries:
    """The searches of one engine. EngineCore's thread only."""

    def __init__(
        self, children: Iterable[SchedulerChild], any_range: Set[ChildIndex], limits_s: Mapping[ChildIndex, float]
    ) -> None:
        """All three may change later."""
        self._chain, self._any_range, self._limits = children, any_range, limits_s
        self._planned: dict[RequestId, tuple[Part, ...]] = {}
        self._open: dict[RequestId, _Retry] = {}

    def __bool__(self) -> bool:
        """Whether somebody is sought for."""
        return bool(self._open)

    @property
    def _children(self) -> list[SchedulerChild]:
        return [child for child in self._chain if child.index in self._any_range]

    def planned(self, request: RequestId, parts: Sequence[Part]) -> None:
        """An asynchronous load has begun, of these parts."""
        self._planned[request] = tuple(parts)

    def forget(self, request: RequestId) -> None:
        """The load has ended, or the request."""
        self._planned.pop(request, None)
        self._open.pop(request, None)

    def may_retry(self, request: RequestId, failed: Set[ChildIndex], may_load: MayLoad) -> bool:
        """Whether it is worth to look: one part of several has failed, and somebody else may have it."""
        parts = self._planned.get(request, ())
        if len(parts) < 2 or sum(part.child in failed for part in parts) != 1:
            return False
        return any(may_load(request, child) for child in self._children if child.index not in failed)

    def begin(self, request: Request, failed: Set[ChildIndex], now: float) -> None:
        request_id = RequestId(request.request_id)
        part = next(part for part in self._planned[request_id] if part.child in failed)
        self._open[request_id] = _Retry(request, part, now)

    def poll(self, ask: Ask, may_load: MayLoad) -> list[Found]:
        """The searches that have ended."""
        found = []
        for request_id, retry in list(self._open.items()):
            result = self._search(request_id, retry, ask, may_load)
            if result is not None:
                del self._open[request_id]
                found.append(result)
        return found

    def _search(self, request_id: RequestId, retry: _Retry, ask: Ask, may_load: MayLoad) -> Found | None:
        part = retry.part
        for child in self._children:
            if not may_load(request_id, child):
                continue
            if child not in retry.asked:
                retry.asked.append(child)
            answer = ask(child, retry.request, part.begin)
            if answer.tokens is None and time.monotonic() - retry.since < self._limits[child.index]:
                return None
            if answer.is_async and (answer.tokens or 0) >= part.tokens:
                others = tuple(other for other in retry.asked if other is not child)
                return Found(retry.request, part, child, others)
        return Found(retry.request, part, None, tuple(retry.asked))

    def taken(self, request: RequestId, part: Part, child: ChildIndex) -> Part:
        """The child loads the part from now on, and alone: the others' parts have arrived."""
        mine = Part(child, part.begin, part.end)
        rest = [one for one in self._planned[request] if one.begin != part.begin]
        self._planned[request] = tuple(sorted([*rest, mine], key=lambda one: one.begin))
        return mine

    def kept(self, request: RequestId, failed: Set[ChildIndex]) -> tuple[Part, ...]:
        """The parts in front of all that is missing."""
        parts = self._planned.get(request, ())
        first = next((place for place, part in enumerate(parts) if part.child in failed), 0)
        return parts[:first]

    def parts(self, request: RequestId) -> tuple[Part, ...]:
        return self._planned.get(request, ())
