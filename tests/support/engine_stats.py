"""Keeps what vLLM reports about itself, step by step. Runs in the engine's front end process."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, PrefillStats


class StatsRecorder(StatLoggerBase):
    """A stat logger of vLLM's kind. One object: `bind` is what vLLM takes for the factory."""

    def __init__(self) -> None:
        self.config: Any = None
        self.counters: Counter[str] = Counter()
        self.gauges: dict[str, float] = {}
        self.connector: Any = None
        self.connector_last: dict[str, Any] = {}
        self.prefills: dict[str, PrefillStats] = {}
        _record_prefills(self.prefills)

    def bind(self, config: Any, engine_index: int = 0) -> StatsRecorder:
        self.config = config
        return self

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if iteration_stats is not None:
            self.counters["preemptions"] += iteration_stats.num_preempted_reqs
        if scheduler_stats is None:
            return
        self.counters["steps"] += 1
        self.gauges = {
            "running": scheduler_stats.num_running_reqs,
            "waiting": scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
            "kv_cache_usage": scheduler_stats.kv_cache_usage,
        }
        for name, cache in (
            ("local", scheduler_stats.prefix_cache_stats),
            ("external", scheduler_stats.connector_prefix_cache_stats),
        ):
            if cache is not None:
                self.counters[f"{name}_query_tokens"] += cache.queries
                self.counters[f"{name}_hit_tokens"] += cache.hits
        if scheduler_stats.kv_connector_stats:
            self._connector(scheduler_stats.kv_connector_stats)

    def _connector(self, data: dict[str, Any]) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        self.connector_last = data
        cls = KVConnectorFactory.get_connector_class(self.config.kv_transfer_config)
        stats = cls.build_kv_connector_stats(data)
        self.connector = stats if self.connector is None else self.connector.aggregate(stats)

    def take_prefill(self, request_id: str) -> PrefillStats | None:
        """What the scheduler said about this request's prompt; vLLM appends a suffix to the caller's id."""
        for internal in list(self.prefills):
            if internal == request_id or internal.startswith(f"{request_id}-"):
                return self.prefills.pop(internal)
        return None

    def snapshot(self) -> dict[str, Any]:
        from vllm.v1.metrics.reader import get_metrics_snapshot

        metrics: dict[str, float] = {}
        for metric in get_metrics_snapshot():
            if hasattr(metric, "value"):
                labels = [f"{k}={v}" for k, v in metric.labels.items() if k not in ("engine", "model_name")]
                name = f"{metric.name}{{{','.join(labels)}}}" if labels else metric.name
                metrics[name] = metrics.get(name, 0) + metric.value
        return {
            **self.counters,
            **self.gauges,
            "connector": self.connector.reduce() if self.connector is not None else {},
            "connector_last": _plain(self.connector_last),
            "metrics": metrics,
        }

    def log_engine_initialized(self) -> None:
        return


def _record_prefills(into: dict[str, PrefillStats]) -> None:
    """vLLM sums these up over requests; a test wants to know which request they belong to."""
    original = IterationStats.update_from_output

    def update(self: IterationStats, output: Any, *args: Any, **kwargs: Any) -> None:
        if output.prefill_stats is not None:
            into[output.request_id] = output.prefill_stats
        original(self, output, *args, **kwargs)

    IterationStats.update_from_output = update  # type: ignore[method-assign]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(v) for v in value]
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return _plain(value.data) if hasattr(value, "data") else repr(value)
