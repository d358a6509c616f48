"""Whether a config can be used, and for this engine: asked before anything is started, and of children added later.

A check raises ConfigError with one paragraph that names the thing, the value and the fix.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

from raykv.config import ChildConfig, MultiConfig, RunMode, known_synchronous, parse
from raykv.config.tiers import parse_tiers
from raykv.connector import vllm_compat
from raykv.connector.sync_loads import sync_refusal
from raykv.errors import ConfigError
from raykv.messages import ChildIndex

logger = logging.getLogger("raykv")


def check_json(kv_transfer_config: Any) -> None:
    """What a KVTransferConfig of RayKV's says wrong whatever the model is. Raises ConfigError.

    vLLM makes connectors in other processes than the user's, after the model was loaded; this can be asked for before.
    """
    if kv_transfer_config.kv_connector == "TierConnector":
        # Of a MultiConnector's child vLLM asks with the options in it that are that one's business.
        extra = kv_transfer_config.kv_connector_extra_config
        parse_tiers({key: value for key, value in extra.items() if key != "raykv"})
    else:
        parsed(kv_transfer_config)


def parsed(kv_transfer_config: Any) -> tuple[MultiConfig, dict[ChildIndex, type]]:
    """The config and its children's classes."""
    config = parse(kv_transfer_config)
    for child in config.children:
        if child.is_tier:
            try:
                parse_tiers(child.extra)
            except ConfigError as error:
                raise ConfigError(f"Child {child.name} ({child.connector}): {error}") from error
    _check_pd(config)
    return config, {child.index: vllm_compat.connector_class(child) for child in config.children}


def checked_config(vllm_config: VllmConfig, kv_cache_config: Any) -> MultiConfig:
    """The parsed config, after every check that needs no Ray. Raises ConfigError."""
    vllm_compat.share_vllms_log()
    vllm_compat.check_version()
    config, classes = parsed(vllm_config.kv_transfer_config)
    check_chain(config, classes, vllm_config, kv_cache_config)
    if vllm_config.parallel_config.world_size > 1:
        for child in config.children:
            if known_synchronous(child):
                logger.warning(
                    "child %s (%s) puts no rank into its file names: %d workers overwrite each other's files.",
                    child.name,
                    child.connector,
                    vllm_config.parallel_config.world_size,
                )
    return config


def check_chain(
    config: MultiConfig, classes: Mapping[ChildIndex, type], vllm_config: VllmConfig, kv_cache_config: Any
) -> None:
    """Whether these children, of these classes, can be together in this engine. Raises ConfigError."""
    _agreed_layout(config.children, vllm_config)
    groups = len(kv_cache_config.kv_cache_groups)
    for child in config.children:
        if groups > 1 and not supports_hma(classes[child.index]):
            raise ConfigError(
                f"Child {child.name} ({child.connector}) does not support vLLM's hybrid KV cache manager, and this "
                f"model has {groups} KV cache groups. Start vLLM with --disable-hybrid-kv-cache-manager, or take the "
                "child out."
            )
        if known_synchronous(child) and child.options.load:
            refusal = sync_refusal(vllm_config, kv_cache_config, config, child)
            if refusal is not None:
                raise ConfigError(f'{refusal[0].upper()}{refusal[1:]}, or give the child "raykv": {{"load": false}}.')
    hosted_saver = any(c.options.run is RunMode.ACTOR and c.role != "kv_consumer" for c in config.children)
    if hosted_saver and vllm_compat.has_mamba(kv_cache_config) and vllm_config.speculative_config is not None:
        raise ConfigError(
            "Speculative decoding of a model with Mamba layers moves blocks that must have one owner, so RayKV can't "
            'pin them for a child in an actor. Give each child "raykv": {"run": "inline"}, or start vLLM without '
            "speculative decoding."
        )


def _check_pd(config: MultiConfig) -> None:
    found = [child for child in config.children if child.connector in vllm_compat.PD_CONNECTORS]
    if len(found) > 1:
        names = " and ".join(f"{child.name} ({child.connector})" for child in found)
        raise ConfigError(
            f"The children {names} each return `remote_engine_id` in kv_transfer_params, so the peer could not tell "
            "whose transfer to take. Keep one P/D connector per engine."
        )


def required_layout(vllm_config: VllmConfig) -> str | None:
    """The KV cache layout that the children agree on. Raises ConfigError when two want different ones."""
    return _agreed_layout(parse(vllm_config.kv_transfer_config).children, vllm_config)


def _agreed_layout(children: Iterable[ChildConfig], vllm_config: VllmConfig) -> str | None:
    wanted: dict[str, list[str]] = {}
    for child in children:
        cls: Any = vllm_compat.connector_class(child)
        layout = cls.get_required_kvcache_layout(vllm_compat.child_vllm_config(vllm_config, child))
        if layout is not None:
            wanted.setdefault(layout, []).append(f"{child.name} ({child.connector})")
    if len(wanted) > 1:
        text = ", ".join(f"{layout} for {' and '.join(names)}" for layout, names in wanted.items())
        raise ConfigError(
            f"The children require different KV cache layouts: {text}. The engine has one; run these children in "
            "engines of their own, or take one out."
        )
    return next(iter(wanted), None)


def any_inline_needs_piecewise(extra_config: Mapping[str, Any]) -> bool:
    """Whether an inline child works layer by layer inside the forward pass."""
    config = parse(
        {"kv_connector": "RayMultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": dict(extra_config)}
    )
    found = False
    for child in config.children:
        cls: Any = vllm_compat.connector_class(child)
        if child.options.run is RunMode.INLINE and cls.requires_piecewise_for_cudagraph(dict(child.extra)):
            found = True
    return found


def child_classes(kv_transfer_config: Any) -> dict[str, type]:
    """By child name: its connector class."""
    return {str(c.name): vllm_compat.connector_class(c) for c in parse(kv_transfer_config).children}
