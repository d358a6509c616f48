"""Statistics, Prometheus metrics and KV events of fake children."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats


class FakeStats(KVConnectorStats):
    """Counters that add up."""

    def aggregate(self, other: KVConnectorStats) -> FakeStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data


class FakeProm(KVConnectorPromMetrics):
    """One counter, registered as vLLM's own connectors do it: once for each engine, by plain name."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        metric = self._counter_cls(name="vllm:fake_polls", documentation="Polls.", labelnames=self._labelnames)
        self._polls = {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._polls[engine_idx].inc(transfer_stats_data["polls"])


def stored_event(child: str, fingerprint: int, block_size: int) -> BlockStored:
    """As a connector publishes a block that it has stored."""
    return BlockStored(
        block_hashes=[fingerprint],
        parent_block_hash=None,
        token_ids=[],
        block_size=block_size,
        lora_id=None,
        medium=f"FAKE_{child}",
        lora_name=None,
    )


def removed_event(child: str, fingerprint: int, block_size: int) -> BlockRemoved:
    """As a connector publishes an eviction."""
    return BlockRemoved(block_hashes=[fingerprint], medium=f"FAKE_{child}")
