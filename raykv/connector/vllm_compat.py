"""What RayKV needs of vLLM beyond its public connector API, with the version it was read from (0.32.0).

Everything here is a fact about code that may change without notice: each function says which one. RayKV
supports vLLM 0.32 and 0.33; `check_version` warns about others.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from raykv.config import ChildConfig, unknown_connector
from raykv.errors import UnknownConnectorError

logger = logging.getLogger("raykv")

TESTED_VERSIONS = ("0.32", "0.33")

EMPTY_HOOKS = (
    "take_events",
    "has_pending_push_work",
    "has_pending_block_frees",
    "get_kv_connector_stats",
    "update_connector_output",
)
"""Hooks of a step that do nothing in the base class (`KVConnectorBase_V1`, 0.32): most children leave them so."""


@dataclasses.dataclass(frozen=True, slots=True)
class IdleRule:
    """When a connector's metadata asks nothing of its worker half: it says what the default-made one says.

    `beside`: attributes that say nothing by themselves. `turn_every_s`: how often the worker half must have a turn all
    the same, while steps are planned.
    """

    beside: frozenset[str] = frozenset()
    turn_every_s: float = float("inf")

    def asks_nothing(self, meta: Any, default: Mapping[str, Any]) -> bool:
        """`default`: `said_by_default` of this class."""
        said = vars(meta)
        return said.keys() == default.keys() and all(
            said[name] == value for name, value in default.items() if name not in self.beside
        )


_NIXL_IDLE = IdleRule(frozenset({"scheduler_clock"}), turn_every_s=0.01)

IDLE_WHEN_EMPTY: Mapping[str, IdleRule] = {
    "ExampleConnector": IdleRule(),
    "LMCacheMPConnector": IdleRule(),
    "NixlConnector": _NIXL_IDLE,
    "NixlPullConnector": _NIXL_IDLE,
}
"""Connectors whose worker half has nothing to do where metadata is the default-made one, so that the step needs no
call. NIXL stamps a clock on it, which only dates its deadlines; and a read that nobody waits for, of a prompt that was
all there, goes out in the first turn after its handshake. (NixlPush polls its own peers, so its steps are always
sent.)"""

LOADS_IN_THE_HOOK = frozenset({"ExampleConnector"})
"""Connectors whose loads and saves end inside their hook, with no thread behind: an exception settles them."""

LOADS_AT_FIRST_ALLOCATION = frozenset({"LMCacheMPConnector"})
"""Connectors that start a load only in a request's first `update_state_after_alloc` since it arrived or was preempted:
asked again after another child's load failed, LMCacheMP promises tokens that it then never loads (lmcache 0.5.6)."""

PULLED_BY_PEERS = frozenset({"NixlConnector", "NixlPullConnector"})
"""Connectors whose send is over when another engine has read the blocks. It learns where they are from the request's
final output, so such a report is never about less than the whole request (nixl/pull_worker.py, 0.32)."""

