"""What the two halves of a fake child do: plan loads and saves, and move the slots of `tests.support.fake_model`."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheKVEvents

from tests.support import fake_model
from tests.support.fake_control import Control, holds
from tests.support.fake_reports import removed_event, stored_event


@dataclass
class Span:
    """One block of a job: the block id, its layers, and the fingerprints that its slots hold."""

    block: int
    layers: tuple[str, ...]
    values: list[int]
    offset: int = 0


@dataclass
class Job:
    request: str
    number: int
    spans: list[Span]
    load: bool
    synchronous: bool = False


@dataclass
class FakeMeta(KVConnectorMetadata):
    number: int = -1
    jobs: list[Job] = field(default_factory=list)
    preempted: frozenset[str] = frozenset()
    sent: Any = None
    """Called when the plan is pickled for the workers: a plan that is dropped before holds no block."""

    def __getstate__(self) -> dict[str, Any]:
        if self.sent is not None:
            self.sent(self)
        return {**self.__dict__, "sent": None}


class Part:
    """What both parts know."""

    def __init__(self, connector: Any) -> None:
        self.control: Control = connector.control
        self.engine_id: str = connector._kv_transfer_config.engine_id
        self.config = connector._kv_cache_config
        self.block_size: int = self.config.kv_cache_groups[0].kv_cache_spec.block_size
        self.layers = [tuple(group.layer_names) for group in self.config.kv_cache_groups]
        self.connector = connector


class SchedulerPart(Part):
    def __init__(self, connector: Any) -> None:
        super().__init__(connector)
        self._ranks = connector._vllm_config.parallel_config.world_size
        self._number = 0
        self._loads: list[Job] = []
        self._blocks: dict[str, tuple[list[list[int]], list[int]]] = {}
        self._saved: dict[str, int] = {}
        self._polled: dict[str, int] = {}
        self._computed: dict[str, int] = {}
        self._events: Any = None

    def look_up(self, request: Any, computed: int) -> tuple[int | None, bool]:
        control, name = self.control, request.request_id
        control.asked[name] += 1
        control.seen_params.append(copy.deepcopy(request.kv_transfer_params))
        self._computed[name] = computed
        polled = self._polled[name] = self._polled.get(name, 0) + 1
        if polled <= control.pending or control.pending < 0:
            return None, False
        control.answered[name] += 1
        params = request.kv_transfer_params or {}
        if control.pd:
            hit = request.num_prompt_tokens - 1 if params.get("do_remote_prefill") else 0
        elif control.search:
            hit = self._found(request)
        else:
            hit = control.hits.get(name, control.hit)
        # All but the last token, in whole blocks, as a hash-addressed store would answer.
        hit = min(hit, request.num_tokens - 1)
        hit -= 0 if control.pd else hit % self.block_size
        external = max(0, hit - computed)
        return external, bool(external) and control.asynchronous

    def _found(self, request: Any) -> int:
        values = fake_model.chain(request.all_token_ids)
        hit = 0
        for end in range(self.block_size, len(values) + 1, self.block_size):
            layers = [layer for group in self.layers for layer in group]
            keys = [(r, layer, values[end - 1]) for r in range(self._ranks) for layer in layers]
            if any(key not in self.control.store for key in keys):
                break
            hit = end
        return hit

    def allocated(self, request: Any, blocks: tuple[list[int], ...], external: int) -> None:
        name = request.request_id
        self.control.allocated.append((name, external))
        params = request.kv_transfer_params
        if self.control.pd and params and params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False  # in place, as NIXL does
            if external == 0:
                self._loads.append(Job(name, -1, [], load=True))  # only tells the other side
        if external > 0:
            begin = self._computed[name]
            spans = self._spans(blocks, fake_model.chain(request.all_token_ids), begin, begin + external)
            self._loads.append(Job(name, -1, spans, load=True, synchronous=not self.control.asynchronous))

    def _spans(self, blocks: Any, values: list[int], begin: int, end: int) -> list[Span]:
        size, spans = self.block_size, []
        for layers, ids in zip(self.layers, blocks, strict=True):
            for index in range(begin // size, -(-end // size)):
                first, last = max(begin, index * size), min(end, (index + 1) * size)
                if ids[index] != 0:  # 0: a window's null block
                    spans.append(Span(ids[index], layers, values[first:last], first % size))
        return spans

    def plan(self, output: Any) -> FakeMeta:
        self._number += 1
        meta = FakeMeta(self._number, self._loads, frozenset(output.preempted_req_ids or ()), self._hold)
        self._loads = []
        for name in output.finished_req_ids:
            self._blocks.pop(name, None)
            self._saved.pop(name, None)
        if self.control.saves:
            self._plan_saves(output, meta)
        for job in meta.jobs:
            job.number = self._number
        return meta

    def _hold(self, meta: FakeMeta) -> None:
        for job in meta.jobs:
            if job.spans:
                owner = ("load", job.request) if job.load else ("save", meta.number, job.request)
                blocks = [span.block for span in job.spans]
                holds.take(self.control.name, self._ranks, self.engine_id, owner, blocks)

    def _plan_saves(self, output: Any, meta: FakeMeta) -> None:
        scheduled = output.num_scheduled_tokens
        reached: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            values = fake_model.chain(new.prompt_token_ids)
            self._blocks[new.req_id] = ([list(ids) for ids in new.block_ids], values)
            self._saved[new.req_id] = 0
            reached[new.req_id] = new.num_computed_tokens + scheduled[new.req_id]
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            if name not in self._blocks:
                continue
            have, values = self._blocks[name]
            if name in cached.resumed_req_ids:
                self._blocks[name] = ([list(ids) for ids in cached.new_block_ids[i]], values)
                self._saved[name] = 0
            elif cached.new_block_ids[i] is not None:
                for mine, more in zip(have, cached.new_block_ids[i], strict=True):
                    mine.extend(more)
            reached[name] = cached.num_computed_tokens[i] + scheduled[name]
        for name, tokens in reached.items():
            blocks, values = self._blocks[name]
            end = min(tokens, len(values)) // self.block_size * self.block_size
            begin = self._saved[name]
            if end > begin:
                spans = self._spans((blocks[0],) if len(self.layers) == 1 else blocks, values, begin, end)
                meta.jobs.append(Job(name, -1, spans, load=False))
                self._saved[name] = end
                if self.control.events == "scheduler":
                    self._emit([values[i - 1] for i in range(begin + self.block_size, end + 1, self.block_size)])

    def _emit(self, fingerprints: list[int]) -> None:
        if self._events is None:
            self._events = LMCacheKVEvents(1)
        self._events.add_events([stored_event(self.control.name, f, self.block_size) for f in fingerprints])

    def update(self, output: Any) -> None:
        self.control.heard.append(copy.copy(output))
        events = output.kv_cache_events
        if events is not None:  # as LMCacheConnectorV1 does
            if self._events is None:
                self._events = events
            else:
                self._events.add_events(events.get_all_events())
                self._events.increment_workers(events.get_number_of_workers())

    def take_events(self) -> list[KVCacheEvent]:
        if self._events is None:
            return []
        events = self._events.aggregate().get_all_events()
        self._events = None
        return events

    def finished(self, request: Any, blocks: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        name = request.request_id
        held = [block for ids in blocks for block in ids]
        owes = self.control.owes or self.control.late
        if owes and held:
            holds.take(self.control.name, self._ranks, self.engine_id, ("send", name), held)
        returns = self.control.returns
        return owes, None if returns is None else dict(returns)


class WorkerPart(Part):
    def __init__(self, connector: Any, parallel: Any) -> None:
        super().__init__(connector)
        self.rank: int = parallel.rank
        self._ranks: int = parallel.world_size
        self.caches: dict[str, Any] = {}
        self.invalid: set[int] = set()
        self._open: dict[str, Job] = {}
        self._owed: set[str] = set()
        self._events: Any = None
        self._evicted = 0
        self._unsaved: list[tuple[int, Job]] = []

    def start_loads(self, meta: FakeMeta) -> None:
        for job in meta.jobs:
            if not job.load:
                continue
            if not job.spans and self.rank == 0:
                self.control.told.append(job.request)
            if job.synchronous:
                self._end_load(job)
            else:
                self._open[job.request] = job

    def _end_load(self, job: Job) -> bool:
        """Write what was loaded; False if it failed."""
        control = self.control
        control.enter("copy")
        ranks = control.failing_ranks
        failed = bool(control.failing) and (ranks is None or self.rank in ranks)
        for span in job.spans:
            for layer in span.layers:
                data = fake_model.slots(span.values, layer, self.rank)
                if control.search and not failed:
                    data = control.store[(self.rank, layer, span.values[-1])]
                if not failed or span is job.spans[0]:  # a failed load leaves garbage behind
                    where = slice(span.offset, span.offset + len(span.values))
                    self.caches[layer][span.block, where] = fake_model.GARBAGE if failed else data
            if self.rank == 0:
                control.written.append((job.request, span.block))
        if failed and (control.failing == "blocks" or job.synchronous):
            self.invalid |= {span.block for span in job.spans}
        holds.drop(control.name, self.rank, self.engine_id, ("load", job.request))
        return not failed

    def save(self, meta: FakeMeta, layer: str, cache: Any) -> None:
        if self.control.late:
            if layer == self.layers[0][0]:
                self._unsaved += [(meta.number, job) for job in meta.jobs if not job.load]
            return
        for job in meta.jobs:
            if not job.load:
                self._save(job, layer, cache)

    def save_late(self, requests: Iterable[str] | None = None) -> None:
        """Read what was left for later, of all requests or of these."""
        wanted = None if requests is None else set(requests)
        left = []
        for number, job in self._unsaved:
            if wanted is not None and job.request not in wanted:
                left.append((number, job))
                continue
            for layers in self.layers:
                for layer in layers:
                    self._save(job, layer, self.caches[layer])
            holds.drop(self.control.name, self.rank, self.engine_id, ("save", number, job.request))
        self._unsaved = left

    def _save(self, job: Job, layer: str, cache: Any) -> None:
        for span in job.spans:
            if layer in span.layers:
                self.control.enter("copy")
                data = cache[span.block].clone()
                if not data.equal(fake_model.slots(span.values, layer, self.rank)):
                    self.control.wrong.append((("save", job.request), span.block))
                self.control.store[(self.rank, layer, span.values[-1])] = data
                if self.control.events == "worker" and layer == self.layers[0][0]:
                    self._emit(span.values[-1])

    def _emit(self, fingerprint: int, event: Any = stored_event) -> None:
        if self._events is None:
            self._events = LMCacheKVEvents(1)
        self._events.add_events([event(self.control.name, fingerprint, self.block_size)])

    def take_events(self) -> Any:
        if self.control.events == "worker":
            for fingerprint in self.control.evicted[self._evicted :]:
                self._emit(fingerprint, removed_event)
            self._evicted = len(self.control.evicted)
        events, self._events = self._events, None
        return events

    def step_over(self, meta: FakeMeta) -> None:
        unsaved = {(number, job.request) for number, job in self._unsaved}
        for job in meta.jobs:
            if (not job.load or job.synchronous) and (meta.number, job.request) not in unsaved:
                kind = ("load", job.request) if job.load else ("save", meta.number, job.request)
                holds.drop(self.control.name, self.rank, self.engine_id, kind)

    def results(self, finished: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        told = self.control.take_reports(self.rank, self._ranks)
        if self.control.owes or self.control.late:
            self._owed |= finished
        if self.control.auto:
            self.save_late()
        if self.control.auto_send:
            self.save_late(self._owed)
            told += [("send", request) for request in self._owed]
            self._owed = set()
        if self.control.auto:
            told += [("recv", request) for request in list(self._open)]
        for kind, request in told:
            if kind == "send":
                self.save_late([request])
                results.finished_sending.add(request)
                holds.drop(self.control.name, self.rank, self.engine_id, ("send", request))
                continue
            job = self._open.pop(request, None)
            fine = kind == "recv" if job is None else self._end_load(job) and kind == "recv"
            results.finished_recving.add(request)
            if not fine and self.control.failing != "blocks":
                results.failed_recving.add(request)
        return results
