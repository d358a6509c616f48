"""The connector that vLLM sees. One class with vLLM's two roles; it only passes each call to the half at work.

Every hook of `KVConnectorBase_V1` is answered here on purpose (a test walks the base class).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    CopyBlocksOp,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
    supports_hma,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from raykv.connector import desk_setup, start_checks, start_up, vllm_compat
from raykv.connector.chain_door import ChainDoor
from raykv.connector.desk_link import DeskLink
from raykv.connector.metadata import RayMultiHandshake, RayMultiMetadata
from raykv.connector.scheduler_half import SchedulerHalf
from raykv.connector.stats import RayMultiStats
from raykv.connector.stats_prom import RayMultiPromMetrics
from raykv.connector.worker_half import WorkerHalf

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class RayMultiConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's MultiConnector with each child in a Ray actor: ordered children, one loads, all save."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = start_checks.checked_config(vllm_config, kv_cache_config)
        self._scheduler_half: SchedulerHalf | None = None
        self._worker_half: WorkerHalf | None = None
        self._recovery: start_up.Recovery | None = None
        self._desk: DeskLink | None = None
        if role is KVConnectorRole.SCHEDULER:
            children = start_up.scheduler_children(self._config, vllm_config, kv_cache_config)
            self._scheduler_half = SchedulerHalf(self._config, children, vllm_config, kv_cache_config)
            children_now = self._scheduler_half.children
            self._recovery = start_up.Recovery(self._config, children_now, vllm_config, kv_cache_config)
            door = ChainDoor(vllm_config, kv_cache_config, delivers=self.requires_kv_delivery)
            self._scheduler_half.chain.use(door, self._recovery)
            self._desk = desk_setup.for_chain(self._config, self._scheduler_half, vllm_config, kv_cache_config)
        else:
            self._worker_half = start_up.worker_half(self._config, vllm_config, kv_cache_config)

    @property
    def _scheduler(self) -> SchedulerHalf:
        assert self._scheduler_half is not None, "a hook of the scheduler half was called in a worker"
        return self._scheduler_half

    @property
    def _worker(self) -> WorkerHalf:
        assert self._worker_half is not None, "a hook of the worker half was called in the scheduler"
        return self._worker_half

    # -- what vLLM asks of the class, before there is an engine ----------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True if an inline child needs it: hosted children take no part in the forward pass."""
        return start_checks.any_inline_needs_piecewise(extra_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The layout that the children require, if any. Raises ConfigError if they disagree."""
        return start_checks.required_layout(vllm_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> RayMultiStats:
        return RayMultiStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> RayMultiPromMetrics:
        return RayMultiPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- what the scheduler asks of the whole ----------------------------------------------------------------

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        children = self._scheduler.children
        return bool(children) and all(start_up.ask(c, "supports_divergent_local_hybrid_hits") for c in children)

    @property
    def requires_kv_delivery(self) -> bool:
        return any(start_up.ask(child, "requires_kv_delivery") for child in self._scheduler.children)

    def get_finished_count(self) -> int | None:
        """None: the ledger counts, over all ranks."""
        return None

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)
        if self._recovery is not None:
            self._recovery.start(kv_cache_manager)
            self._scheduler.chain.wake_by(vllm_compat.find_waker())
        if self._desk is not None:
            self._desk.start()

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Done by `bind_kv_cache_manager`, for the children too."""

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): found for rank, found in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        found: dict[tuple[int, int], RayMultiHandshake] = {}
        for key, handshake in metadata.items():
            assert isinstance(handshake, RayMultiHandshake)
            found[key] = handshake
        assert self._recovery is not None
        self._recovery.handshakes_arrived(found)

    # -- scheduler half --------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        default = super().get_loaded_kv_cache_group_ids(request)
        return self._scheduler.loads.filled_groups(request, default)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        default = super().get_external_cache_hit_sources
        return self._scheduler.loads.hit_sources(request, default) or default(request, num_external_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """False always: vLLM may free now, the pins hold what a child still reads."""
        return False, self._scheduler.request_finished(request, block_ids)

    def register_finished_partial_tail(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """False always, as for `request_finished`."""
        self._scheduler.finished_partial_tail(request, block_ids, partial_tail_offloads)
        return False

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.take_events()

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.has_pending_block_frees()

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_pending_push_work()

    def reset_cache(self) -> bool:
        return self._scheduler.reset_cache()

    # -- worker half -----------------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return self._worker.mem_pool_context()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """vLLM 0.33, before the KV cache is given up for sleep."""
        raise vllm_compat.no_sleep_mode()

    def restore_kv_caches(self, *args: Any, **kwargs: Any) -> None:
        """vLLM 0.33, after sleep."""
        raise vllm_compat.no_sleep_mode()

    @property
    def supports_sleep_mode(self) -> bool:
        """vLLM 0.33. False: the KV cache is shared with other processes, which vLLM can't unmap."""
        return False

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        self._worker.set_host_xfer_buffer_ops(copy_operation)

    def get_handshake_metadata(self) -> RayMultiHandshake | None:
        return start_up.handshake(self._worker)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, RayMultiMetadata)
        self._worker.handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, RayMultiMetadata)
        super().bind_connector_metadata(connector_metadata)
        self._worker.bind(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        for child in self._worker.inline:
            if child.bound:
                child.connector.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        for child in self._worker.saving():
            child.connector.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        self._worker.wait_for_save()

    def finish_forward(self) -> None:
        for child in self._worker.inline:
            child.connector.finish_forward()

    def reset_capture_state(self) -> None:
        for child in self._worker.inline:
            child.connector.reset_capture_state()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.get_transfer_results(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid_blocks()

    def get_kv_connector_kv_cache_events(self) -> None:
        """None: the children's events go with the worker metadata, each to its own scheduler half."""

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_report()

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._worker.clear()

    # -- both ------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> RayMultiStats | None:
        """Taken on the scheduler's side, where all ranks have come together."""
        return self._scheduler_half.take_stats() if self._scheduler_half is not None else None

    def shutdown(self) -> None:
        if self._desk is not None:
            self._desk.close()
        if self._recovery is not None:
            self._recovery.stop()
        if self._scheduler_half is not None:
            self._scheduler_half.shutdown()
        if self._worker_half is not None:
            self._worker_half.shutdown()


class MultiConnector(RayMultiConnector):
    """The same under vLLM's name: a config of vLLM's MultiConnector plus one line uses it."""

    @classmethod
    def all_children_support_hma(cls, kv_transfer_config: Any) -> bool:
        """Asked by vLLM of its own class only; here for those who ask RayKV's."""
        return all(supports_hma(c) for c in start_checks.child_classes(kv_transfer_config).values())
