"""What the tests look at inside an engine's own processes.

They run there, by name, through `Engine.call_core` and `Engine.call_workers`; arguments and results are JSON.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import time
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


def _store(name: str) -> Any:
    """The store of this node, as somebody who only looks at it."""
    import ray

    from raykv.actors import store_handle

    full = store_handle.store_name(name, ray.get_runtime_context().get_node_id())
    return store_handle.StoreHandle(full, ray.get_actor(full, "raykv"))


def store_status(_: Any, name: str) -> dict[str, Any]:
    status = dataclasses.asdict(_store(name).call("status", timeout=30))
    return json.loads(json.dumps(status))


def store_clear(_: Any, name: str, medium: str) -> int:
    from raykv.store_messages import Medium

    return _store(name).call("clear", Medium(medium), timeout=30)


def store_settle(_: Any, name: str, timeout_s: float = 30.0) -> None:
    """Until nothing is being written or moved; then the store's own books are checked."""
    deadline = time.monotonic() + timeout_s
    store, quiet, last = _store(name), 0, None
    while quiet < 3:
        status = store.call("status", timeout=30)
        figures = [(tier.used, tier.writing) for tier in status.tiers]
        quiet = quiet + 1 if figures == last and not any(tier.writing for tier in status.tiers) else 0
        last = figures
        if time.monotonic() > deadline:
            raise AssertionError(f"the store does not come to rest: {status}")
        time.sleep(0.1)
    store.call("check_integrity", timeout=30)


def check_connector(core: Any) -> dict[str, Any]:
    """Of a MultiConnector that nothing is asked of: its chain; it owes nothing and waits for nothing."""
    half = core.scheduler.connector._scheduler
    half.check_integrity()
    assert not half.chain.busy, f"orders are open: {half.chain.states()}"
    assert half.quiet, "something is owed or pinned"
    return {"chain": [child.name for child in half.children]}
