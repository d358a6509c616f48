"""KV cache events of children: one stream, each event marked with the child that it is about.

And those of a TierConnector: what it has saved. What its store evicts the engine does not hear of; that is in the
stream of all stores (`actors.event_stream`), where the same blocks have the same hash, medium and `ownership`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from raykv.connector.metadata import EventPart
from raykv.types import JobId, Rank, StepId

if TYPE_CHECKING:
    from vllm.v1.request import Request

KEPT = 10_000
"""Events that wait for vLLM to take them, which it does in each step."""


class EventJoin:
    """Joins what the ranks of one child gave for a step, as vLLM joins what arrives in one of its own.

    Hosts of different ranks run a step at different times, so a step's events wait until every rank has
    completed it. What only some of its ranks gave is dropped, as by vLLM: not all of them have such a block.
    """

    def __init__(self) -> None:
        self._waiting: dict[StepId, dict[Rank, Any]] = {}

    def __bool__(self) -> bool:
        """Whether events wait for a rank."""
        return bool(self._waiting)

    def add(self, part: EventPart) -> None:
        ranks = self._waiting.setdefault(part.step, {})
        if part.rank in ranks:
            ranks[part.rank].add_events(part.events.get_all_events())
        else:
            ranks[part.rank] = part.events

    def take(self, completed: StepId) -> Any | None:
        """One container, as of one worker, of the events of all steps up to `completed`; None if there are none."""
        joined = None
        for step in sorted(step for step in self._waiting if step <= completed):
            first, *others = self._waiting.pop(step).values()
            for other in others:
                first.add_events(other.get_all_events())
                first.increment_workers(1)
            common = first.aggregate()
            if joined is None:
                joined = common
            else:
                joined.add_events(common.get_all_events())
        return joined


def tagged(event: Any, child: str) -> Any:
    """The event with the child's name as `ownership`, vLLM's field for the tier that holds a block.

    A reader that keeps copies by (hash, medium, ownership) sees a block that was evicted from one child stay
    visible in another. Events without such a field are passed on as they are.
    """
    if getattr(event, "ownership", "") is None:
        return msgspec.structs.replace(event, ownership=child)
    return event


class TierEvents:
    """BlockStored events of one engine's saves, as vLLM would make them for its own cache. EngineCore's thread only.

    A save is told of when every rank has its blocks in the store. Where some found no room nobody knows which, so
    nothing is told of that save; a reader of the stores' own stream misses nothing.
    """

    def __init__(self, block_size: int, medium: str) -> None:
        self._block_size, self._medium = block_size, medium
        self._planned: list[BlockStored] = []
        self._open: dict[JobId, list[BlockStored]] = {}
        self._ready: list[BlockStored] = []

    def planned(self, request: Request, group: int, places: Sequence[int]) -> None:
        """The save that is being planned has these blocks of a request, ascending, of one KV group."""
        for first, last in _runs(places):
            self._planned.append(self._event(request, group, first, last))

    def begun(self, job: JobId) -> None:
        """What was planned since the last call is this job."""
        if self._planned:
            self._open[job], self._planned = self._planned, []

    def ended(self, job: JobId, ok: bool, store: str) -> None:
        """The job has ended on all ranks; `ok`: all of its blocks are in the store of this (actor's) name."""
        events = self._open.pop(job, [])
        if ok and len(self._ready) + len(events) <= KEPT:
            for event in events:
                event.ownership = store or None
            self._ready += events

    def take(self) -> list[BlockStored]:
        """What has been stored since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def _event(self, request: Request, group: int, first: int, last: int) -> BlockStored:
        size, hashes, lora = self._block_size, request.block_hashes, request.lora_request
        extra, at = [], 0
        for place in range(first, last):
            keys, at = generate_block_hash_extra_keys(request, place * size, (place + 1) * size, at)
            extra.append(keys)
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(one) for one in hashes[first:last]],
            parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
            token_ids=list(request.all_token_ids[first * size : last * size]),
            block_size=size,
            lora_id=lora.adapter_id if lora else None,
            medium=self._medium,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(extra),
            group_idx=group,
            locality="LOCAL",
        )


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as ranges [first, last)."""
    begin = 0
    for at in range(1, len(places) + 1):
        if at == len(places) or places[at] != places[at - 1] + 1:
            yield places[begin], places[at - 1] + 1
            begin = at
