"""The desk of an engine, put together from the connector's scheduler half: with a chain of children, or a lone tier."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from raykv.actors import cluster, desk_handle
from raykv.config import MultiConfig
from raykv.config.tiers import TierOptions
from raykv.connector import tier_told
from raykv.connector.desk_link import DeskLink, Opened
from raykv.connector.engine_report import EngineReport
from raykv.connector.engine_view import EngineSight, NoChain, TierFacts, lone_view
from raykv.connector.prompt_hashes import PromptHashes
from raykv.connector.scheduler_half import SchedulerHalf
from raykv.connector.tier_told import ToldTierScheduler
from raykv.types import EngineId


def for_chain(config: MultiConfig, half: SchedulerHalf, vllm_config: Any, kv_cache_config: Any) -> DeskLink:
    """Of a MultiConnector. To be started once vLLM has bound its block pool."""
    stories = half.loads.stories

    def ask_tiers(hook: str, ask: Callable[[Any], Any], default: Any) -> Any:
        """The first TierConnector's answer; the call is behind the child's guard."""
        for child in half.children:
            if child.config.is_tier:
                return child.call(hook, lambda c: ask(cast(Any, c)), default, also_paused=True)
        return default

    def key_salt(lora: bool) -> bytes:
        return cast(bytes, ask_tiers("raykv_key_salt", lambda c: c.raykv_key_salt(lora), b""))

    sight = EngineSight(
        vllm_config=vllm_config,
        groups=len(kv_cache_config.kv_cache_groups),
        load_policy=str(config.load_policy),
        views=half.views,
        tier=lambda: ask_tiers("raykv_facts", lambda c: c.raykv_facts(), TierFacts()),
        stories=stories,
        rates=half.loads.rates,
        child_names=lambda: {child.index: child.name for child in half.children},
        started=time.time(),
    )
    report = EngineReport()
    half.also_tell(report.meter.missed)
    return DeskLink(
        partial(_open, config.ray_address, config.namespace, sight.engine, stories.last),
        sight,
        half.chain,
        PromptHashes(vllm_config, kv_cache_config, stories.adapters, key_salt).answer,
        needs_ray=any(child.hosted or child.config.is_tier for child in half.children),
        report=report,
    )


def for_tier(options: TierOptions, half: ToldTierScheduler, vllm_config: Any, kv_cache_config: Any) -> DeskLink:
    """Of a TierConnector that works alone."""
    transfer, stories = vllm_config.kv_transfer_config, half.stories
    sight = EngineSight(
        vllm_config=vllm_config,
        groups=len(kv_cache_config.kv_cache_groups),
        load_policy="",
        views=lambda: [lone_view(tier_told.NAME, transfer, bool(half.store), dict(half.totals))],
        tier=half.facts,
        stories=stories,
        rates=half.rates,
        child_names=lambda: {tier_told.ONLY: tier_told.NAME},
        started=time.time(),
    )
    return DeskLink(
        partial(_open, options.ray_address, options.namespace, sight.engine, stories.last),
        sight,
        NoChain(),
        PromptHashes(vllm_config, kv_cache_config, stories.adapters, half.key_salt).answer,
        report=EngineReport(),
    )


def _open(address: str | None, namespace: str, engine: EngineId, last_stories: int) -> Opened:
    """Joins Ray if this process has not, never starts it. Blocks. Raises RayKVError."""
    node = cluster.connect(address, namespace=namespace).node_id
    return Opened(desk_handle.open_desk(engine, last_stories, namespace=namespace), node)
