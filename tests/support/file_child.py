"""A small, correct connector of the tests' own: one file for each block and rank, with handles to misbehave.

Loads are asynchronous, saves are synchronous as vLLM sees them. Files in its `control` folder steer it from
outside, in whatever process its halves run:

    miss            look-ups find nothing
    not_ready       look-ups are not answered while the file exists (`asked` appears when one is not)
    hold_load       loads wait while the file exists (`loading` appears when one does)
    hold_save       saves wait while the file exists (`saving` appears when one does)
    raise_in_HOOK   the hook of that name raises while the file exists
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank


@dataclass
class FileChildMetadata(KVConnectorMetadata):
    """Blocks as (hash, block id)."""

    loads: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    saves: list[tuple[str, int]] = field(default_factory=list)


class FileChild(KVConnectorBase_V1, SupportsHMA):
    """Rank-aware, unlike ExampleConnector: every rank has its own file of a block."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._folder = Path(extra["folder"])
        self._control = Path(extra["control"])
        self._folder.mkdir(parents=True, exist_ok=True)
        self._control.mkdir(parents=True, exist_ok=True)
        self._block_size = vllm_config.cache_config.block_size
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._requests: dict[str, Any] = {}
        self._tables: dict[str, list[int]] = {}
        self._saved: dict[str, int] = {}
        self._loads: dict[str, list[tuple[str, int]]] = {}
        self._hits: dict[str, tuple[int, int]] = {}
        self._caches: dict[str, torch.Tensor] = {}
        self._arrived: set[str] = set()
        self._failed: set[int] = set()

    def _may_raise(self, hook: str) -> None:
        if (self._control / f"raise_in_{hook}").exists():
            raise RuntimeError(f"told to raise in {hook}")

    def _wait_while(self, gate: str, marker: str) -> None:
        if (self._control / gate).exists():
            (self._control / marker).touch()
            while (self._control / gate).exists():
                time.sleep(0.01)

    def _file(self, block_hash: str, rank: int) -> Path:
        return self._folder / f"{block_hash}.{rank}"

    # -- scheduler half

    def on_new_request(self, request: Any) -> None:
        self._may_raise("on_new_request")
        self._requests[request.request_id] = request

    def _hashes(self, request_id: str) -> list[str]:
        return [bytes(h).hex() for h in self._requests[request_id].block_hashes]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._may_raise("get_num_new_matched_tokens")
        if (self._control / "miss").exists():
            return 0, False
        if (self._control / "not_ready").exists():
            (self._control / "asked").touch()
            return None, False
        first = num_computed_tokens // self._block_size
        last = (request.num_tokens - 1) // self._block_size
        hits = first
        for block_hash in self._hashes(request.request_id)[first:last]:
            if not all(self._file(block_hash, rank).exists() for rank in range(self._ranks)):
                break
            hits += 1
        self._hits[request.request_id] = (first, hits)
        tokens = (hits - first) * self._block_size
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._may_raise("update_state_after_alloc")
        if num_external_tokens > 0:
            first, last = self._hits[request.request_id]
            ids = blocks.get_block_ids()[0]
            hashes = self._hashes(request.request_id)
            self._loads[request.request_id] = [(hashes[i], ids[i]) for i in range(first, last)]

    def build_connector_meta(self, scheduler_output: Any) -> FileChildMetadata:
        self._may_raise("build_connector_meta")
        meta = FileChildMetadata(loads=self._loads)
        self._loads = {}
        for new in scheduler_output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            self._saved[new.req_id] = 0
            self._plan_save(meta, new.req_id, new.num_computed_tokens, scheduler_output)
        cached = scheduler_output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            if req_id not in self._tables:
                continue
            ids = cached.new_block_ids[index]
            if req_id in cached.resumed_req_ids:
                self._tables[req_id], self._saved[req_id] = list(ids[0]), 0
            elif ids is not None:
                self._tables[req_id].extend(ids[0])
            self._plan_save(meta, req_id, cached.num_computed_tokens[index], scheduler_output)
        return meta

    def _plan_save(self, meta: FileChildMetadata, req_id: str, computed: int, output: Any) -> None:
        full = (computed + output.num_scheduled_tokens[req_id]) // self._block_size
        hashes = self._hashes(req_id)
        for i in range(self._saved[req_id], min(full, len(hashes))):
            meta.saves.append((hashes[i], self._tables[req_id][i]))
        self._saved[req_id] = max(self._saved[req_id], full)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._may_raise("request_finished")
        for known in (self._requests, self._tables, self._saved, self._hits):
            known.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    # -- worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches
        self._rank = get_tensor_model_parallel_rank()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._may_raise("start_load_kv")
        meta = self._get_connector_metadata()
        assert isinstance(meta, FileChildMetadata)
        for request_id, blocks in meta.loads.items():
            threading.Thread(target=self._load, args=(request_id, blocks), daemon=True).start()

    def _load(self, request_id: str, blocks: list[tuple[str, int]]) -> None:
        for block_hash, block_id in blocks:
            self._wait_while("hold_load", "loading")
            try:
                saved = torch.load(self._file(block_hash, self._rank), weights_only=True)
                for layer, cache in self._caches.items():
                    cache[block_id].copy_(saved[layer])
            except Exception:
                self._failed.add(block_id)
        self._arrived.add(request_id)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        self._may_raise("save_kv_layer")

    def wait_for_save(self) -> None:
        self._may_raise("wait_for_save")
        meta = self._get_connector_metadata()
        assert isinstance(meta, FileChildMetadata)
        for block_hash, block_id in meta.saves:
            self._wait_while("hold_save", "saving")
            target = self._file(block_hash, self._rank)
            if not target.exists():
                part = target.with_suffix(f".{self._rank}.part")
                torch.save({layer: cache[block_id].clone() for layer, cache in self._caches.items()}, part)
                part.rename(target)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._may_raise("get_finished")
        arrived, self._arrived = self._arrived, set()
        return None, arrived or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def get_kv_connector_stats(self) -> None:
        self._may_raise("get_kv_connector_stats")
