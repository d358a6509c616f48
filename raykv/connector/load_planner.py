"""Who loads a request's prefix, from vLLM's question to the orders for the workers.

`core.lookups` decides; this class asks the children, tells each what it is to load, and opens the load in the ledger.
EngineCore's thread only, as all of the scheduler half.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from raykv.config import LoadPolicy, MultiConfig
from raykv.connector import vllm_compat
from raykv.connector.load_retries import LoadRetries
from raykv.connector.load_rights import LoadRights
from raykv.connector.plan_stories import Answered, PlanStories
from raykv.connector.roster import Roster
from raykv.connector.scheduler_child import SchedulerChild
from raykv.connector.stats import SchedulerCounters
from raykv.connector.sync_loads import UnprovenBlocks, why_no_sync_loads
from raykv.connector.transfer_params import ChildParams
from raykv.core.ledger import Ledger, Settled
from raykv.core.load_cost import LoadCost
from raykv.core.load_plan import Answer, Part, cut
from raykv.core.lookups import LookupBook, Outcome
from raykv.core.stalls import StallWatch
from raykv.engine_messages import Why
from raykv.messages import ChildIndex, LoadOrder
from raykv.types import Attempt, RequestId

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("raykv")


@dataclass(slots=True)
class StepLoads:
    """What a step begins, by child. `doubtful`: children whose plan of this step may not run."""

    orders: dict[ChildIndex, list[LoadOrder]] = field(default_factory=dict)
    sync: dict[ChildIndex, list[tuple[RequestId, tuple[int, ...]]]] = field(default_factory=dict)
    doubtful: set[ChildIndex] = field(default_factory=set)


class LoadPlanner:
    """The look-ups of one engine, and the loads of the step that is being planned."""

    def __init__(
        self,
        config: MultiConfig,
        children: Roster,
        vllm_config: Any,
        kv_cache_config: Any,
        ledger: Ledger,
        params: ChildParams,
        counters: SchedulerCounters,
    ) -> None:
        self._config, self._vllm_config, self._kv_cache_config = config, vllm_config, kv_cache_config
        self._children, self._ledger, self._params, self._counters = children, ledger, params, counters
        self._block_size = vllm_config.cache_config.block_size
        self._group_block_sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        self._any_range: set[ChildIndex] = set()
        self._limits: dict[ChildIndex, float] = {}
        self.sync_refusals: dict[ChildIndex, str | None] = {}
        self.chain_changed()
        self.lookups = LookupBook(config.load_policy, self._limits, self._block_size, self._any_range)
        self.retries = LoadRetries(children, self._any_range, self._limits)
        self._stalls = StallWatch()
        self._rights = LoadRights(vllm_config, ledger, self._stalls)
        self._unproven = UnprovenBlocks(self._block_size)
        self.rates = LoadCost()
        self._cost = self.rates if config.load_cost else None
        self.stories = PlanStories(vllm_config, config.stories)
        self._planned: dict[RequestId, tuple[Part, ...]] = {}
        self.step = StepLoads()
        self._manager: Any = None

    def chain_changed(self) -> None:
        """The children are others than before: what follows from each, and from all together."""
        children, config = tuple(self._children), self._config
        if config.load_policy is LoadPolicy.COMPOSE:
            self._any_range |= any_range_children(children, self._kv_cache_config)
        whole = replace(config, children=tuple(child.config for child in children))
        for child in children:
            limit = child.config.options.lookup_timeout_s
            most = config.lookup_timeout_s
            self._limits[child.index] = limit if most is None else min(limit, most)
            self.sync_refusals[child.index] = why_no_sync_loads(
                self._vllm_config, self._kv_cache_config, whole, child.config
            )

    def bind(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager
        self._unproven.bind(kv_cache_manager.block_pool)

    # -- the question ---------------------------------------------------------------------------------------

    def look_up(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """The answer to vLLM's `get_num_new_matched_tokens`."""
        self.stories.asks(request, computed)
        if self._rights.no_loads:
            return 0, False
        if self._unproven.shared_by(request, computed):
            return None, False
        request_id, now = RequestId(request.request_id), time.monotonic()
        self._rights.asked(request)
        eligible = {c.index: self._rights.may_load(request_id, c) for c in self._children if c.place.asked}
        for index, base in self.lookups.to_ask(request_id, computed, request.num_tokens, eligible, now):
            if self._children[index].serves(request_id):
                self.lookups.answer(request_id, index, self._ask(self._children[index], request, base))
        choice = self.lookups.choose(request_id, now)
        if choice.outcome is Outcome.PENDING:
            return None, False
        self.stories.answered(request_id)
        if choice.is_async:
            self._stalls.promised(request_id)
        return choice.tokens, choice.is_async

    def _ask(self, child: SchedulerChild, request: Request, computed: int) -> Answer:
        with self._params.of(child.index, request):
            tokens, is_async = child.call(
                "get_num_new_matched_tokens", lambda c: c.get_num_new_matched_tokens(request, computed), (0, False)
            )
        tokens = None if tokens is None else max(0, tokens)
        refusal = self.sync_refusals[child.index]
        if tokens and not is_async and refusal:
            self._counters.refuse_sync(child, refusal)
            return Answer(0, False, computed, tokens, Why.NOT_ASKED, f"its synchronous hits are not used: {refusal}")
        if tokens and self._cost is not None and not self._cost.worth_it(child.index, tokens):
            self._counters.not_worth_it(child)
            return Answer(0, is_async, computed, tokens, Why.COST)
        return Answer(tokens, is_async, computed)

    def filled_groups(self, request: Request, default: tuple[int, ...]) -> tuple[int, ...]:
        """The KV groups whose blocks vLLM need not zero, since the promised load fills them: of several children
        only those that each of them fills. Asked while vLLM allocates the request's blocks."""
        choice = self.lookups.chosen(RequestId(request.request_id))
        found = [
            self._children[part.child].call(
                "get_loaded_kv_cache_group_ids", lambda c: c.get_loaded_kv_cache_group_ids(request), default
            )
            for part in (choice.parts if choice is not None else ())
        ]
        return tuple(group for group in found[0] if all(group in groups for groups in found)) if found else default

    # -- the load -------------------------------------------------------------------------------------------

    def allocated(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """vLLM's `update_state_after_alloc`: with less than was promised it is the tail that is not loaded. A child
        that loads nothing hears so, and sees the real blocks."""
        request_id = RequestId(request.request_id)
        answers = self._answers(request_id)
        choice = self.lookups.take(request_id)
        self._stalls.taken(request_id)
        self._planned.pop(request_id, None)
        parts = cut(choice.parts, num_external_tokens)
        mine = {part.child: part for part in parts}
        for child in self._children:
            if request_id in child.known:
                self._tell(child, request, blocks, mine.get(child.index), parts)
        if answers is not None:
            self.stories.begin_pass(request_id, parts, answers, choice.is_async)
        if not parts:
            return
        self._planned[request_id] = parts
        if choice.is_async:
            attempt = self._ledger.open_load(request_id, *mine)
            self.retries.planned(request_id, parts)
            for part in parts:
                self._order(request_id, attempt, part, blocks)
        else:
            (part,) = parts
            self._counters.chosen(request_id, self._children[part.child], part.tokens, False)
            self.step.sync.setdefault(part.child, []).append((request_id, self._targets(blocks, part)))
            self._unproven.add(request_id, blocks.get_block_ids()[0][part.begin // self._block_size :])

    def _order(self, request: RequestId, attempt: Attempt, part: Part, blocks: Any) -> None:
        self._counters.chosen(request, self._children[part.child], part.tokens, True)
        self.rates.load_begun(request, part.child, part.tokens, time.monotonic())
        order = LoadOrder(request, attempt, self._targets(blocks, part))
        self.step.orders.setdefault(part.child, []).append(order)

    def _tell(
        self, child: SchedulerChild, request: Request, blocks: Any, part: Part | None, parts: Sequence[Part]
    ) -> None:
        tokens = 0 if part is None else part.tokens
        if part is not None and part is not parts[0] and child.index not in self._any_range:
            # It may take all blocks without a hash for its own (NIXL does): those in front are another child's.
            blocks = vllm_compat.as_if_computed(blocks, part.begin, self._group_block_sizes)
        child.faulted = False
        with self._params.of(child.index, request):
            child.call("update_state_after_alloc", lambda c: c.update_state_after_alloc(request, blocks, tokens), None)
        self._rights.told(RequestId(request.request_id), child)
        if child.faulted:
            # What it planned for this step is in doubt, so nothing of it may run.
            self.step.doubtful.add(child.index)

    def _targets(self, blocks: Any, part: Part) -> tuple[int, ...]:
        """The block ids that a part fills. With several KV groups: all of the request's, ids are ambiguous."""
        groups = blocks.get_block_ids()
        if len(groups) > 1:
            return tuple(block_id for group in groups for block_id in group)
        first, last = part.begin // self._block_size, -(-part.end // self._block_size)
        return tuple(groups[0][first:last])

    def hit_sources(self, request: Request, default: Callable[[Request, int], dict[Any, int]]) -> dict[Any, int]:
        """Where the tokens of the load come from that was just planned; `default` for what a child can't say."""
        total: Counter[Any] = Counter()
        for part in self._planned.get(RequestId(request.request_id), ()):
            unknown = default(request, part.tokens)
            found = self._children[part.child].call(
                "get_external_cache_hit_sources",
                lambda c, n=part.tokens: c.get_external_cache_hit_sources(request, n),  # type: ignore[misc]
                unknown,
            )
            total.update(found if sum(found.values()) == part.tokens else unknown)
        return dict(total)

    # -- a load that fails ----------------------------------------------------------------------------------

    def may_retry(self, request: RequestId, failed: Set[ChildIndex]) -> bool:
        return self.retries.may_retry(request, failed, self._rights.may_load)

    def begin_retry(self, request: Request, failed: Set[ChildIndex]) -> None:
        """The ledger waits for a retry of this load, or for its end."""
        self.retries.begin(request, failed, time.monotonic())

    def retry(self) -> list[RequestId]:
        """Go on with the open searches, before the step is taken. Returns the loads that are lost."""
        lost: list[RequestId] = []
        if not self.retries:
            return lost
        for found in self.retries.poll(self._ask, self._rights.may_load):
            request_id = RequestId(found.request.request_id)
            blocks = self._manager.get_blocks(request_id)
            for child in found.asked:
                self._tell(child, found.request, blocks, None, ())
            attempt = self._ledger.retry(request_id, found.child.index) if found.child is not None else None
            if found.child is not None and attempt is not None:
                part = self.retries.taken(request_id, found.part, found.child.index)
                self._tell(found.child, found.request, blocks, part, (part,))
                self.stories.retaken_by(found.child, request_id, part)
                self._order(request_id, attempt, part, blocks)
            elif self._ledger.give_up(request_id):
                lost.append(request_id)
        return lost

    def lost(self, request: RequestId) -> tuple[tuple[int, ...], set[ChildIndex]]:
        """Of a load that has failed: the blocks that have nothing, and the children whose parts are kept. Without
        blocks all is lost: nothing lies in front, or block ids are ambiguous."""
        failed, parts = self._ledger.failed_shares(request), self.retries.parts(request)
        kept = self.retries.kept(request, failed)
        self.retries.forget(request)
        names = [self._children[index].name for index in failed]
        if not kept or len(self._group_block_sizes) > 1:
            self.stories.lost(request, 0, names)
            return (), set()
        self.stories.lost(request, kept[-1].end, names)
        missing = Part(parts[len(kept)].child, kept[-1].end, parts[-1].end)
        useful = {part.child for part in kept} - {part.child for part in parts[len(kept) :]}
        return self._targets(self._manager.get_blocks(request), missing), useful

    # -- a step ---------------------------------------------------------------------------------------------

    def rebuilt(self, child: SchedulerChild) -> None:
        """The child's object was replaced: what the old one has planned in this very step may not run."""
        if child.index in self.step.orders or child.index in self.step.sync:
            self.step.doubtful.add(child.index)

    def take_step(self) -> StepLoads:
        """What the step begins; the next one's is collected from here on."""
        step, self.step = self.step, StepLoads()
        self._unproven.step_planned()
        return step

    def step_planned(self, tokens: int, idle: bool, now: float) -> None:
        """`tokens`: of prompts, that the step computes; `idle`: it runs nothing, and nothing that could free a block
        is under way; `now`: monotonic seconds."""
        self._stalls.step_planned(idle)
        self.rates.step_begun(tokens, now)

    def step_ended(self) -> None:
        """The output of the oldest step without one has arrived."""
        self.rates.step_ended(time.monotonic())

    def settled(self, settled: Settled) -> None:
        """What a step's reports ended."""
        for request in settled.tell:
            self.retries.forget(request)
            self.stories.loaded(request)
        self.rates.loads_ended(settled.ended, settled.well, time.monotonic())

    def sync_failed(self, requests: set[RequestId]) -> None:
        self._unproven.failed(requests)
        for request in requests:
            self.stories.lost(request)

    def forget(self, request: RequestId) -> None:
        """The request has ended."""
        self.lookups.forget(request)
        self._rights.forget(request)
        self._planned.pop(request, None)
        self._stalls.taken(request)
        self.retries.forget(request)

    # -- its story ------------------------------------------------------------------------------------------

    def _answers(self, request: RequestId) -> list[Answered] | None:
        """What each child said, or why it was not to be asked. None: no look-up is open, so nothing begins."""
        if not self.stories.is_new_pass(request):
            return None
        answers = self.lookups.answers(request)
        why_not = self._rights.why_not
        return [Answered(child, answers.get(child.index), why_not(request, child)) for child in self._children]


def any_range_children(children: Sequence[SchedulerChild], kv_cache_config: Any) -> set[ChildIndex]:
    """Those that load any whole blocks of what they have. None with Mamba layers: a state stands for all before it."""
    if vllm_compat.has_mamba(kv_cache_config):
        return set()
    return {child.index for child in children if vllm_compat.loads_any_range(child.config)}
