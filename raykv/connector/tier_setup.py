"""Everything between a TierConnector's config and its two halves. A check raises ConfigError with the fix."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from raykv.actors import cluster, store_handle
from raykv.actors.store_link import StoreAsker, StoreCaller, StoreWorkerLink
from raykv.config.tiers import TierOptions, parse_tiers
from raykv.connector import desk_setup, fingerprint, start_up, vllm_compat
from raykv.connector.desk_link import DeskLink
from raykv.connector.events import TierEvents
from raykv.connector.request_stories import RequestStories
from raykv.connector.tier_told import ToldTierScheduler
from raykv.connector.tier_worker import TierWorker, WorkerFacts
from raykv.errors import ConfigError
from raykv.event_messages import EVENT_MEDIA
from raykv.store_messages import GroupLayout, Medium, RankAttach
from raykv.types import EngineId, Rank

logger = logging.getLogger("raykv")

REACH_SHARE = 0.6
"""Of a look-up's time limit may go by while the store looks at other nodes: its own answer must still come in time."""
HAND_OVER_SHARE, HAND_OVER_LEASES = 0.8, 0.25
"""Of a look-up's time limit, and of a lease's time, may go by while announced blocks are waited for."""
WHOLE_PREFIX = (FullAttentionSpec, MLAAttentionSpec, ChunkedLocalAttentionSpec)
"""KV groups that need every block of a prefix. (Of chunks a shorter tail would do; more is only fewer hits.)"""


def checked_options(vllm_config: VllmConfig, kv_cache_config: Any) -> tuple[TierOptions, tuple[GroupLayout, ...]]:
    """The parsed config and the model's KV groups, after every check that needs no Ray. Raises ConfigError."""
    vllm_compat.share_vllms_log()
    vllm_compat.check_version()
    assert vllm_config.kv_transfer_config is not None
    options = parse_tiers(vllm_config.kv_transfer_config.kv_connector_extra_config)
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(
                f"A TierConnector can't serve an engine with context parallelism, and {name} is "
                f"{getattr(parallel, name)}: a block's tokens lie on several ranks. Set it to 1."
            )
    if getattr(parallel, "nnodes_within_dp", 1) > 1:
        raise ConfigError(
            f"This engine has workers on {parallel.nnodes_within_dp} nodes, and a TierConnector's store serves one "
            "node. Keep an engine within a node, or run it without a TierConnector."
        )
    return options, kv_groups(kv_cache_config, vllm_config.cache_config.block_size)


def kv_groups(kv_cache_config: Any, block_size: int) -> tuple[GroupLayout, ...]:
    """How the model's KV groups lie in a store's slots. Raises ConfigError for those that can't."""
    groups = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec, name = group.kv_cache_spec, f"KV group {number} ({type(group.kv_cache_spec).__name__})"
        kinds = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
        if spec.block_size != block_size:
            raise ConfigError(
                f"{name} has blocks of {spec.block_size} tokens, and the engine's are of {block_size}. A TierConnector "
                "needs one size for all KV groups: start vLLM with --disable-hybrid-kv-cache-manager, or without it."
            )
        transfers = getattr(group, "enable_kv_transfer", True) and not getattr(group, "host_resident", False)
        if not transfers or not all(_is_known(kind) for kind in kinds):
            raise ConfigError(
                f"{name} holds something else than attention over blocks (Mamba states, an encoder's, or a cache of "
                "vLLM's own), which a TierConnector can't keep. Run this model without one."
            )
        groups.append(GroupLayout(tuple(group.layer_names), max(map(window_blocks, kinds))))
    return tuple(groups)


def _is_known(spec: Any) -> bool:
    """Exactly these classes: vLLM derives others from them whose blocks mean something else."""
    if isinstance(spec, SlidingWindowSpec):
        return type(spec).__name__ in ("SlidingWindowSpec", "SlidingWindowMLASpec") and not getattr(
            spec, "bounded_replay", False
        )
    return type(spec) in WHOLE_PREFIX


def window_blocks(spec: Any) -> int:
    """How many last blocks of a prefix this kind of attention needs; 0: all.

    As vLLM's SlidingWindowManager (0.32): the next token sees `sliding_window` - 1 tokens before it, and the
    `extra_retained_tokens` below them are kept too.
    """
    if not isinstance(spec, SlidingWindowSpec):
        return 0
    tokens = spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0)
    return max(1, math.ceil(tokens / spec.block_size))


