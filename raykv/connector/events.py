"""KV cache events of children: one stream, each event marked with the child that it is about."""

from __future__ import annotations

from typing import Any

import msgspec

from raykv.connector.metadata import EventPart
from raykv.types import Rank, StepId


class EventJoin:
    """Joins what the ranks of one child gave for a step, as vLLM joins what arrives in one of its own.

    Hosts of different ranks run a step at different times, so a step's events wait until every rank has
    completed it. What only some of its ranks gave is dropped, as by vLLM: not all of them have such a block.
    """

    def __init__(self) -> None:
        self._waiting: dict[StepId, dict[Rank, Any]] = {}

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
