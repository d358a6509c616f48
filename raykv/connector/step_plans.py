"""What a child's worker halves are to do in a step: its own metadata, and RayKV's orders beside it.

EngineCore's thread only, once for each child and step, so a child of which nothing is asked must cost little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raykv.connector import vllm_compat
from raykv.connector.load_planner import LoadPlanner, StepLoads
from raykv.connector.metadata import dump
from raykv.connector.scheduler_child import SchedulerChild
from raykv.connector.stats import SchedulerCounters
from raykv.connector.transfer_params import ChildParams
from raykv.core.ledger import Ledger
from raykv.messages import ChildIndex, ChildPlan
from raykv.types import RequestId, StepId

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

NOBODY: frozenset[RequestId] = frozenset()


class StepPlans:
    """The plans of one engine, and the sends that no worker has been told of."""

    def __init__(
        self,
        ledger: Ledger,
        loads: LoadPlanner,
        params: ChildParams,
        counters: SchedulerCounters,
        block_size: int,
    ) -> None:
        self._ledger, self._loads, self._params, self._counters = ledger, loads, params, counters
        self._block_size = block_size
        self._owed: dict[ChildIndex, list[RequestId]] = {}

    def owe(self, child: SchedulerChild, request: RequestId) -> None:
        """The child owes a send for an ended request; its next plan says so."""
        self._owed.setdefault(child.index, []).append(request)

    @property
    def any_owed(self) -> bool:
        """Whether a plan is still to tell of a send."""
        return bool(self._owed)

    def left(self, child: SchedulerChild) -> None:
        """Nothing of the child is left."""
        self._owed.pop(child.index, None)

    def owes(self, child: SchedulerChild, step: StepLoads) -> bool:
        """Whether a load, a send or a plan of the child is open; of an inline child also what it says itself. `step`:
        the loads that begin in the step that is being planned."""
        index = child.index
        if self._ledger.owes(index) or index in self._owed or index in step.orders or index in step.sync:
            return True
        return not child.hosted and child.call(
            "has_pending_push_work", lambda c: c.has_pending_push_work(), True, also_paused=True
        )

    def plan(
        self, child: SchedulerChild, output: SchedulerOutput, begun: StepLoads, step: StepId, now: float
    ) -> ChildPlan | None:
        """The child's plan of this step; None if its worker halves need not hear of the step. `begun`: the loads that
        begin in it; `now`: monotonic seconds."""
        index = child.index
        loads, sync = tuple(begun.orders.get(index, ())), begun.sync.get(index, ())
        owed = tuple(self._owed.pop(index, ())) if self._owed else ()
        seen = child.view(output)
        child.faulted = False
        with self._params.of_all(index):
            meta = child.call("build_connector_meta", lambda c: c.build_connector_meta(seen), None)
        if child.faulted:
            child.distrust()
        finished = frozenset(map(RequestId, seen.finished_req_ids)) if seen.finished_req_ids else NOBODY
        if output.finished_req_ids:
            child.ended(output.finished_req_ids)
        asked = bool(loads or sync or owed)
        data, idle = None, False
        if meta is not None and index not in begun.doubtful:
            idle = not asked and not finished and child.is_idle(meta)
            # While a load is open its child must be called in every step: NIXL, for one, begins a transfer in the
            # first `start_load_kv` after its handshake.
            if idle and not self._ledger.is_loading(index) and not child.has_turn(now):
                return None
            data = dump(meta)
            self._counters.planned(child, step, vllm_compat.saved_tokens(meta, self._block_size))
            self._loads.stories.saves(child.name, meta)
        else:
            if owed and child.hosted and child.up:
                self._owed[index] = list(owed)  # no host hears of this step; those of dead ones end with them
            if not (loads or sync or (owed and not child.hosted)):
                return None
        return ChildPlan(
            meta=data,
            incarnations=child.incarnations,
            loads=loads,
            sync_loads=tuple(request for request, _ in sync),
            sync_blocks=tuple(block for _, blocks in sync for block in blocks),
            owed_sends=owed,
            finished=finished,
            idle=idle,
        )
