"""Statistics by child: RayKV's own counters, and each child's own statistics beside them.

They travel from the scheduler half to vLLM's front end as plain data, so the names of the classes go along:
`{child: {"connector", "module", "counters": {...}, "gauges": {...}, "own": {...} or None}}`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from raykv.config import parse
from raykv.connector import vllm_compat
from raykv.connector.scheduler_child import ChildState, SchedulerChild
from raykv.core.ledger import Drop, Ledger, Settled
from raykv.core.lookups import LookupBook
from raykv.messages import REPLACED, ChildEvent, ChildIndex, EventKind
from raykv.types import RequestId, StepId

CHILD_LABEL = "raykv_child"

COUNTERS: Mapping[str, str] = {
    "tokens_loaded": "Prompt tokens whose KV came from this child.",
    "tokens_saved": "Prompt tokens whose save to this child was completed, for connectors that say what they save.",
    "loads": "Asynchronous and synchronous loads from this child that were started.",
    "load_failures": "Loads from this child that failed and were recomputed, and hooks in which it raised.",
    "restarts": "Hosts of this child that died or had to be killed.",
    "lookups_timed_out": "Look-ups that this child did not answer in time.",
    "reports_dropped": "Completions that were duplicates, late, or never asked for.",
    "sync_loads_refused": "Synchronous hits not used because the engine could not take their failure.",
    "hits_left": "Hits not used because computing their tokens takes less time than loading them.",
}
GAUGES: Mapping[str, str] = {
    "up": "1 while this child takes part.",
    "host_pid": "Process id of rank 0's host; 0 while there is none.",
}


def _as_stats(connector: str, module: str | None, data: Any) -> KVConnectorStats | None:
    """A child's statistics object from its data, by its class; None if the class has none."""
    if data is None or isinstance(data, KVConnectorStats):
        return data
    cls = KVConnectorFactory.get_connector_class(
        KVTransferConfig(kv_connector=connector, kv_connector_module_path=module, kv_role="kv_both")
    )
    return cls.build_kv_connector_stats(data)


