"""RayKV in vLLM's worker: hands each step to the children's links and repeats what they report.

It decides nothing. In a step without synchronous loads no hook waits or calls Ray.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from raykv.actors.child_link import ChildLink
from raykv.connector.inline_child import InlineChild
from raykv.connector.metadata import ChainAdd, RayMultiMetadata, RayMultiWorkerMeta, load
from raykv.connector.step_records import StepRecords, record_of
from raykv.connector.worker_chain import Caches, Joined, Maker, WorkerChain
from raykv.connector.worker_setup import HostedChild, KVCacheExport
from raykv.errors import ConfigError, KVCacheExportError
from raykv.messages import ChildEvent, ChildIndex, ChildPlan, EventKind, Phase
from raykv.types import Rank

logger = logging.getLogger("raykv")


@dataclass
class _Step:
    """What the hooks of the current step have found so far."""

    meta: RayMultiMetadata
    loaded_before: bool = False
    skip_saves: bool = False
    failed: set[ChildIndex] = field(default_factory=set)


class WorkerHalf:
    """The worker half of one engine's MultiConnector on one rank. The worker's thread."""

    def __init__(
        self,
        rank: Rank,
        hosted: Sequence[HostedChild],
        inline: Sequence[InlineChild],
        num_ranks: int = 1,
        maker: Maker | None = None,
    ) -> None:
        """`maker`: makes the children that are added later."""
        self.rank = rank
        self._chain = WorkerChain(rank, maker)
        self._caches = Caches({}, None)
        self._num_ranks = num_ranks
        self._hosted = {child.index: child for child in hosted}
        self._links: dict[ChildIndex, ChildLink] = {}
        self.inline = list(inline)
        self._inline = {child.index: child for child in inline}
        self._export: KVCacheExport | None = None
        self._step: _Step | None = None
        self._report = RayMultiWorkerMeta()
        self._invalid: set[int] = set()
        self._pids: dict[ChildIndex, int] = {}
        self._records = StepRecords(rank)

    # -- set-up ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Share the memory, then register it with every child. Raises when a child can't start.

        It is shared at once, whatever the children are: one that is added later may live in another process, and
        memory can't be moved while the engine runs.
        """
        why = ""
        try:
            self._export = KVCacheExport(kv_caches)
        except (KVCacheExportError, OSError, RuntimeError) as error:
            if self._hosted:
                raise
            why = str(error)
        self._caches = replace(self._caches, tensors=kv_caches, export=self._export, why=why)
        for child in self.inline:
            child.connector.register_kv_caches(dict(kv_caches))
        for hosted in self._hosted.values():
            assert self._export is not None
            self._links[hosted.index] = hosted.connect(self._export)

    def handshakes(self) -> dict[ChildIndex, Any]:
        """By child: its handshake metadata of this rank, if it has any."""
        found = {i: load(c.handshake) for i, c in self._hosted.items() if c.handshake is not None}
        for child in self.inline:
            handshake = child.connector.get_handshake_metadata()
            if handshake is not None:
                found[child.index] = handshake
        return found

    def mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """The pool for the KV cache: an inline child's, or one that can be exported."""
        found = [
            (type(child.connector).__name__, context)
            for child in self.inline
            if (context := child.connector.get_mem_pool_context()) is not None
        ]
        if len(found) > 1:
            raise ConfigError(
                f"The children {', '.join(name for name, _ in found)} each want a memory pool of their own for the "
                "KV cache, which is allocated once. Configure a pool for at most one of them."
            )
        return found[0][1] if found else KVCacheExport.pool_context()

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        self._caches = replace(self._caches, copy_blocks=copy_operation)
        for child in self.inline:
            child.connector.set_host_xfer_buffer_ops(copy_operation)

    # -- changes of the chain -------------------------------------------------------------------------------

    def _change(self, meta: RayMultiMetadata) -> None:
        for change in meta.changes:
            if isinstance(change, ChainAdd):
                self._chain.add(change, self._caches)
            else:
                self._chain.end(change, self._leave(change.index))
        for found in self._chain.take():
            if isinstance(found, Joined):
                self._join(found)
            elif isinstance(found, ChildEvent):
                self._report.events.append(found)
            else:
                self._report.started[(found[0], self.rank)] = found[1]

    def _join(self, child: Joined) -> None:
        if child.hosted is not None and child.link is not None:
            self._hosted[child.index], self._links[child.index] = child.hosted, child.link
        elif child.inline is not None:
            self._inline[child.index] = child.inline
            self.inline = [*self.inline, child.inline]

    def _leave(self, index: ChildIndex) -> Joined | None:
        """It takes no part from here on; what it has reported before goes out with this step's report."""
        hosted, link, inline = (
            self._hosted.pop(index, None),
            self._links.pop(index, None),
            self._inline.pop(index, None),
        )
        if link is not None:
            self._drain(index, link)
            self._pids.pop(index, None)
        if inline is not None:
            self.inline = [child for child in self.inline if child is not inline]
        return Joined(index, hosted, link, inline) if hosted is not None or inline is not None else None

    # -- hooks of a step, in the order in which vLLM calls them -----------------------------------------------

    def handle_preemptions(self, meta: RayMultiMetadata) -> None:
        for child in self.inline:
            plan = meta.plans.get(child.index)
            if plan is not None and plan.meta is not None:
                child.connector.handle_preemptions(load(plan.meta))

    def bind(self, meta: RayMultiMetadata) -> None:
        self._records.submit(meta.sync_failed)
        if meta.changes or self._chain.busy:
            self._change(meta)
        self._step = _Step(meta)
        for index, incarnations in meta.retire.items():
            if index in self._hosted:
                self._hosted[index].retire(incarnations[self.rank])
        for child in self.inline:
            plan = meta.plans.get(child.index)
            if plan is not None and plan.meta is not None:
                child.bind(load(plan.meta), plan)
            elif plan is not None:
                child.owe(plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._step
        assert step is not None
        sync = {i: plan for i, plan in step.meta.plans.items() if plan.sync_loads}
        if sync and not step.loaded_before:
            step.loaded_before = True
            for index, plan in sync.items():
                if index in self._links:
                    failed = not self._load_now(index, plan, step.meta)
                else:
                    failed = plan.meta is None
                if failed:
                    self._sync_failed(index, plan)
        for child in self.inline:
            if child.bound:
                child.connector.start_load_kv(forward_context, **kwargs)
                self._look_for_errors(child)

    def _load_now(self, index: ChildIndex, plan: ChildPlan, meta: RayMultiMetadata) -> bool:
        if plan.meta is None:
            return False
        return self._links[index].load_now(record_of(plan, meta, Phase.LOAD), plan.incarnations[self.rank])

    def _sync_failed(self, index: ChildIndex, plan: ChildPlan) -> None:
        assert self._step is not None
        logger.warning("a synchronous load of %d requests from child %d failed", len(plan.sync_loads), index)
        self._step.skip_saves = True
        self._step.failed.add(index)
        self._invalid.update(plan.sync_blocks)
        self._report.events += [
            ChildEvent(EventKind.SYNC_FAILED, index, self.rank, plan.incarnations[self.rank], request)
            for request in plan.sync_loads
        ]

    def _look_for_errors(self, child: InlineChild) -> None:
        assert self._step is not None
        plan = self._step.meta.plans.get(child.index)
        known = child.index in self._step.failed
        if plan is not None and not known and not child.load_errors().isdisjoint(plan.sync_blocks):
            self._sync_failed(child.index, plan)

    def saving(self) -> list[InlineChild]:
        """The inline children whose hooks that save are to run in this step."""
        assert self._step is not None
        skip = self._step.skip_saves
        return [child for child in self.inline if child.bound and child.saves and not skip]

    def wait_for_save(self) -> None:
        step = self._step
        assert step is not None
        for child in self.saving():
            child.connector.wait_for_save()
        for child in self.inline:
            self._look_for_errors(child)  # before the hosts are told what to save
        if self._export is not None and self._links and step.meta.forward:
            self._export.forward_done()
        for index, plan in step.meta.plans.items():
            if plan.meta is None:
                self._refuse(index, plan)
                continue
            link = self._links.get(index)
            if link is None:
                continue
            phase = Phase.SAVE if plan.sync_loads and step.loaded_before else Phase.WHOLE
            self._records.add(link, plan, record_of(plan, step.meta, phase, step.skip_saves))
        # After synchronous loads on several ranks they wait for the next step: a load that failed on one rank spoils
        # what all ranks compute, and the others learn of it from that step's metadata.
        if self._num_ranks == 1 or not any(plan.sync_loads for plan in step.meta.plans.values()):
            self._records.submit(skip_saves=False)

    def _refuse(self, index: ChildIndex, plan: ChildPlan) -> None:
        """The scheduler half of the child failed in this step: nothing runs, so every load has failed."""
        incarnation = plan.incarnations[self.rank]
        self._report.events += [
            ChildEvent(EventKind.RECV_FAILED, index, self.rank, incarnation, order.request, order.attempt)
            for order in plan.loads
        ]

    # -- reports --------------------------------------------------------------------------------------------

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Only echoes of failed loads: all else goes through the ledger (see `core.ledger`)."""
        for child in self.inline:
            events, output = child.collect(finished_req_ids)
            self._report.events += events
            if self._step is not None:
                output.step = self._step.meta.step
            self._report.add_output(child.index, self.rank, output)
        for index, link in self._links.items():
            if link.has_output:
                self._drain(index, link)
        echo = self._step.meta.echo if self._step else {}
        for blocks in echo.values():
            self._invalid.update(blocks)
        whole = {request for request, blocks in echo.items() if not blocks}
        return KVConnectorTransferResults(finished_recving=set(echo), failed_recving=whole)

    def _drain(self, index: ChildIndex, link: ChildLink) -> None:
        output = link.drain()
        self._report.events += output.events
        if output.done_step is not None:
            self._report.done[(index, self.rank)] = output.done_step
        for data in output.objects:
            self._report.add_output(index, self.rank, load(data))
        pid = link.pid or 0
        if self._pids.get(index) != pid:
            self._pids[index] = self._report.host_pids[(index, self.rank)] = pid

    def take_invalid_blocks(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> RayMultiWorkerMeta | None:
        if self._report.is_empty():
            return None
        report, self._report = self._report, RayMultiWorkerMeta()
        return report

    def clear(self) -> None:
        for child in self.inline:
            child.clear()
        self._step = None

    def shutdown(self) -> None:
        self._chain.close()
        for child in self.inline:
            child.connector.shutdown()
        for hosted in self._hosted.values():
            with contextlib.suppress(Exception):
                hosted.close()
        if self._export is not None:
            self._export.close()
            self._export = None
