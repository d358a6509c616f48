"""The stories of the requests of a MultiConnector: who of its children was asked for what, and who loads what.

EngineCore's thread: all hooks of a request together take 25 us with three children (2026, one core of a small machine).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from raykv.connector.request_stories import RequestStories, TierPart, asked, took
from raykv.connector.scheduler_child import SchedulerChild
from raykv.core.load_plan import Answer, Part
from raykv.core.story import Took
from raykv.engine_messages import Why
from raykv.types import RequestId

if TYPE_CHECKING:
    from vllm.v1.request import Request

BROUGHT = "another child brought it"


@dataclass(frozen=True, slots=True)
class Answered:
    """A child's answer in a look-up, if it gave one, or why it could not take part."""

    child: SchedulerChild
    answer: Answer | None
    refusal: tuple[Why, str] | None


class PlanStories(RequestStories):
    """What the LoadPlanner tells."""

    def begin_pass(
        self, request: RequestId, parts: Sequence[Part], answers: Sequence[Answered], is_async: bool
    ) -> None:
        """Blocks were allocated, and each child was told what it loads."""
        tiers = {one.child.index: tier_part(one.child, request) for one in answers if one.child.config.is_tier}
        names = {one.child.index: one.child.name for one in answers}
        sources: list[Took] = []
        for part in parts:
            sources += took(names[part.child], part, tiers.get(part.child), self.block_size)
        said = [asked(one.child.name, one.answer, one.refusal, tiers.get(one.child.index)) for one in answers]
        self.planned(request, sources, said, is_async)

    def retaken_by(self, child: SchedulerChild, request: RequestId, part: Part) -> None:
        """A part that failed is this child's from now on."""
        tier = tier_part(child, request) if child.config.is_tier else None
        self.retaken(request, part.begin, took(child.name, part, tier, self.block_size), BROUGHT)

    def finish(
        self, request: Request, children: Iterable[SchedulerChild], prefill_rate: float | None
    ) -> list[tuple[str, dict[str, Any] | None]]:
        """The request ends; its children still know it. Returns what its client is told, as if a child returned it."""
        request_id = RequestId(request.request_id)
        for child in children:
            if child.config.is_tier and request_id in child.known:
                self.part(request_id, child.name, tier_part(child, request_id))
        told = self.end(request, prefill_rate)
        return [("RayKV", told)] if told is not None else []


def tier_part(child: SchedulerChild, request: RequestId) -> TierPart | None:
    """What a TierConnector knows; None while it is down."""
    return child.call("raykv_part", lambda c: cast(Any, c).raykv_part(request), None, also_paused=True)
