"""Statistics by child: RayKV's own counters (`observe.names`), and each child's own statistics beside them.

They travel from the scheduler half to vLLM's front end as plain data, so the names of the classes go along:
`{child: {"connector", "module", "counters": {...}, "gauges": {...}, "own": {...} or None}}`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from raykv.connector.scheduler_child import ChildState, SchedulerChild
from raykv.core.ledger import Drop, Ledger, Settled
from raykv.core.lookups import LookupBook
from raykv.messages import REMOVED, REPLACED, ChildEvent, ChildIndex, EventKind
from raykv.types import Rank, RequestId, StepId

logger = logging.getLogger("raykv")

WHOLE = ""
"""Where a child's name stands: what is of the engine and not of one child, its counters named by `joined`."""
TOKENS, MISSED = "prompt_tokens", "missed_tokens"
BETWEEN = "|"


def joined(name: str, *labels: str) -> str:
    """A counter of WHOLE_COUNTERS with the values of its labels, as one name."""
    return BETWEEN.join((name, *(label.replace(BETWEEN, "/") for label in labels)))


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
            if (mine["connector"], mine["module"]) != (theirs["connector"], theirs["module"]):
                # Another child came under the name of one that went.
                mine.update({key: theirs[key] for key in ("connector", "module", "own")})
                continue
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
                    reduced[f"{child}.{name}" if child else name.replace(BETWEEN, ".")] = value
            own = _as_stats(entry["connector"], entry["module"], entry["own"])
            if own is not None and not own.is_empty():
                reduced.update({f"{child}.{name}": value for name, value in own.reduce().items()})
        return reduced

    def is_empty(self) -> bool:
        return not self.data


