"""What the tests look at inside an engine's own processes.

They run there, by name, through `Engine.call_core` and `Engine.call_workers`; arguments and results are JSON.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from typing import Any


def resolve(target: str) -> Callable[..., Any]:
    """The function that `package.module:name` means."""
    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(module), name)
    assert callable(found)
    return found


class WorkerProbe:
    """Mixed into vLLM's worker class by `worker_extension_cls`."""

    def raykv_call(self, target: str, arguments: str) -> str:
        return json.dumps(resolve(target)(self, *json.loads(arguments)))


def core_call(core: Any, target: str, arguments: str) -> str:
    """Becomes a method of vLLM's EngineCore, and with it one of its utility calls."""
    return json.dumps(resolve(target)(core, *json.loads(arguments)))


def pid(_: Any) -> int:
    return os.getpid()


def blocks(core: Any) -> dict[str, int]:
    """The block pool's own counts. A cached block that nobody references is free."""
    pool = core.scheduler.kv_cache_manager.block_pool
    return {"free": pool.get_num_free_blocks(), "total": pool.num_gpu_blocks}


def kv_groups(core: Any) -> list[dict[str, Any]]:
    """Per KV group: its kind, block size and layers."""
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    return [
        {
            "kind": type(g.kv_cache_spec).__name__,
            "block_size": g.kv_cache_spec.block_size,
            "layers": list(g.layer_names),
        }
        for g in groups
    ]


def requests(core: Any) -> dict[str, str]:
    """Requests the scheduler still knows, with their state."""
    return {name: request.status.name for name, request in core.scheduler.requests.items()}


def connector(core: Any) -> str:
    """The class that serves as the scheduler half."""
    half = core.scheduler.connector
    return f"{type(half).__module__}.{type(half).__qualname__}" if half is not None else ""
