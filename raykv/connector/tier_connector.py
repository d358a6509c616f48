"""RayKV's own vLLM connector. One class with vLLM's two roles; it only passes each call to the half at work.

Alone:      {"kv_connector": "TierConnector", "kv_connector_module_path": "raykv.connector", "kv_role": "kv_both",
             "kv_connector_extra_config": {"tiers": [{"medium": "host", "capacity": "64GiB"}]}}
Or as a child of RayKV's MultiConnector, where it stays in vLLM's processes: the store has one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from raykv.connector import tier_setup, vllm_compat
from raykv.connector.desk_link import DeskLink
from raykv.connector.engine_view import TierFacts
from raykv.connector.request_stories import TierPart
from raykv.connector.tier_metadata import TierHandshake, TierMetadata, TierWorkerMeta
from raykv.connector.tier_stats import TierPromMetrics, TierStats
from raykv.connector.tier_told import ToldTierScheduler
from raykv.connector.tier_worker import TierWorker
from raykv.types import RequestId

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class TierConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV blocks in the tiers of this node's store, which outlives the engine and serves others too."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler_half: ToldTierScheduler | None = None
        self._desk: DeskLink | None = None
        self._worker_half: TierWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_half = tier_setup.scheduler_half(vllm_config, kv_cache_config)
        else:
            self._worker_half = tier_setup.worker_half(vllm_config, kv_cache_config)

    @property
    def _scheduler(self) -> ToldTierScheduler:
        assert self._scheduler_half is not None, "a hook of the scheduler half was called in a worker"
        return self._scheduler_half

    @property
    def _worker(self) -> TierWorker:
        assert self._worker_half is not None, "a hook of the worker half was called in the scheduler"
        return self._worker_half

    # -- what vLLM asks of the class -------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierStats:
        return TierStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TierPromMetrics:
        return TierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- scheduler half --------------------------------------------------------------------------------------

    def raykv_is_inner(self) -> None:
        """RayKV's MultiConnector says, right after the start, that this is its child: it watches over idle steps."""
        self._scheduler.is_inner()

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)
        if self._scheduler.tells:
            self._desk = tier_setup.desk(self._scheduler, self._vllm_config, self._kv_cache_config)
            self._desk.start()

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler.ranks_joined(one for one in metadata.values() if isinstance(one, TierHandshake))

    def raykv_part(self, request: RequestId) -> TierPart:
        """For the request's story, asked by RayKV's MultiConnector."""
        return self._scheduler.part(request)

    def raykv_facts(self) -> TierFacts:
        """For the engine's desk, from another thread."""
        return self._scheduler.facts()

    def raykv_key_salt(self, lora: bool) -> bytes:
        """The salt of the store's keys, of requests with an adapter or without, from another thread."""
        return self._scheduler.key_salt(lora)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        return self._scheduler.hit_sources(request, num_external_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """False always: vLLM may free now, the pins hold what is still read."""
        return False, self._scheduler.request_finished(request)

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.has_pending_block_frees()

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_pending_push_work()

    def reset_cache(self) -> bool:
        return self._scheduler.reset_cache()

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.take_events()

    # -- worker half -----------------------------------------------------------------------------------------

    def get_handshake_metadata(self) -> TierHandshake | None:
        return self._worker.handshake

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return self._worker.pool_context()

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
        """vLLM 0.33. False: the KV cache is shared with the store's process, which vLLM can't unmap."""
        return False

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, TierMetadata)
        super().bind_connector_metadata(connector_metadata)
        self._worker.bind(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_load_kv()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All loads are asynchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """The store copies whole blocks behind the forward pass."""

    def wait_for_save(self) -> None:
        self._worker.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.get_transfer_results()

    def build_connector_worker_meta(self) -> TierWorkerMeta | None:
        return self._worker.take_meta()

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._worker.clear()

    # -- both ------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> TierStats | None:
        """Counted on the scheduler's side, where all ranks come together."""
        return self._scheduler_half.take_stats() if self._scheduler_half is not None else None

    def shutdown(self) -> None:
        if self._desk is not None:
            self._desk.close()
        if self._scheduler_half is not None:
            self._scheduler_half.shutdown()
        if self._worker_half is not None:
            self._worker_half.shutdown()
