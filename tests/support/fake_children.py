"""Child connectors that do what a script says, on the KV cache of `tests.support.fake_model`.

A child is named and scripted in its `kv_connector_extra_config`: `{"fake": "A", "script": {...}}`, see `Control`.
The classes are found by module path, so they run hosted as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from tests.support.fake_control import control_of
from tests.support.fake_parts import FakeMeta, SchedulerPart, WorkerPart
from tests.support.fake_reports import FakeProm, FakeStats


@dataclass
class FakeHandshake(KVConnectorHandshakeMetadata):
    child: str
    rank: int
    engine_id: str


@dataclass
class FakeWorkerMeta(KVConnectorWorkerMetadata):
    """Counts the ranks that it was aggregated from."""

    child: str
    ranks: list[int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> FakeWorkerMeta:
        assert isinstance(other, FakeWorkerMeta) and other.child == self.child
        return FakeWorkerMeta(self.child, self.ranks + other.ranks)


class FakeChildNoHMA(KVConnectorBase_V1):
    """Both halves; `SchedulerPart` and `WorkerPart` do the work."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.control = control_of(extra["fake"], extra.get("script", {}))
        self.control.configs.append(self._kv_transfer_config)
        self.control.enter("__init__")
        parallel = vllm_config.parallel_config
        self.part: Any = SchedulerPart(self) if role is KVConnectorRole.SCHEDULER else WorkerPart(self, parallel)

    # -- scheduler half ---------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        self.control.enter("on_new_request")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.control.enter("get_num_new_matched_tokens")
        return self.part.look_up(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.control.enter("update_state_after_alloc")
        self.part.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> FakeMeta:
        self.control.enter("build_connector_meta")
        return self.part.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self.control.enter("update_connector_output")
        self.part.update(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.control.enter("request_finished")
        return self.part.finished(request, (block_ids,))

    def take_events(self) -> Iterable[KVCacheEvent]:
        self.control.enter("take_events")
        return self.part.take_events()

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.control.enter("set_xfer_handshake_metadata")
        self.control.handshakes = dict(metadata)

    # -- worker half ------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.control.enter("register_kv_caches")
        self.part.caches = kv_caches

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self.control.enter("handle_preemptions")
        assert isinstance(kv_connector_metadata, FakeMeta)
        self.part.save_late(kv_connector_metadata.preempted)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.control.enter("start_load_kv")
        self.part.start_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.control.enter("wait_for_layer_load")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self.control.enter("save_kv_layer")
        self.part.save(self._get_connector_metadata(), layer_name, kv_layer)

    def wait_for_save(self) -> None:
        self.control.enter("wait_for_save")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self.control.enter("get_transfer_results")
        return self.part.results(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        self.control.enter("get_block_ids_with_load_errors")
        invalid, self.part.invalid = self.part.invalid, set()
        return invalid

    def get_handshake_metadata(self) -> FakeHandshake | None:
        engine_id = self._kv_transfer_config.engine_id
        return FakeHandshake(self.control.name, self.part.rank, engine_id) if self.control.handshake else None

    def get_kv_connector_kv_cache_events(self) -> Any:
        return self.part.take_events()

    def build_connector_worker_meta(self) -> FakeWorkerMeta | None:
        self.control.enter("build_connector_worker_meta")
        return FakeWorkerMeta(self.control.name, [self.part.rank]) if self._connector_metadata is not None else None

    def clear_connector_metadata(self) -> None:
        if self._connector_metadata is not None:
            self.part.step_over(self._connector_metadata)
        super().clear_connector_metadata()

    # -- both -------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Any:
        self.control.enter("get_kv_connector_stats")
        if not self.control.stats or not isinstance(self.part, WorkerPart):
            return None
        self.control.emitted += 1
        return FakeStats({"polls": 1})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FakeStats:
        return FakeStats(data or {})


class FakeChild(FakeChildNoHMA, SupportsHMA):
    """The usual fake."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self.control.enter("request_finished")
        return self.part.finished(request, block_ids)


class FakeChildWithProm(FakeChild):
    """One with Prometheus metrics of its own."""

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> FakeProm:
        return FakeProm(*args)


class FakeChildHND(FakeChild):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "HND"


class FakeChildNHD(FakeChild):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "NHD"
