"""The end of a request: who of the children still reads its blocks, and what is kept for that. EngineCore's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

from raykv.connector.block_pins import BlockPins
from raykv.connector.roster import Roster
from raykv.connector.scheduler_child import SchedulerChild
from raykv.connector.step_plans import StepPlans
from raykv.connector.step_reports import StepReports
from raykv.connector.transfer_params import ChildParams
from raykv.core.ledger import Ledger
from raykv.core.pins import Fence
from raykv.messages import ChildIndex
from raykv.types import RequestId

if TYPE_CHECKING:
    from vllm.v1.request import Request

Params = dict[str, Any] | None


class RequestEnds:
    """Those of one engine's requests."""

    def __init__(
        self,
        children: Roster,
        ledger: Ledger,
        pins: BlockPins,
        params: ChildParams,
        plans: StepPlans,
        reports: StepReports,
    ) -> None:
        self._children, self._ledger, self._pins, self._params = children, ledger, pins, params
        self._plans, self._reports = plans, reports
        self._partial_tails: dict[RequestId, set[ChildIndex]] = {}

    def partial_tail(
        self, request: Request, block_ids: tuple[list[int], ...], offloads: list[tuple[int, int, int]]
    ) -> None:
        """Called just before `finished`: a child that takes the sources owes a send for them."""
        request_id = RequestId(request.request_id)
        for child in self._children:
            if request_id in child.known and child.call(
                "register_finished_partial_tail",
                lambda c: c.register_finished_partial_tail(request, block_ids, offloads),
                False,
            ):
                self._partial_tails.setdefault(request_id, set()).add(child.index)
        if request_id in self._partial_tails:
            self._pins.hold(request_id, block_ids)
            for group, block_id, _ in offloads:
                self._pins.add(request_id, group, [block_id])

    def finished(
        self, request: Request, block_ids: tuple[list[int], ...], fence: Callable[[], Fence]
    ) -> list[tuple[str, Params]]:
        """Ask the children and keep what they need, so that vLLM may free now. Returns their `kv_transfer_params`.
        `fence`: the steps that were planned while the request held its blocks."""
        request_id = RequestId(request.request_id)
        returned: list[tuple[str, Params]] = []
        owed = []
        for child in self._children:
            if child.may_still_read(request_id):
                owed.append(child)  # until the death of its hosts, which is on the way
            if request_id not in child.known:
                continue
            reads, params = self._ask(child, request, block_ids)
            returned.append((child.name, params))
            if reads or child.index in self._partial_tails.get(request_id, ()):
                owed.append(child)
        for child in owed:
            self._ledger.open_send(request_id, child.index, child.incarnations, time.monotonic())
            if child.place.planned:  # else no plan can tell of it, and its end is under way
                self._plans.owe(child, request_id)
            self._reports.expect(child.deaths())
        self._ledger.request_ended(request_id)
        if owed:
            self._pins.hold(request_id, block_ids)
        self._partial_tails.pop(request_id, None)
        self._pins.close(request_id, fence(), [child.index for child in owed])
        return returned

    def _ask(self, child: SchedulerChild, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, Params]:
        """Whether the child still reads the blocks, and its parameters."""
        child.faulted = False
        with self._params.of(child.index, request):
            nothing: tuple[bool, Params] = (False, None)
            delay, params = child.call(
                "request_finished", lambda c: _finish(c, request, block_ids), nothing, also_paused=True
            )
        if child.faulted:
            child.distrust()  # it could not say whether it still reads
        return delay or child.faulted, params


def _finish(connector: Any, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, Params]:
    """A child without HMA support is only allowed where there is one group."""
    if supports_hma(connector):
        return connector.request_finished_all_groups(request, block_ids)
    return connector.request_finished(request, block_ids[0])
