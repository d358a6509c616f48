"""Facts about single connector classes: where they come from, and what each leaves undone, unsaid or half done."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from raykv.config import ChildConfig, unknown_connector
from raykv.errors import UnknownConnectorError

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


def own_hooks(connector: Any) -> frozenset[str]:
    """Those of `EMPTY_HOOKS` in which the connector is not the base class's."""
    if connector is None:
        return frozenset()
    return frozenset(
        name
        for name in EMPTY_HOOKS
        if getattr(getattr(connector, name, None), "__func__", None) is not getattr(KVConnectorBase_V1, name)
    )


def idle_rule(child: ChildConfig) -> IdleRule | None:
    """When a step asks nothing of this child's worker half; None: that can't be told."""
    return IDLE_WHEN_EMPTY.get(child.connector) if child.module_path is None else None


def said_by_default(meta: Any) -> dict[str, Any]:
    """The attributes of a default-made metadata object of this one's class."""
    return dict(vars(type(meta)()))


def loads_any_range(child: ChildConfig) -> bool:
    """Whether a child's class loads exactly the tokens that it is told, from any whole block of its hit to any other.

    RayKV's own does. A user's class may say so itself by `raykv_loads_any_range = True`: it then starts at the number
    of computed tokens that it was asked with last, and stops after the tokens that `update_state_after_alloc` gives.
    """
    if child.is_tier:
        return True
    return bool(getattr(connector_class(child), "raykv_loads_any_range", False))


def settles_in_hook(child: ChildConfig) -> bool:
    """Whether an exception in a data hook of this child leaves nothing running behind it."""
    return child.connector in LOADS_IN_THE_HOOK and child.module_path is None


def pulled_by_peers(child: ChildConfig) -> bool:
    """Whether the child's sends end by another engine's read."""
    return child.connector in PULLED_BY_PEERS and child.module_path is None


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


def copy_kv_blocks() -> Any:
    """The copy operation that vLLM's model runner gives to connectors with a host buffer (0.32)."""
    from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks

    return copy_kv_blocks
