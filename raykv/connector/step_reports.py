"""What the workers report of a step, and what of it vLLM and each child may hear.

It filters in `update_connector_output`, which vLLM calls before it acts on the same object. EngineCore's thread only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from raykv.connector.block_pins import BlockPins
from raykv.connector.events import EventJoin
from raykv.connector.load_planner import LoadPlanner
from raykv.connector.metadata import ChildStart, RayMultiWorkerMeta
from raykv.connector.roster import Roster
from raykv.connector.scheduler_child import SchedulerChild
from raykv.connector.stats import SchedulerCounters
from raykv.connector.transfer_params import ChildParams
from raykv.core.ledger import Ledger, Settled
from raykv.messages import REMOVED, ChildEvent, ChildIndex, EventKind
from raykv.types import Rank, RequestId, StepId

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

Started = Callable[[ChildIndex, Rank, ChildStart], None]


class StepReports:
    """The reports of one engine's workers."""

    def __init__(
        self,
        children: Roster,
        ledger: Ledger,
        pins: BlockPins,
        loads: LoadPlanner,
        params: ChildParams,
        counters: SchedulerCounters,
        requests: Mapping[RequestId, Request],
        started: Started,
    ) -> None:
        """`requests`: those that live. `started`: told how the start of an added child went on a rank."""
        self._children, self._ledger, self._pins, self._loads = children, ledger, pins, loads
        self._params, self._counters, self._requests, self._started = params, counters, requests, started
        self._joins = {child.index: EventJoin() for child in children}
        self._early: list[ChildEvent] = []
        self._echo: dict[RequestId, tuple[int, ...]] = {}
        self._sync_failed = False

    # -- children -------------------------------------------------------------------------------------------

    def joined(self, child: SchedulerChild) -> None:
        """A child was added, or it is known already."""
        self._joins.setdefault(child.index, EventJoin())

    def left(self, child: SchedulerChild) -> None:
        """Nothing of the child is left."""
        self._joins.pop(child.index, None)

    # -- what is known before a step's reports come ---------------------------------------------------------

    def expect(self, events: Iterable[ChildEvent]) -> None:
        """These are taken with the next step's reports, as if a worker had sent them."""
        self._early += events

    @property
    def expects(self) -> bool:
        return bool(self._early)

    @property
    def pending(self) -> bool:
        """Whether a step is needed: to tell the workers of a lost load, or to take what is expected."""
        return bool(self._echo or self._early)

    # -- what the workers are to hear in the next step --------------------------------------------------------

    def load_lost(self, request: RequestId) -> None:
        """Nobody brings what is missing of the load: the ranks are to report it as failed."""
        blocks, kept = self._loads.lost(request)
        self._echo[request] = blocks
        self._counters.failed(request, kept)

    def take_echo(self) -> dict[RequestId, tuple[int, ...]]:
        """The lost loads that were not asked for yet, with the blocks that have nothing."""
        echo, self._echo = self._echo, {}
        return echo

    def take_sync_failed(self) -> bool:
        """Whether a synchronous load of the step before failed on some rank."""
        failed, self._sync_failed = self._sync_failed, False
        return failed

    # -- reports --------------------------------------------------------------------------------------------

    def take(self, output: KVConnectorOutput, step: StepId) -> None:
        """A step's output of all ranks. Changes it to what vLLM may hear. `step`: the one that was planned last."""
        meta = output.kv_connector_worker_meta
        assert meta is None or isinstance(meta, RayMultiWorkerMeta)
        received: set[RequestId] = set()
        if meta is not None or output.finished_recving or self._in_wait():
            heard = self._ledger.echoed({RequestId(r) for r in output.finished_recving or ()})
            settled = self._settle(meta)
            self._tell_children(output, meta, settled, step)
            received = settled.tell | heard
        # vLLM reads these right after this call: exactly the loads that it waits for, never a send.
        output.finished_recving = received or None
        output.finished_sending = None
        output.kv_connector_stats = None
        output.kv_cache_events = None

    def _in_wait(self) -> bool:
        """Whether a step without a report can change anything. Blocks are given back, saves are counted and events are
        told for what earlier reports or an expected death completed; a load in retry ends by its request's abort."""
        return bool(
            self._early
            or self._ledger.unsettled_loads
            or self._pins.any_closing
            or self._counters.awaits_saves
            or any(self._joins.values())
        )

    def _settle(self, meta: RayMultiWorkerMeta | None) -> Settled:
        events = [*self._early, *(meta.events if meta else ())]
        self._early = []
        for event in events:
            if event.kind is EventKind.DOWN:
                self._children[event.child].host_died(event.rank, event.incarnation)
                if event.detail == REMOVED:
                    self._children[event.child].rank_ended(event.rank)
        for (index, rank), start in meta.started.items() if meta else ():
            self._started(index, rank, start)
        garbage = {event.request for event in events if event.kind is EventKind.SYNC_FAILED and event.request}
        self._sync_failed |= bool(garbage)
        self._loads.sync_failed(garbage)
        settled = self._ledger.apply(events, self._loads.may_retry)
        for request, failed in settled.retry.items():
            self._loads.begin_retry(self._requests[request], failed)
        for request in settled.echo:
            self.load_lost(request)
        for request, index in settled.sends:
            self._pins.send_settled(request, index)
        if meta is not None:
            for (index, rank), step in meta.done.items():
                done = self._children[index].done
                done[rank] = max(done[rank], step)
        self._loads.settled(settled)
        self._counters.update(meta, events, settled)
        if self._pins.any_closing:
            self._pins.release({c.index: c.completed for c in self._children if c.hosted})
        return settled

    def _tell_children(
        self, output: KVConnectorOutput, meta: RayMultiWorkerMeta | None, settled: Settled, step: StepId
    ) -> None:
        """Each child hears of its own completions, statistics and metadata only, as if it were alone."""
        for part in meta.kv_events if meta else ():
            if part.child in self._joins:
                self._joins[part.child].add(part)
        for child in self._children:
            mine = meta.outputs.get(child.index) if meta else None
            join = self._joins[child.index]
            # An inline child's ranks all report a step in that step.
            events = join.take(child.completed if child.hosted else step) if join else None
            if not child.does("update_connector_output"):
                continue
            sends: set[str] = {request for request, index in settled.sends if index == child.index}
            received: set[str] = {request for request, index in settled.ended if index == child.index}
            if not (mine or events or sends or received or (meta and not child.hosted)):
                continue
            alone = copy.copy(output)
            alone.finished_sending, alone.finished_recving = sends, received
            alone.kv_connector_worker_meta = mine.worker_meta if mine else None
            alone.kv_cache_events = events
            alone.kv_connector_stats = mine.stats if mine else None
            with self._params.of_all(child.index):
                child.call("update_connector_output", lambda c, o=alone: c.update_connector_output(o), None)  # type: ignore[misc]
