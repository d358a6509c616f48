"""A MultiConnector that times its own hooks: vLLM's or RayKV's, as RAYKV_BENCH_BASE says (`vllm` or `raykv`).

Use it as `kv_connector_module_path`. Records stay in the memory of the process they were made in; the benchmark
takes them with `Engine.call_workers("benchmarks.timed:take")` and `Engine.call_core("benchmarks.timed:take")`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

if os.environ.get("RAYKV_BENCH_BASE") == "raykv":
    from raykv.connector import MultiConnector as Base
else:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector as Base

WORKER_HOOKS = (
    "bind_connector_metadata",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "finish_forward",
    "wait_for_save",
    "get_transfer_results",
    "get_finished",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
"""All that vLLM's worker calls in a step; the last one ends it."""

SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
    "has_pending_block_frees",
    "has_pending_push_work",
)
"""All that the scheduler calls; a step ends with `build_connector_meta`."""

ENDS_STEP = frozenset({"clear_connector_metadata", "build_connector_meta"})

_steps: list[dict[str, float]] = []
_current: Counter[str] = Counter()
_depth = 0


def take(_: Any) -> list[dict[str, float]]:
    """The steps since the last call: seconds by hook."""
    taken, _steps[:] = list(_steps), []
    return taken


def _timed(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    ends_step = name in ENDS_STEP

    @wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        global _depth, _current
        if _depth:  # called by another hook, which counts it
            return inner(*args, **kwargs)
        _depth += 1
        begun = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            _current[name] += time.perf_counter() - begun
            _depth -= 1
            if ends_step:
                _steps.append(_current)
                _current = Counter()

    return outer


def _hooks() -> dict[str, Any]:
    return {
        name: _timed(name, getattr(Base, name)) for name in (*WORKER_HOOKS, *SCHEDULER_HOOKS) if hasattr(Base, name)
    }


# vLLM treats the class name `MultiConnector` specially, so it must be this one.
MultiConnector = type("MultiConnector", (Base,), {"__module__": __name__, **_hooks()})
