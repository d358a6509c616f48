"""What an operator wants to add to a running engine's chain, checked as at the engine's start, before anything changes.

Beyond that come the facts that are fixed when an engine has started: how its KV cache is laid out, whether its forward
pass stops between layers, and what vLLM asked its connector once.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from raykv.config import ChildConfig, RunMode
from raykv.config.reader import show
from raykv.config.tiers import parse_tiers
from raykv.connector import start_checks, start_up, vllm_compat
from raykv.connector.scheduler_child import SchedulerChild
from raykv.engine_messages import ChainOrder
from raykv.errors import ConfigError
from raykv.messages import ChildIndex

EXAMPLE = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'


class ChainDoor:
    """One engine's. Any thread, one call at a time; the first look at a class imports it, which takes a while."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, delivers: bool) -> None:
        """`delivers`: what vLLM was told at the start, whether a child hands KV over that must arrive
        (`requires_kv_delivery`)."""
        self._vllm_config, self._kv_cache_config, self._delivers = vllm_config, kv_cache_config, delivers
        transfer = vllm_config.kv_transfer_config
        self._layout = start_checks.required_layout(vllm_config)
        self._piecewise = start_checks.any_inline_needs_piecewise(transfer.kv_connector_extra_config)

    def check(
        self, order: ChainOrder, chain: Sequence[SchedulerChild], index: ChildIndex
    ) -> tuple[ChildConfig, dict[str, Any]]:
        """The child that the order adds to this chain, with its JSON. Raises ConfigError."""
        raw = _raw(order)
        transfer = copy.copy(self._vllm_config.kv_transfer_config)
        others = [dict(child.raw) for child in chain]
        transfer.kv_connector_extra_config = {**transfer.kv_connector_extra_config, "connectors": [*others, raw]}
        try:
            config, classes = start_checks.parsed(transfer)
            start_checks.check_chain(config, classes, self._vllm_config, self._kv_cache_config)
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"connectors[{len(others)}]", "the new child")) from error
        child = config.children[-1]
        self._check_engine(child, classes[child.index])
        _check_stores(child, config.children[:-1])
        return replace(child, index=index), start_up.with_name(raw, str(child.name))

    def _check_engine(self, child: ChildConfig, cls: Any) -> None:
        """What the engine can't change any more."""
        start, config = "Start an engine with the child in its config.", self._vllm_config
        what = f"Child {child.name} ({child.connector})"
        layout = cls.get_required_kvcache_layout(vllm_compat.child_vllm_config(config, child))
        if layout is not None and self._layout is not None and layout != self._layout:
            raise ConfigError(
                f"{what} requires the KV cache layout {layout}, and this engine has {self._layout}. {start}"
            )
        by_layer = child.options.run is RunMode.INLINE and cls.requires_piecewise_for_cudagraph(dict(child.extra))
        if by_layer and not self._piecewise and not config.model_config.enforce_eager:
            raise ConfigError(
                f"{what} works between the layers of the forward pass, which this engine has compiled as a whole. "
                f"{start}"
            )
        if child.role != "kv_consumer" and not child.is_tier and not self._delivers:
            raise ConfigError(
                f'{what} has kv_role "{child.role}", and this engine was started with children that hand nothing over, '
                f'so vLLM would let preempted requests end as if they could. Give it "kv_role": "kv_consumer". {start}'
            )
        top = config.kv_transfer_config
        if child.role != "kv_producer" and not top.is_kv_consumer and config.max_concurrent_batches > 1:
            raise ConfigError(
                f'{what} loads, with kv_role "{child.role}", and this engine was started as a "{top.kv_role}" with '
                f"overlapping steps, where vLLM does not keep blocks back for loads. {start}"
            )


def _raw(order: ChainOrder) -> dict[str, Any]:
    try:
        raw = json.loads(order.config)
    except ValueError as error:
        raise ConfigError(f"The child's config is no JSON ({error}). It is an object such as {EXAMPLE}.") from error
    if not isinstance(raw, Mapping):
        raise ConfigError(f"The child's config is {show(raw)}. It must be an object such as {EXAMPLE}.")
    name = _own_name(raw)
    if order.child and name is not None and name != order.child:
        raise ConfigError(
            f"The order is about a child {show(order.child)}, and the config's raykv.name is {show(name)}. Give one "
            "name."
        )
    has_place = isinstance(raw.get("kv_connector_extra_config") or {}, Mapping)
    return start_up.with_name(raw, order.child) if order.child and name is None and has_place else dict(raw)


def _own_name(raw: Mapping[str, Any]) -> object:
    extra = raw.get("kv_connector_extra_config")
    own = extra.get("raykv") if isinstance(extra, Mapping) else None
    return own.get("name") if isinstance(own, Mapping) else None


def _check_stores(child: ChildConfig, others: Sequence[ChildConfig]) -> None:
    if not child.is_tier:
        return
    store = parse_tiers(child.extra).store.name
    for other in others:
        if other.is_tier and parse_tiers(other.extra).store.name == store:
            raise ConfigError(
                f"Child {other.name} uses the store {show(store)} of this node already. Give the new child another "
                "store (`store` in its kv_connector_extra_config), or remove the other one first."
            )
