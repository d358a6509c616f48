"""Statistics of a TierConnector: counters of the scheduler half, `{name: number}` over an interval.

They show in vLLM's log as they are, and in Prometheus as `vllm:raykv_tier_NAME`; tokens that were loaded with the
medium they came from as a label.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from raykv.observe.names import TIER_COUNTERS, TIER_TIMES, seconds_name
from raykv.store_messages import Medium

MEDIUM_LABEL = "medium"
LOADED = "tokens_loaded"


def loaded(medium: Medium) -> str:
    """The counter of the tokens that came from this medium."""
    return f"{LOADED}_{medium}"


class TierStats(KVConnectorStats):
    """Counters over an interval."""

    data: dict[str, Any]

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        counters: Counter[str] = Counter(self.data)
        counters.update(other.data)
        self.data = dict(counters)
        return self

    def reset(self) -> None:
        self.data = {}

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class TierPromMetrics(KVConnectorPromMetrics):
    """The counters as Prometheus has them."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._values = {engine: list(values) for engine, values in per_engine_labelvalues.items()}
        self._counters = {
            name: self._counter_cls(f"vllm:raykv_tier_{name}", documentation=text, labelnames=list(labelnames))
            for name, text in TIER_COUNTERS.items()
        }
        self._times = {
            name: self._counter_cls(
                f"vllm:raykv_tier_{seconds_name(name)}", documentation=text, labelnames=list(labelnames)
            )
            for name, text in TIER_TIMES.items()
        }
        self._loaded = self._counter_cls(
            f"vllm:raykv_tier_{LOADED}",
            documentation="Prompt tokens whose KV came from the store of this node, by the slowest medium it was in.",
            labelnames=[*labelnames, MEDIUM_LABEL],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self._values[engine_idx]
        for name, counter in self._counters.items():
            if transfer_stats_data.get(name):
                counter.labels(*values).inc(transfer_stats_data[name])
        for name, counter in self._times.items():
            if transfer_stats_data.get(name):
                counter.labels(*values).inc(transfer_stats_data[name] / 1000)
        for medium in Medium:
            if transfer_stats_data.get(loaded(medium)):
                self._loaded.labels(*values, str(medium)).inc(transfer_stats_data[loaded(medium)])
