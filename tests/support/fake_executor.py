"""vLLM's executor and its workers, for all ranks at once: the real connectors, called in vLLM's order."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.support.fake_model import FakeRunner


class FakeExecutor:
    """Everything that crosses a process boundary in an engine is pickled here too."""

    def __init__(self, connectors: Sequence[Any], runner: FakeRunner, aggregator: KVOutputAggregator) -> None:
        """`connectors`: worker half by rank, with their KV caches registered."""
        self.connectors, self.runner, self._aggregator = connectors, runner, aggregator

    def execute(self, data: bytes) -> ModelRunnerOutput:
        """Run a pickled SchedulerOutput. Hooks as in `KVConnectorModelRunnerMixin` and around it (0.32)."""
        outputs = [pickle.loads(data) for _ in self.connectors]
        ranks = list(zip(self.connectors, outputs, strict=True))
        scheduled = outputs[0].num_scheduled_tokens
        self.runner.update_states(outputs[0])
        for connector, output in ranks:
            connector.handle_preemptions(output.kv_connector_metadata)
        context = SimpleNamespace(no_compile_layers={}, attn_metadata={} if scheduled else None)
        for connector, output in ranks:
            connector.bind_connector_metadata(output.kv_connector_metadata)
            if output.has_sync_kv_loads:
                connector.start_load_kv(context)
        sampled: dict[str, list[int]] = {}
        if scheduled:
            sampled = self.runner.forward(scheduled, self._before_layer, self._after_layer)
        results = []
        for connector, output in ranks:
            if not output.has_sync_kv_loads:
                connector.start_load_kv(context)
            result = self._collect(connector, output.finished_req_ids)
            made = ModelRunnerOutput(list(sampled), {n: i for i, n in enumerate(sampled)}, list(sampled.values()))
            made.kv_connector_output = None if result.is_empty() and not sampled else result
            results.append(pickle.loads(pickle.dumps(made)))
        combined = self._aggregator.aggregate(results)
        assert combined is not None
        return combined

    @staticmethod
    def _collect(connector: Any, finished: set[str]) -> KVConnectorOutput:
        connector.wait_for_save()
        found = connector.get_transfer_results(finished)
        result = KVConnectorOutput(
            finished_sending=found.finished_sending,
            finished_recving=found.finished_recving,
            failed_recving=found.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_cache_events=connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return result

    def _before_layer(self, layer: str) -> None:
        for connector in self.connectors:
            connector.wait_for_layer_load(layer)

    def _after_layer(self, layer: str) -> None:
        for rank, connector in enumerate(self.connectors):
            connector.save_kv_layer(layer, self.runner.caches[rank][layer], None)
