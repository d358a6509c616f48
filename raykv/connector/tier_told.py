"""A TierConnector that works alone tells the stories of its requests itself; under a MultiConnector that one does."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from raykv.connector import vllm_compat
from raykv.connector.engine_view import TierFacts
from raykv.connector.request_stories import RequestStories, TierPart, asked, took
from raykv.connector.tier_jobs import Ended
from raykv.connector.tier_metadata import TierHandshake, TierMetadata
from raykv.connector.tier_scheduler import TierScheduler
from raykv.connector.tier_stats import TierStats
from raykv.core.load_cost import LoadCost
from raykv.core.load_plan import Answer, Part
from raykv.engine_messages import Why
from raykv.messages import ChildIndex
from raykv.types import LeaseId, Rank, RequestId

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

NAME = "TierConnector"
ONLY = ChildIndex(0)
DETAILS = {Why.TIMED_OUT: "the node's store did not answer in time", Why.CHILD_OFF: "the node's store is not reachable"}


class ToldTierScheduler(TierScheduler):
    """The same, with stories and measured rates."""

    def __init__(self, *args: Any, stories: RequestStories, **more: Any) -> None:
        super().__init__(*args, **more)
        self.stories = stories
        self.rates = LoadCost()
        self.totals: Counter[str] = Counter()
        """The connector's counters since the start."""
        self._answers: dict[RequestId, Answer] = {}
        self._ranks: dict[Rank, TierHandshake] = {}

    @property
    def tells(self) -> bool:
        """Whether it works alone."""
        return not self._is_inner

    def on_new_request(self, request: Request) -> None:
        if self.tells:
            self.stories.begin(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if self.tells:
            request_id = RequestId(request.request_id)
            self.stories.asks(request, num_computed_tokens)
            self._answers[request_id] = Answer(tokens, is_async, num_computed_tokens)
            if tokens is not None:
                self.stories.answered(request_id)
        return tokens, is_async

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        request_id = RequestId(request.request_id)
        answer = self._answers.pop(request_id, None)
        if answer is None:
            return
        part = self.part(request_id)
        sources = []
        if num_external_tokens > 0:
            loads = Part(ONLY, answer.computed, answer.computed + num_external_tokens)
            sources = took(NAME, loads, part, self._block_size)
            self.rates.load_begun(request_id, ONLY, num_external_tokens, time.monotonic())
        self.stories.planned(request_id, sources, [asked(NAME, answer, None, part)], is_async=True)

    def _load_ended(self, ended: Ended) -> LeaseId:
        request = self._loads[ended.job].request
        lease = super()._load_ended(ended)
        if self.tells:
            key = (request, ONLY)
            self.rates.loads_ended([key], {key} if ended.ok else set(), time.monotonic())
            if ended.ok:
                self.stories.loaded(request)
            else:
                self.stories.lost(request, why=next((one.error for one in ended.reports if one.error), ""))
        return lease

    def build_connector_meta(self, output: SchedulerOutput) -> TierMetadata:
        if self.tells:
            self.rates.step_begun(vllm_compat.prompt_tokens(output), time.monotonic())
        return super().build_connector_meta(output)

    def take_stats(self) -> TierStats | None:
        if self.tells:
            self.rates.step_ended(time.monotonic())  # vLLM asks once for each step's output
        stats = super().take_stats()
        if stats is not None:
            self.totals.update(stats.data)
        return stats

    def part(self, request_id: RequestId) -> TierPart:
        """What its story needs beyond the answers to vLLM."""
        known = self._known.get(request_id)
        if known is None:
            return TierPart(why=Why.NOT_ASKED, detail="its cache was reset meanwhile", salt=self._known.salt)
        why, detail = known.why, DETAILS.get(known.why, "") if known.why is not None else ""
        if not self._may_load:
            why, detail = Why.NOT_ASKED, "it is only saved to"
        elif not known.may_load:
            why, detail = Why.FAILED, "an earlier load of this request failed"
        elif self._stalls.is_withdrawn(request_id):
            why, detail = Why.NOT_ASKED, "there was no room for the load beside the running requests"
        given = known.given * self._block_size
        return TierPart(known.media, why, detail, given, self._known.salt_of(known), known.peer)

    def key_salt(self, lora: bool) -> bytes:
        """The salt of the keys of requests with or without an adapter. Any thread."""
        return self._known.salt_of(None) if lora else self._known.salt

    @property
    def store(self) -> str:
        """The name of the store's actor; empty while it is not up. Any thread."""
        return self._asker.store

    def ranks_joined(self, handshakes: Iterable[TierHandshake]) -> None:
        """The store has taken these ranks in."""
        self._ranks = {**self._ranks, **{one.rank: one for one in handshakes}}

    def facts(self) -> TierFacts:
        """For the engine's desk. Any thread."""
        writers = [one for _, one in sorted(self._ranks.items()) if one.writes]
        return TierFacts(self.store, tuple(one.fingerprint for one in writers))

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        told = None
        if self.tells:
            request_id = RequestId(request.request_id)
            self._answers.pop(request_id, None)
            self.stories.part(request_id, NAME, self.part(request_id))
            told = self.stories.end(request, self.rates.prefill_rate)
        hint = super().request_finished(request)
        return {**(hint or {}), **told} if told is not None else hint
