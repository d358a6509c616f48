"""Configs of a tiny model for benches: cheap to make, no machine is asked for anything."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from tests.support.models import tiny_llama


def child(name: str, hosted: bool = True, cls: str = "FakeChild", **more: Any) -> dict[str, Any]:
    """The config of a fake child. `raykv` gives RayKV's options, `fields` more of vLLM's; the rest is its script."""
    raykv = {"name": name, "run": "actor" if hosted else "inline", **more.pop("raykv", {})}
    fields = more.pop("fields", {})
    return {
        "kv_connector": cls,
        "kv_connector_module_path": "tests.support.fake_children",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"fake": name, "script": more, "raykv": raykv},
        **fields,
    }


@functools.cache
def _base_config(ranks: int, block_size: int) -> VllmConfig:
    return EngineArgs(
        model=str(tiny_llama()),
        skip_tokenizer_init=True,
        max_model_len=2048,
        block_size=block_size,
        enforce_eager=True,
        dtype="float32",
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp" if ranks > 1 else None,
    ).create_engine_config()


def vllm_config(transfer: Mapping[str, Any], ranks: int = 1, block_size: int = 16, **scheduler: Any) -> VllmConfig:
    """A config of a tiny model for `ranks` workers, without asking the machine for them."""
    config = copy.copy(_base_config(ranks, block_size))
    for name in ("cache_config", "scheduler_config", "parallel_config", "observability_config"):
        setattr(config, name, copy.copy(getattr(config, name)))
    for name, value in scheduler.items():
        setattr(config.scheduler_config, name, value)
    config.kv_transfer_config = KVTransferConfig(**transfer)
    return config


def kv_cache_config(num_blocks: int, block_size: int = 16, window: int | None = None) -> KVCacheConfig:
    """One group of full attention; with `window` a second one of sliding-window attention."""
    shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.int64}
    groups = [KVCacheGroupSpec(["layer.0", "layer.1"], FullAttentionSpec(**shape))]
    if window is not None:
        spec = SlidingWindowSpec(**shape, sliding_window=window)
        groups.append(KVCacheGroupSpec(["layer.2", "layer.3"], spec))
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