@dataclass
class RayMultiStats(KVConnectorStats):
    """Statistics of all children over an interval."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for child, theirs in other.data.items():
            mine = self.data.get(child)
            if mine is None:
                self.data[child] = theirs
                continue
            counters = Counter(mine["counters"])
            counters.update(theirs["counters"])
            mine["counters"] = dict(counters)
            mine["gauges"] = theirs["gauges"]
            left = _as_stats(mine["connector"], mine["module"], mine["own"])
            right = _as_stats(theirs["connector"], theirs["module"], theirs["own"])
            mine["own"] = left.aggregate(right) if left is not None and right is not None else left or right
        return self

    def to_dict(self) -> dict[str, Any]:
        return {
            child: {
                **entry,
                "own": entry["own"].to_dict() if isinstance(entry["own"], KVConnectorStats) else entry["own"],
            }
            for child, entry in self.data.items()
        }

    def reset(self) -> None:
        self.data.clear()

    def reduce(self) -> dict[str, int | float]:
        reduced: dict[str, int | float] = {}
        for child, entry in self.data.items():
            for name, value in entry["counters"].items():
                if value:
                    reduced[f"{child}.{name}"] = value
            own = _as_stats(entry["connector"], entry["module"], entry["own"])
            if own is not None and not own.is_empty():
                reduced.update({f"{child}.{name}": value for name, value in own.reduce().items()})
        return reduced

    def is_empty(self) -> bool:
        return not self.data


class SchedulerCounters:
    """Counts on the scheduler side, and gathers what the children counted."""

    def __init__(self, children: Sequence[SchedulerChild]) -> None:
        self._children = children
        self._counters: dict[ChildIndex, Counter[str]] = {c.index: Counter() for c in children}
        self._own: dict[ChildIndex, KVConnectorStats] = {}
        self._pids: dict[ChildIndex, int] = {}
        self._loading: dict[RequestId, Counter[ChildIndex]] = {}
        self._sync_loads: dict[RequestId, tuple[ChildIndex, int]] = {}
        self._saving: dict[ChildIndex, list[tuple[StepId, int]]] = {}
        self._seen: Counter[tuple[ChildIndex, str]] = Counter()
        self._last_gauges: dict[ChildIndex, dict[str, int]] = {}
        self._refused: set[ChildIndex] = set()

    def chosen(self, request: RequestId, child: SchedulerChild, tokens: int, is_async: bool) -> None:
        """A load was planned. It counts when it is known to have gone well."""
        self._counters[child.index]["loads"] += 1
        if is_async:
            self._loading.setdefault(request, Counter())[child.index] += tokens
        else:
            self._sync_loads[request] = (child.index, tokens)

    def not_worth_it(self, child: SchedulerChild) -> None:
        self._counters[child.index]["hits_left"] += 1

    def refuse_sync(self, child: SchedulerChild, why: str) -> None:
        self._counters[child.index]["sync_loads_refused"] += 1
        if child.index not in self._refused:
            self._refused.add(child.index)
            vllm_compat.logger.warning("hits of child %s are not used: it loads synchronously, but %s", child.name, why)

    def planned(self, child: SchedulerChild, step: StepId, tokens: int) -> None:
        if tokens:
            self._saving.setdefault(child.index, []).append((step, tokens))

    def ended(self, request: RequestId) -> None:
        load = self._sync_loads.pop(request, None)
        if load is not None:  # else it failed, and its event has taken it out
            self._counters[load[0]]["tokens_loaded"] += load[1]

    def kept(self, request: RequestId, children: Iterable[ChildIndex]) -> None:
        """What these children brought of a load is used, whatever became of the rest."""
        loading = self._loading.get(request, Counter())
        for child in children:
            self._counters[child]["tokens_loaded"] += loading.get(child, 0)

    def failed(self, request: RequestId, kept: Iterable[ChildIndex]) -> None:
        """The request's load has failed but for what these children brought."""
        self.kept(request, kept)
        self._loading.pop(request, None)

    def update(self, meta: Any, events: Sequence[ChildEvent], settled: Settled) -> None:
        for request, child in settled.loaded:
            self.kept(request, [child])
        for request in settled.tell:
            self._loading.pop(request, None)
        for event in events:
            if event.kind is EventKind.SYNC_FAILED and event.request is not None:
                self._sync_loads.pop(event.request, None)
            elif event.kind is EventKind.DOWN and event.detail != REPLACED:
                self._counters[event.child]["restarts"] += 1
                self._saving.pop(event.child, None)
        for each in self._children:
            saving = self._saving.get(each.index)
            completed = each.completed if each.hosted else each.planned
            while saving and saving[0][0] <= completed:
                self._counters[each.index]["tokens_saved"] += saving.pop(0)[1]
        if meta is not None:
            for (index, rank), pid in meta.host_pids.items():
                if rank == 0:
                    self._pids[index] = pid
            for index, output in meta.outputs.items():
                if output.stats is not None:
                    self.add_child_stats(self._children[index], output.stats)

    def add_child_stats(self, child: SchedulerChild, stats: KVConnectorStats) -> None:
        mine = self._own.get(child.index)
        self._own[child.index] = stats if mine is None else mine.aggregate(stats)

    def take(self, ledger: Ledger, lookups: LookupBook) -> RayMultiStats | None:
        """What has changed since the last call; None if nothing."""
        data: dict[str, Any] = {}
        for child in self._children:
            counters = self._counters[child.index]
            totals = {
                "load_failures": ledger.failures[child.index],
                "lookups_timed_out": lookups.timed_out.get(child.index, 0),
                "reports_dropped": sum(ledger.dropped[(child.index, reason)] for reason in Drop)
                if ledger.dropped
                else 0,
            }
            for name, total in totals.items():
                delta = total - self._seen[(child.index, name)]
                if delta:
                    counters[name] += delta
                    self._seen[(child.index, name)] = total
            up = child.state is ChildState.UP
            gauges = {"up": int(up), "host_pid": self._pids.get(child.index, 0) if up else 0}
            own = self._own.pop(child.index, None)
            if counters or own is not None or gauges != self._last_gauges.get(child.index):
                data[child.name] = {
                    "connector": child.config.connector,
                    "module": child.config.module_path,
                    "counters": dict(counters),
                    "gauges": gauges,
                    "own": own,
                }
                self._counters[child.index] = Counter()
                self._last_gauges[child.index] = gauges
        return RayMultiStats(data=data) if data else None


class RayMultiPromMetrics(KVConnectorPromMetrics):
    """RayKV's metrics and the children's own, each with the child's name as a label."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        config = parse(vllm_config.kv_transfer_config)
        labels = [*labelnames, CHILD_LABEL]
        shared = {kind: _once(cls) for kind, cls in metric_types.items()}
        self._children: dict[str, KVConnectorPromMetrics] = {}
        self._values = {engine: list(values) for engine, values in per_engine_labelvalues.items()}
        self._counters = {
            name: self._counter_cls(f"vllm:raykv_{name}", documentation=text, labelnames=labels)
            for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: self._gauge_cls(f"vllm:raykv_child_{name}", documentation=text, labelnames=labels)
            for name, text in GAUGES.items()
        }
        for child in config.children:
            values = {engine: [*own, str(child.name)] for engine, own in per_engine_labelvalues.items()}
            cls: Any = vllm_compat.connector_class(child)
            metrics = cls.build_prom_metrics(vllm_compat.child_vllm_config(vllm_config, child), shared, labels, values)
            if metrics is not None:
                self._children[str(child.name)] = metrics

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for child, entry in transfer_stats_data.items():
            labels = [*self._values[engine_idx], child]
            for name, value in entry["counters"].items():
                if name in self._counters:
                    self._counters[name].labels(*labels).inc(value)
            for name, value in entry["gauges"].items():
                if name in self._gauges:
                    self._gauges[name].labels(*labels).set(value)
            own = entry.get("own")
            if own is not None and child in self._children:
                self._children[child].observe(own.to_dict() if isinstance(own, KVConnectorStats) else own, engine_idx)


def _once(cls: type) -> Any:
    """A metric class that gives the same metric for the same name: two children of one class share it."""
    made: dict[str, Any] = {}

    def make(name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in made:
            made[name] = cls(name, *args, **kwargs)
        return made[name]

    return make
