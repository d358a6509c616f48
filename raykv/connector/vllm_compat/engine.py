"""An engine as a whole: its version, its configs, its KV groups, and its processes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import vllm
from vllm.config import KVTransferConfig, VllmConfig

from raykv.config import ChildConfig

logger = logging.getLogger("raykv")

TESTED_VERSIONS = ("0.32", "0.33")


def check_version() -> None:
    """Warn when this vLLM is not one that RayKV's tests ran on."""
    if not vllm.__version__.startswith(TESTED_VERSIONS):
        logger.warning("RayKV is tested with vLLM %s; this is %s.", " and ".join(TESTED_VERSIONS), vllm.__version__)


def share_vllms_log() -> None:
    """RayKV's messages go where vLLM's go: its logger has vLLM's handlers, unless somebody gave it its own."""
    vllms = logging.getLogger("vllm")
    if not logger.handlers and vllms.handlers:
        logger.handlers = list(vllms.handlers)
        logger.setLevel(vllms.level)
        logger.propagate = False


def child_vllm_config(vllm_config: VllmConfig, child: ChildConfig, engine_id: str | None = None) -> VllmConfig:
    """A copy of the engine's config as the child alone would see it, under `engine_id` if given."""
    kwargs = dict(child.kv_transfer_kwargs())
    assert vllm_config.kv_transfer_config is not None
    kwargs["engine_id"] = engine_id or kwargs.get("engine_id") or vllm_config.kv_transfer_config.engine_id
    config = copy.copy(vllm_config)
    config.kv_transfer_config = KVTransferConfig(**kwargs)
    return config


def portable_vllm_config(vllm_config: VllmConfig) -> VllmConfig:
    """A copy without the model: `compilation_config.static_forward_context` holds the layers (0.32)."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    for name in ("static_all_moe_layers",):
        if hasattr(config.compilation_config, name):
            setattr(config.compilation_config, name, [])
    return config


def attention_backends(vllm_config: VllmConfig) -> dict[str, str]:
    """By layer: the import path of its attention backend, read from the model's layers in the worker (0.32)."""
    paths = {}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if hasattr(layer, "get_attn_backend"):
            backend = layer.get_attn_backend()
            paths[name] = f"{backend.__module__}:{backend.__qualname__}"
    return paths


def windowed_groups(kv_cache_config: Any) -> frozenset[int]:
    """KV groups whose requests give blocks back while they run: all but full attention (class names, 0.32)."""
    return frozenset(
        i
        for i, group in enumerate(kv_cache_config.kv_cache_groups)
        if type(group.kv_cache_spec).__name__ not in ("FullAttentionSpec", "MLAAttentionSpec")
    )


def has_mamba(kv_cache_config: Any) -> bool:
    """Whether the model keeps Mamba states in its KV cache (class names, 0.32)."""
    return any("Mamba" in type(g.kv_cache_spec).__name__ for g in kv_cache_config.kv_cache_groups)


def mla_layers(kv_cache_config: Any) -> frozenset[str]:
    """The layers whose KV cache is that of multi-head latent attention (`MLAAttentionSpec`, 0.32)."""
    return frozenset(
        name
        for group in kv_cache_config.kv_cache_groups
        if type(group.kv_cache_spec).__name__ == "MLAAttentionSpec"
        for name in group.layer_names
    )


def parallel_ranks() -> Mapping[str, tuple[int, tuple[int, ...]]]:
    """By group name: this process's rank in it and the group's ranks (`parallel_state` globals, 0.32)."""
    from vllm.distributed import parallel_state

    found = {}
    for name in ("_WORLD", "_TP", "_PP", "_DP", "_DCP", "_PCP", "_EP", "_ETP"):
        group = getattr(parallel_state, name, None)
        if group is not None:
            found[name] = (group.rank_in_group, tuple(group.ranks))
    return found


def global_rank(vllm_config: VllmConfig) -> int:
    """This worker's rank among the engine's workers, 0 to world_size - 1 (`parallel_config.rank`, 0.32)."""
    from vllm.distributed import parallel_state

    world = getattr(parallel_state, "_WORLD", None)
    size = vllm_config.parallel_config.world_size
    return world.rank % size if world is not None else vllm_config.parallel_config.rank % size


def device_type() -> str:
    """'cuda', 'cpu', ... of the platform that vLLM chose."""
    from vllm.platforms import current_platform

    return current_platform.device_type


def why_no_loads(vllm_config: VllmConfig) -> str | None:
    """Why this engine can't compute a prompt from loaded tokens on, so that every load gives wrong tokens; else None.

    With multi-head latent attention on a CPU without AMX, vLLM turns chunked prefill and its own prefix cache off
    (`CpuPlatform.check_and_update_config`, 0.32), since its prefill does not read what came before.
    """
    if not getattr(vllm_config.model_config, "use_mla", False) or device_type() != "cpu":
        return None
    if vllm_config.scheduler_config.enable_chunked_prefill:
        return None
    return "vLLM can't go on from a loaded prefix with multi-head latent attention on this CPU"


def no_sleep_mode() -> NotImplementedError:
    """The answer to vLLM 0.33's sleep hooks."""
    return NotImplementedError(
        "vLLM's sleep mode gives the KV cache's memory away while RayKV's hosts still map it. Start vLLM without "
        "--enable-sleep-mode, or run every child inline."
    )