PD_CONNECTORS = frozenset(
    {"NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "P2pNcclConnector"}
)
"""Connectors that return the same `kv_transfer_params` keys (`remote_engine_id`): one of them per engine."""


ANOTHER_CHILDS = b"raykv: loaded by another child"


def check_version() -> None:
    """Warn when this vLLM is not one that RayKV's tests ran on."""
    if not vllm.__version__.startswith(TESTED_VERSIONS):
        logger.warning("RayKV is tested with vLLM %s; this is %s.", " and ".join(TESTED_VERSIONS), vllm.__version__)


def connector_class(child: ChildConfig) -> type:
    """The class of a child, by vLLM's registry or the child's module path. Raises ConfigError."""
    try:
        return KVConnectorFactory.get_connector_class(KVTransferConfig(**child.kv_transfer_kwargs()))
    except ValueError as error:
        if "Unsupported connector type" in str(error):
            # 0.32: the registry is a private dict of the factory.
            raise unknown_connector(child.connector, list(KVConnectorFactory._registry)) from error
        raise
    except (ImportError, AttributeError) as error:
        raise UnknownConnectorError(
            f"The class {child.connector} of child {child.name} can't be loaded from "
            f"{child.module_path or 'vLLM'}: {error}. Check kv_connector_module_path and the class name, and that what "
            "the module imports is installed."
        ) from error


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


def filtered_output(output: Any, known: Any) -> Any:
    """`SchedulerOutput` with only the requests that `known(request_id)` accepts (fields as of 0.32).

    A child that was rebuilt while requests were running has never heard of those.
    """
    cached = output.scheduled_cached_reqs
    keep = [i for i, req_id in enumerate(cached.req_ids) if known(req_id)]
    if (
        len(keep) == len(cached.req_ids)
        and all(known(r.req_id) for r in output.scheduled_new_reqs)
        and all(known(req_id) for req_id in output.finished_req_ids)
    ):
        return output
    parallel = {
        field.name: [getattr(cached, field.name)[i] for i in keep]
        for field in dataclasses.fields(cached)
        if isinstance(getattr(cached, field.name), list) and len(getattr(cached, field.name)) == len(cached.req_ids)
    }
    tokens = {req_id: n for req_id, n in output.num_scheduled_tokens.items() if known(req_id)}
    return dataclasses.replace(
        output,
        scheduled_new_reqs=[r for r in output.scheduled_new_reqs if known(r.req_id)],
        scheduled_cached_reqs=dataclasses.replace(
            cached, resumed_req_ids={r for r in cached.resumed_req_ids if known(r)}, **parallel
        ),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        finished_req_ids={r for r in output.finished_req_ids if known(r)},
    )


def idle_rule(child: ChildConfig) -> IdleRule | None:
    """When a step asks nothing of this child's worker half; None: that can't be told."""
    return IDLE_WHEN_EMPTY.get(child.connector) if child.module_path is None else None


def said_by_default(meta: Any) -> dict[str, Any]:
    """The attributes of a default-made metadata object of this one's class."""
    return dict(vars(type(meta)()))


def own_hooks(connector: Any) -> frozenset[str]:
    """Those of `EMPTY_HOOKS` in which the connector is not the base class's."""
    if connector is None:
        return frozenset()
    return frozenset(
        name
        for name in EMPTY_HOOKS
        if getattr(getattr(connector, name), "__func__", None) is not getattr(KVConnectorBase_V1, name)
    )


def pool_blocks(block_pool: Any, block_ids: Sequence[int]) -> list[Any]:
    """The pool's block objects; null blocks are left out, they have no owner (`BlockPool.blocks`, 0.32)."""
    blocks = block_pool.blocks
    return [block for block in (blocks[i] for i in block_ids) if not block.is_null]


def as_if_computed(blocks: Any, end: int, block_sizes: Sequence[int]) -> Any:
    """A `KVCacheBlocks` as a child sees it that was told that the first `end` tokens are computed: their blocks have
    hashes. Several connectors take the blocks without one for theirs (`get_unhashed_block_ids`, 0.32)."""
    groups = []
    for group, block_size in zip(blocks.blocks, block_sizes, strict=True):
        seen = list(group)
        for i, block in enumerate(seen[: end // block_size]):
            if block.block_hash is None and not block.is_null:
                seen[i] = copy.copy(block)  # the real one must not get a hash: it would be found in the prefix cache
                seen[i]._block_hash = ANOTHER_CHILDS
        groups.append(seen)
    return type(blocks)(tuple(groups))


def prompt_tokens(output: Any) -> int:
    """The tokens of prompts that a `SchedulerOutput` has computed (fields as of 0.32): a decode is one token."""
    if output.total_num_scheduled_tokens == len(output.num_scheduled_tokens):
        return 0  # each request has one
    return sum(tokens for tokens in output.num_scheduled_tokens.values() if tokens > 1)


def loads_any_range(child: ChildConfig) -> bool:
    """Whether a child's class loads exactly the tokens that it is told, from any whole block of its hit to any other.

    RayKV's own does. A user's class may say so itself by `raykv_loads_any_range = True`: it then starts at the number
    of computed tokens that it was asked with last, and stops after the tokens that `update_state_after_alloc` gives.
    """
    if child.is_tier:
        return True
    return bool(getattr(connector_class(child), "raykv_loads_any_range", False))


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


def saved_tokens(metadata: Any, block_size: int) -> int:
    """Prompt tokens whose save this metadata orders, for the connectors whose metadata says so; else 0."""
    total = 0
    for request in getattr(metadata, "requests", ()) or ():
        if getattr(request, "is_store", False):  # ExampleConnector
            total += len(request.token_ids)
        elif getattr(request, "direction", None) == "STORE":  # LMCacheMPConnector
            op = request.op
            total += max(0, getattr(op, "end", 0) - getattr(op, "start", 0))
    return total


def is_status(request: Any, name: str) -> bool:
    """`request.status` compared by name, so that pure code need not import vLLM's enum."""
    return request.status.name == name


def parallel_ranks() -> Mapping[str, tuple[int, tuple[int, ...]]]:
    """By group name: this process's rank in it and the group's ranks (`parallel_state` globals, 0.32)."""
    from vllm.distributed import parallel_state

    found = {}
    for name in ("_WORLD", "_TP", "_PP", "_DP", "_DCP", "_PCP", "_EP", "_ETP"):
        group = getattr(parallel_state, name, None)
        if group is not None:
            found[name] = (group.rank_in_group, tuple(group.ranks))
    return found


def settles_in_hook(child: ChildConfig) -> bool:
    """Whether an exception in a data hook of this child leaves nothing running behind it."""
    return child.connector in LOADS_IN_THE_HOOK and child.module_path is None


def pulled_by_peers(child: ChildConfig) -> bool:
    """Whether the child's sends end by another engine's read."""
    return child.connector in PULLED_BY_PEERS and child.module_path is None


def mla_layers(kv_cache_config: Any) -> frozenset[str]:
    """The layers whose KV cache is that of multi-head latent attention (`MLAAttentionSpec`, 0.32)."""
    return frozenset(
        name
        for group in kv_cache_config.kv_cache_groups
        if type(group.kv_cache_spec).__name__ == "MLAAttentionSpec"
        for name in group.layer_names
    )


def copy_kv_blocks() -> Any:
    """The copy operation that vLLM's model runner gives to connectors with a host buffer (0.32)."""
    from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks

    return copy_kv_blocks


def remove_half_saved(child: ChildConfig, metas: Sequence[Any]) -> int:
    """After a kill: delete what an ExampleConnector was writing; returns the folders removed.

    Its hit test is "the folder exists", so a folder that a killed process left half written would be loaded
    as if it were whole (`_generate_foldername_debug`, 0.32).
    """
    if not settles_in_hook(child):
        return 0
    import os
    import shutil
    from types import SimpleNamespace

    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    place: Any = SimpleNamespace(_storage_path=child.extra.get("shared_storage_path", "/tmp"))
    removed = 0
    for meta in metas:
        for request in meta.requests:
            if not request.is_store:
                continue
            folder = ExampleConnector._generate_foldername_debug(place, request.token_ids, request.mm_hashes)
            if os.path.isdir(folder):
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
    return removed


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


def global_rank(vllm_config: VllmConfig) -> int:
    """This worker's rank among the engine's workers, 0 to world_size - 1 (`parallel_config.rank`, 0.32)."""
    from vllm.distributed import parallel_state

    world = getattr(parallel_state, "_WORLD", None)
    size = vllm_config.parallel_config.world_size
    return world.rank % size if world is not None else vllm_config.parallel_config.rank % size


def no_sleep_mode() -> NotImplementedError:
    """The answer to vLLM 0.33's sleep hooks."""
    return NotImplementedError(
        "vLLM's sleep mode gives the KV cache's memory away while RayKV's hosts still map it. Start vLLM without "
        "--enable-sleep-mode, or run every child inline."
    )


def silent_refusal(connector: Any) -> str | None:
    """Why a connector that was built can do nothing, where it only logs that; None if it can.

    LMCacheConnectorV1 goes into a "degraded mode" when its engine can't be made, on a CPU for one: it then never
    saves or loads (`LMCacheManager._init_failed`, lmcache 0.5.6).
    """
    manager = getattr(getattr(connector, "_lmcache_engine", None), "_manager", None)
    if not getattr(manager, "_init_failed", False):
        return None
    lines = [line.strip() for line in str(getattr(manager, "_init_failed_reason", "")).splitlines() if line.strip()]
    return lines[-1] if lines else "it could not be initialised"