class SchedulerCounters:
    """Counts on the scheduler side, and gathers what the children counted."""

    def __init__(self, children: Iterable[SchedulerChild]) -> None:
        """`children` may be another chain each time it is iterated."""
        self._children = children
        self._gone: list[SchedulerChild] = []
        self._counters: defaultdict[ChildIndex, Counter[str]] = defaultdict(Counter)
        self.totals: defaultdict[ChildIndex, Counter[str]] = defaultdict(Counter)
        """By child: what was counted since the engine started, as of the last `take`."""
        self.pids: defaultdict[ChildIndex, dict[Rank, int]] = defaultdict(dict)
        """By child and rank: its host; 0 while there is none."""
        self._own: dict[ChildIndex, KVConnectorStats] = {}
        self._loading: dict[RequestId, Counter[ChildIndex]] = {}
        self._sync_loads: dict[RequestId, tuple[ChildIndex, int]] = {}
        self._saving: dict[ChildIndex, list[tuple[StepId, int]]] = {}
        self._seen: Counter[tuple[ChildIndex, str]] = Counter()
        self._last_gauges: dict[ChildIndex, dict[str, int]] = {}
        self._refused: set[ChildIndex] = set()
        self._began: dict[RequestId, float] = {}
        self._down: dict[ChildIndex, float] = {}
        self.sources: Mapping[str, int] = {}
        """Prompt tokens by source since the start: whose they are sets this to a mapping that he adds to."""
        self.missed: Mapping[tuple[str, str], int] = {}
        """The same of tokens that were missed, by child and reason."""
        self._told: Counter[str] = Counter()
        self._told_tokens = 0
        self._totals: tuple[int, ...] = ()
        self._standings: list[tuple[Any, ...]] = []

    def chosen(self, request: RequestId, child: SchedulerChild, tokens: int, is_async: bool) -> None:
        """A load was planned. It counts when it is known to have gone well."""
        self._counters[child.index]["loads"] += 1
        if is_async:
            self._began.setdefault(request, time.monotonic())
            self._loading.setdefault(request, Counter())[child.index] += tokens
        else:
            self._sync_loads[request] = (child.index, tokens)

    def not_worth_it(self, child: SchedulerChild) -> None:
        self._counters[child.index]["hits_left"] += 1

    def refuse_sync(self, child: SchedulerChild, why: str) -> None:
        self._counters[child.index]["sync_loads_refused"] += 1
        if child.index not in self._refused:
            self._refused.add(child.index)
            logger.warning("hits of child %s are not used: it loads synchronously, but %s", child.name, why)

    def planned(self, child: SchedulerChild, step: StepId, tokens: int) -> None:
        if tokens:
            self._saving.setdefault(child.index, []).append((step, tokens))

    @property
    def awaits_saves(self) -> bool:
        """Whether saves were planned that have not been counted yet: their steps are not known to be completed."""
        return any(self._saving.values())

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
        self._began.pop(request, None)

    def update(self, meta: Any, events: Sequence[ChildEvent], settled: Settled) -> None:
        for request, child in settled.loaded:
            self.kept(request, [child])
            if request in self._began:
                took = time.monotonic() - self._began[request]
                self._counters[child]["load_ms"] += round(1000 * took)
        for request in settled.tell:
            self._loading.pop(request, None)
            self._began.pop(request, None)
        for _, child in settled.sends:
            self._counters[child]["sends"] += 1
        for event in events:
            if event.kind is EventKind.SYNC_FAILED and event.request is not None:
                self._sync_loads.pop(event.request, None)
            elif event.kind is EventKind.DOWN and event.detail not in (REPLACED, REMOVED):
                self._counters[event.child]["restarts"] += 1
                self._saving.pop(event.child, None)
        for each in self._children:
            saving = self._saving.get(each.index)
            completed = each.completed if each.hosted else each.planned
            while saving and saving[0][0] <= completed:
                self._counters[each.index]["tokens_saved"] += saving.pop(0)[1]
        if meta is not None:
            for (index, rank), pid in meta.host_pids.items():
                self.pids[index][rank] = pid
            for index, output in meta.outputs.items():
                if output.stats is not None:
                    self.add_child_stats(index, output.stats)

    def add_child_stats(self, index: ChildIndex, stats: KVConnectorStats) -> None:
        mine = self._own.get(index)
        self._own[index] = stats if mine is None else mine.aggregate(stats)

    def left(self, child: SchedulerChild) -> None:
        """The child is gone: what is counted of it is taken once more."""
        self._gone.append(child)
        self._saving.pop(child.index, None)
        self._refused.discard(child.index)

    def take(self, ledger: Ledger, lookups: LookupBook) -> RayMultiStats | None:
        """What has changed since the last call; None if nothing, which is so in most steps and soon seen."""
        totals = (ledger.failures.total(), ledger.dropped.total(), sum(lookups.timed_out.values()))
        standings = [(c.state, c.place, c.incarnations, self.pids[c.index].get(Rank(0))) for c in self._children]
        whole = self._take_whole()
        changed = totals != self._totals or standings != self._standings
        changed = changed or bool(whole or self._gone or self._own)
        changed = changed or any(self._counters[child.index] for child in self._children)
        self._totals, self._standings = totals, standings
        return self._take_all(ledger, lookups, whole) if changed else None

    def _take_all(self, ledger: Ledger, lookups: LookupBook, whole: dict[str, int]) -> RayMultiStats | None:
        data: dict[str, Any] = {}
        gone, self._gone = self._gone, []
        for child in [*gone, *self._children]:
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
            up = child.state is ChildState.UP and child.place.asked
            self._count_recovery(child, up)
            pid = self.pids[child.index].get(Rank(0), 0) if up else 0
            gauges = {"up": int(up), "host_pid": pid, "incarnation": max(child.incarnations)}
            own = self._own.pop(child.index, None)
            if own is not None and child.config.is_tier and (saved := own.data.get("tokens_saved", 0)):
                counters["tokens_saved"] += saved  # its metadata names no tokens
            if counters or own is not None or gauges != self._last_gauges.get(child.index):
                self.totals[child.index] += counters
                data[child.name] = {
                    "connector": child.config.connector,
                    "module": child.config.module_path,
                    "counters": dict(counters),
                    "gauges": gauges,
                    "own": own,
                }
                self._counters[child.index] = Counter()
                self._last_gauges[child.index] = gauges
        if whole:
            data[WHOLE] = {"connector": "", "module": None, "counters": whole, "gauges": {}, "own": None}
        return RayMultiStats(data=data) if data else None

    def _count_recovery(self, child: SchedulerChild, up: bool) -> None:
        """How long a child was down, as seen from one `take` to the next."""
        if up:
            began = self._down.pop(child.index, None)
            if began is not None:
                self._counters[child.index]["recoveries"] += 1
                self._counters[child.index]["down_ms"] += round(1000 * (time.monotonic() - began))
        elif child.state is not ChildState.UP:  # else an operator has it wait
            self._down.setdefault(child.index, time.monotonic())

    def _take_whole(self) -> dict[str, int]:
        """What of the engine has grown since the last call. Looked at when a request has ended; what was missed may
        be known a little later, and is told with the next one."""
        tokens = sum(self.sources.values())
        if tokens == self._told_tokens:
            return {}
        self._told_tokens = tokens
        totals = {joined(TOKENS, source): count for source, count in list(self.sources.items())}
        totals |= {joined(MISSED, *at): count for at, count in list(self.missed.items())}
        grown = {name: count - self._told[name] for name, count in totals.items() if count > self._told[name]}
        self._told.update(grown)
        return grown
