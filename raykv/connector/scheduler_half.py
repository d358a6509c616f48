"""RayKV in EngineCore: which child loads what, which blocks are pinned, and what vLLM may hear.

Decisions live in `core`; this class turns vLLM's calls into events for them and their answers into calls on
vLLM's block pool. It runs in EngineCore's thread only.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from raykv.config import MultiConfig
from raykv.connector import vllm_compat
from raykv.connector.block_pins import BlockPins
from raykv.connector.chain_changes import ChainChanges
from raykv.connector.chain_views import ChainViews
from raykv.connector.events import tagged
from raykv.connector.load_planner import LoadPlanner, StepLoads
from raykv.connector.metadata import RayMultiMetadata
from raykv.connector.request_ends import RequestEnds
from raykv.connector.roster import Roster
from raykv.connector.scheduler_child import SchedulerChild
from raykv.connector.stats import RayMultiStats, SchedulerCounters
from raykv.connector.step_plans import StepPlans
from raykv.connector.step_reports import StepReports
from raykv.connector.transfer_params import ChildParams, merge_returned
from raykv.core.chain import Place
from raykv.core.idle_pause import IdlePause
from raykv.core.ledger import Ledger
from raykv.messages import REPLACED, ChildEvent, ChildIndex, ChildPlan, EventKind
from raykv.types import Incarnation, Rank, RequestId, StepId

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("raykv")
PUSH_WORK = "has_pending_push_work"


class SchedulerHalf:
    """The scheduler half of one engine's MultiConnector."""

    def __init__(self, config: MultiConfig, children: Sequence[SchedulerChild], vllm_config: Any, kv_cache_config: Any):
        num_ranks = vllm_config.parallel_config.world_size
        self.children = Roster(children)
        self._block_size = vllm_config.cache_config.block_size
        self._ledger = Ledger(num_ranks)
        self._pins = BlockPins(vllm_compat.windowed_groups(kv_cache_config))
        self._params = ChildParams([child.name for child in self.children])
        self._counters = SchedulerCounters(self.children)
        self.loads = LoadPlanner(
            config, self.children, vllm_config, kv_cache_config, self._ledger, self._params, self._counters
        )
        self.views = ChainViews(self.children, self._counters)
        self.chain = ChainChanges(self, num_ranks, self.views)
        self._idle_pause = IdlePause()
        self._any_hosted_saves = any(child.hosted and child.saves for child in children)
        self._step = StepId(-1)
        self._requests: dict[RequestId, Request] = {}
        self._plans = StepPlans(self._ledger, self.loads, self._params, self._counters, self._block_size)
        self._reports = StepReports(
            self.children,
            self._ledger,
            self._pins,
            self.loads,
            self._params,
            self._counters,
            self._requests,
            self.chain.started,
        )
        self._ends = RequestEnds(self.children, self._ledger, self._pins, self._params, self._plans, self._reports)

    # -- set-up ---------------------------------------------------------------------------------------------

    def bind(self, kv_cache_manager: Any) -> None:
        self._pins.bind(kv_cache_manager.block_pool)
        self.loads.bind(kv_cache_manager)
        for child in self.children:
            child.call("bind_kv_cache_manager", lambda c: c.bind_kv_cache_manager(kv_cache_manager), None)

    # -- a request's loads ----------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._accept_rebuilt()
        request_id = RequestId(request.request_id)
        self._requests[request_id] = request
        self.loads.stories.begin(request)
        self._ledger.request_arrived(request_id)
        self._params.add(request)
        for child in self.children:
            if child.arrived(request_id):
                with self._params.of(child.index, request):
                    child.call("on_new_request", lambda c: c.on_new_request(request), None)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._accept_rebuilt()
        return self.loads.look_up(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        self.loads.allocated(request, blocks, num_external_tokens)

    # -- a step ---------------------------------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> RayMultiMetadata:
        self._accept_rebuilt()
        self.chain.before_plans()
        self._step = StepId(self._step + 1)
        forward = output.total_num_scheduled_tokens > 0
        self._pause(forward)
        now = time.monotonic()
        if self._any_hosted_saves:
            self._pins.grow(output, self._fence)
        for request in self.loads.retry():
            self._reports.load_lost(request)
        plans = self._plan(output, self.loads.take_step(), now)
        idle = not forward and not self._ledger.unsettled and not self._pins.any_closing
        idle = idle and not self._childs_pins_free_soon()
        self.loads.step_planned(vllm_compat.prompt_tokens(output), idle, now)
        self._pins.step_planned(output, self._requests, self._fence)
        self._params.forget_ended()
        retire = self._retire(now)
        changes = self.chain.after_plans()
        self.views.step_planned(now)
        echo, sync_failed = self._reports.take_echo(), self._reports.take_sync_failed()
        return RayMultiMetadata(self._step, plans, forward, echo, retire, sync_failed, changes)

    def _pause(self, forward: bool) -> None:
        """An engine that runs no request comes again at once while something is not settled."""
        awaited = bool(self.loads.lookups) or self._ledger.unsettled_loads > 0
        pause = self._idle_pause.before_step(not forward, awaited, time.monotonic())
        if pause:
            time.sleep(pause)

    def _plan(self, output: SchedulerOutput, begun: StepLoads, now: float) -> dict[ChildIndex, ChildPlan]:
        plans = {}
        for child in self.children:
            if child.place is not Place.UP and not self.chain.has_plan(child, partial(self._plans.owes, child, begun)):
                child.ended(output.finished_req_ids)
                continue
            plan = self._plans.plan(child, output, begun, self._step, now)
            if plan is not None:
                plans[child.index] = plan
                if plan.meta is not None:  # else no host hears of this step
                    child.planned = self._step
        return plans

    def _retire(self, now: float) -> dict[ChildIndex, tuple[Incarnation, ...]]:
        """The hosts that are to end: their child is in doubt, or has broken a promise."""
        retire = {c.index for c in self.children if c.must_retire and c.hosted}
        if not self._reports.expects:
            # Else a child has just come back, and what its old hosts owed is settled with this step's output only:
            # the new ones must not be ended for it.
            retire |= self._ledger.overdue(now, lambda index: self.children[index].config.options.promise_timeout_s)
        return {index: self.children[index].incarnations for index in retire if self.children[index].hosted}

    def _fence(self) -> dict[ChildIndex, StepId]:
        """What must be completed before a block that closes now may have another owner. Of a child that has ended on
        every rank nothing is left that could touch one, and soon nobody completes a step for it."""
        return {c.index: c.planned for c in self.children if c.hosted and not c.all_ended}

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self._accept_rebuilt()
        self._reports.take(output, self._step)

    def _accept_rebuilt(self) -> None:
        for child in self.children:
            if child.has_offer and child.may_accept:
                is_new = child.place is Place.STARTING
                old = child.accept()
                assert old is not None
                self.chain.accepted(child)
                self.loads.rebuilt(child)
                if is_new:
                    continue
                # Their death was confirmed before the new ones started; its reports may still be on the way.
                self._reports.expect(
                    ChildEvent(EventKind.DOWN, child.index, Rank(rank), incarnation, detail=REPLACED)
                    for rank, incarnation in enumerate(old)
                )
                logger.info("child %s is up again", child.name)

    # -- the end of a request -------------------------------------------------------------------------------

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> dict | None:
        """Returns the merged `kv_transfer_params`. vLLM may always free now: the pins hold what is needed."""
        request_id = RequestId(request.request_id)
        told = self.loads.stories.finish(request, self.children, self.loads.rates.prefill_rate)
        returned = self._ends.finished(request, block_ids, self._fence)
        self.loads.forget(request_id)
        self._requests.pop(request_id, None)
        self._counters.ended(request_id)
        self._params.end(request)
        return merge_returned([*returned, *told])

    def finished_partial_tail(
        self, request: Request, block_ids: tuple[list[int], ...], offloads: list[tuple[int, int, int]]
    ) -> None:
        """Called just before `request_finished`."""
        self._ends.partial_tail(request, block_ids, offloads)

    # -- changes of the chain (`chain_changes.Engine`) --------------------------------------------------------

    def owes(self, child: SchedulerChild) -> bool:
        """Whether a load, a send or a plan of the child is open; of an inline child also what it says itself."""
        return self._plans.owes(child, self.loads.step)

    def keeps_blocks(self, child: SchedulerChild) -> bool:
        """Whether blocks wait for the child, or one of its sends."""
        return self._ledger.owes(child.index) or self._pins.waits_for(child.index)

    def requests(self) -> list[RequestId]:
        """Those that live."""
        return list(self._requests)

    def chain_changed(self) -> None:
        """A child came, or is gone."""
        # Never back to False: a request whose first blocks are pinned must have its later ones pinned, too, since what
        # another child owes for it at its end is kept by the same pins.
        self._any_hosted_saves |= any(child.hosted and child.saves for child in self.children)
        for child in self.children:
            self._reports.joined(child)
            self._params.joined(child.index, child.name)
        self.loads.chain_changed()

    def child_left(self, child: SchedulerChild) -> None:
        """Nothing of it is left."""
        self.children.remove(child)
        self._plans.left(child)
        self._reports.left(child)
        self._params.left(child.index)
        self._counters.left(child)
        self.chain_changed()

    # -- questions of the engine ----------------------------------------------------------------------------

    def has_pending_block_frees(self) -> bool:
        """Of RayKV's pins, and of an inline child's own (a TierConnector's)."""
        return self._pins.frees_soon() or self._childs_pins_free_soon()

    def _childs_pins_free_soon(self) -> bool:
        return any(
            child.call("has_pending_block_frees", lambda c: c.has_pending_block_frees(), False)
            for child in self.children
            if not child.hosted and child.does("has_pending_block_frees")
        )

    def has_pending_push_work(self) -> bool:
        """Whether an engine without requests must keep stepping, for RayKV or for a child."""
        if self._pins.any_closing or self._ledger.unsettled or self._reports.pending or self._plans.any_owed:
            return True
        if self.chain.busy:
            return True
        return any(
            child.has_offer or child.call(PUSH_WORK, lambda c: c.has_pending_push_work(), False)
            for child in self.children
            if child.has_offer or child.does(PUSH_WORK)
        )

    def take_events(self) -> list[Any]:
        none: list[Any] = []
        return [
            tagged(event, child.name)
            for child in self.children
            if child.does("take_events")
            for event in child.call("take_events", lambda c: list(c.take_events()), none)
        ]

    def also_tell(self, missed: Mapping[tuple[str, str], int]) -> None:
        """Tokens that were missed, by child and reason, are in vLLM's statistics too. Another thread counts them."""
        self._counters.sources, self._counters.missed = self.loads.stories.tokens, missed

    def take_stats(self) -> RayMultiStats | None:
        self.loads.step_ended()  # vLLM asks once for each step's output
        for child in self.children:
            if not child.does("get_kv_connector_stats"):
                continue
            stats = child.call("get_kv_connector_stats", lambda c: c.get_kv_connector_stats(), None)
            if stats is not None and not stats.is_empty():
                self._counters.add_child_stats(child.index, stats)
        return self._counters.take(self._ledger, self.loads.lookups)

    def reset_cache(self) -> bool:
        self.loads.lookups.clear()  # what a child has promised before, it has forgotten now
        return all([c.call("reset_cache", lambda k: k.reset_cache(), None) is not False for c in self.children])

    def shutdown(self) -> None:
        for child in self.children:
            with contextlib.suppress(Exception):
                child.shutdown()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless ledger and pins are consistent."""
        self._ledger.check_integrity()
        self._pins.check_integrity()

    @property
    def quiet(self) -> bool:
        """Nothing owed and nothing pinned."""
        return not (self._pins.pinned() or self._ledger.unsettled)
