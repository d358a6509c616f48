"""What a connector's worker half expects of its process, for a process that is not vLLM's worker.

Stand-ins have the right ranks and sizes, and nothing else: a host takes part in no collective, so one is a
clear error instead of a hang.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

from raykv.errors import HostedConnectorError


class GroupStandIn:
    """Answers for a vLLM process group (`GroupCoordinator`) by numbers only."""

    def __init__(self, name: str, rank_in_group: int, ranks: tuple[int, ...]) -> None:
        self.unique_name = name
        self.ranks = list(ranks)
        self.rank_in_group = rank_in_group
        self.world_size = len(ranks)
        self.rank = ranks[rank_in_group]
        self.local_rank = self.rank
        self.first_rank, self.last_rank = ranks[0], ranks[-1]
        self.is_first_rank = self.rank == self.first_rank
        self.is_last_rank = self.rank == self.last_rank

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise HostedConnectorError(
            f"The connector used `{attribute}` of vLLM's process group {self.unique_name}. A connector that "
            "runs in a RayKV host is in no process group, only ranks and sizes are known there. Give this "
            'child "raykv": {"run": "inline"} in its kv_connector_extra_config to run it in the worker.'
        )


def install_groups(groups: Mapping[str, tuple[int, tuple[int, ...]]]) -> None:
    """Put stand-ins where `vllm.distributed.parallel_state` looks for its groups."""
    from vllm.distributed import parallel_state

    for name, (rank_in_group, ranks) in groups.items():
        setattr(parallel_state, name, GroupStandIn(name.strip("_").lower(), rank_in_group, ranks))


class LayerStandIn:
    """An attention layer as far as connectors look at one: its KV cache and its backend."""

    def __init__(self, kv_cache: Any, backend: str | None) -> None:
        self.kv_cache = kv_cache
        self._backend = backend

    def get_attn_backend(self) -> Any:
        if self._backend is None:
            raise HostedConnectorError("the attention backend of this layer was not known in the worker")
        module, _, name = self._backend.partition(":")
        return getattr(importlib.import_module(module), name)


def attention_metadata(is_mla: bool) -> Any:
    """An object whose class is all that connectors ask of a layer's attention metadata."""
    if is_mla:
        from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata

        return object.__new__(MLACommonMetadata)
    return SimpleNamespace()


def forward_context(kv_caches: Mapping[str, Any], mla_layers: frozenset[str], forward: bool) -> SimpleNamespace:
    """A forward context of a step; without a forward pass it has no attention metadata, as in vLLM."""
    layers = {name: LayerStandIn(cache, None) for name, cache in kv_caches.items()}
    metadata = {name: attention_metadata(name in mla_layers) for name in kv_caches} if forward else None
    return SimpleNamespace(no_compile_layers=layers, attn_metadata=metadata, virtual_engine=0, slot_mapping=None)