def replicas(vllm_config: VllmConfig, kv_cache_config: Any) -> int:
    """How many neighbouring tensor-parallel ranks hold the same bytes: with MLA all, else as vLLM says (0.32)."""
    layers = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    if layers and set(layers) == vllm_compat.mla_layers(kv_cache_config):
        return vllm_config.parallel_config.tensor_parallel_size
    return 1


# -- the halves ---------------------------------------------------------------------------------------------


def scheduler_half(vllm_config: VllmConfig, kv_cache_config: Any) -> ToldTierScheduler:
    """The scheduler half; its link finds the store by itself, in the background."""
    options, groups = checked_options(vllm_config, kv_cache_config)
    transfer = vllm_config.kv_transfer_config
    no_loads = vllm_compat.why_no_loads(vllm_config)
    if no_loads:
        logger.warning("this engine saves to its tiers and loads nothing from them: %s", no_loads)
    return ToldTierScheduler(
        new_asker(options, EngineId(start_up.engine_id(vllm_config))),
        groups,
        vllm_config.cache_config.block_size,
        vllm_config.parallel_config.world_size,
        loads=transfer.kv_role != "kv_producer" and not no_loads,
        saves=transfer.kv_role != "kv_consumer",
        lookup_timeout_s=options.lookup_timeout_s,
        lease_s=options.store.lease_s,
        events=kv_events(vllm_config, options),
        stories=RequestStories(vllm_config),
    )


def desk(half: ToldTierScheduler, vllm_config: Any, kv_cache_config: Any) -> DeskLink:
    """The desk of an engine whose only connector this is, to be started."""
    options = parse_tiers(vllm_config.kv_transfer_config.kv_connector_extra_config)
    return desk_setup.for_tier(options, half, vllm_config, kv_cache_config)


def kv_events(vllm_config: VllmConfig, options: TierOptions) -> TierEvents | None:
    """Where saves are told of, if this engine publishes KV events. They go to the first tier that is the node's own."""
    wanted = vllm_config.kv_events_config
    if wanted is None or not wanted.enable_kv_cache_events:
        return None
    media = [tier.medium for tier in options.store.tiers]
    first = next((medium for medium in media if medium is not Medium.FS), media[0])
    return TierEvents(vllm_config.cache_config.block_size, EVENT_MEDIA[first])


def worker_half(vllm_config: VllmConfig, kv_cache_config: Any) -> TierWorker:
    """The worker half; it joins the store when vLLM registers its KV cache."""
    options, groups = checked_options(vllm_config, kv_cache_config)
    rank = Rank(vllm_compat.global_rank(vllm_config))
    place = fingerprint.RankPlace.of(vllm_config, rank, replicas(vllm_config, kv_cache_config))
    facts = WorkerFacts(
        engine=EngineId(start_up.engine_id(vllm_config)),
        rank=rank,
        num_ranks=vllm_config.parallel_config.world_size,
        num_blocks=kv_cache_config.num_blocks,
        groups=groups,
        writes=place.writes,
        model=str(vllm_config.model_config.model),
    )

    texts: list[str] = []

    def identify(kv_caches: Mapping[str, Any]) -> bytes:
        weights = fingerprint.weights_identity(vllm_config, options.model_identity)
        found = fingerprint.facts(vllm_config, groups, kv_caches, facts.num_blocks, place, weights)
        texts.append(fingerprint.canonical(found))
        return fingerprint.digest(found)

    return TierWorker(facts, identify, lambda attach: new_link(options, attach), lambda: texts[-1])


# -- the store ----------------------------------------------------------------------------------------------


def new_asker(options: TierOptions, engine: EngineId) -> StoreAsker:
    """The scheduler half's link."""
    reach_s = REACH_SHARE * options.lookup_timeout_s if options.store.peer else 0.0
    return StoreAsker(lambda: open_store(options), engine, options.timeout_s, reach_s, hand_over_s(options))


def hand_over_s(options: TierOptions) -> float:
    """How long a look-up waits for blocks that are announced: its answer must come in time, and its lease last."""
    return min(HAND_OVER_SHARE * options.lookup_timeout_s, HAND_OVER_LEASES * options.store.lease_s)


def new_link(options: TierOptions, attach: RankAttach) -> StoreWorkerLink:
    """A worker half's link, to be started."""
    return StoreWorkerLink(lambda: open_store(options), attach, options.timeout_s, options.load_timeout_s)


def open_store(options: TierOptions) -> StoreCaller:
    """Find the store of this node, or start it; joins Ray if this process has not. Blocks."""
    node_id = cluster.connect(options.ray_address, namespace=options.namespace).node_id
    return store_handle.open_store(options.store, node_id, namespace=options.namespace)
