"""Synchronous loads: where they can't be made safe, and what keeps a failed one out of vLLM's prefix cache.

vLLM 0.32 puts the hashes of the blocks that a synchronous load is to fill into its prefix cache when it plans the
step, and with the policy `recompute` leaves them there when the load fails, since the request computes the blocks
again. If the request is aborted before it does, the next request with that prefix reads garbage. And a request of
the very same step may already share the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from raykv.config import ChildConfig, MultiConfig, RunMode
from raykv.types import RequestId

if TYPE_CHECKING:
    from vllm.v1.request import Request


class UnprovenBlocks:
    """The blocks that are filled in a step with synchronous loads: by a load, or by the forward pass behind it.

    Only engines whose steps don't overlap have such loads, so a step's outcome is known before the next is planned.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pool: Any = None
        self._planned: dict[RequestId, frozenset[int]] = {}
        self._running: dict[RequestId, frozenset[int]] = {}

    def bind(self, block_pool: Any) -> None:
        self._pool = block_pool

    def add(self, request: RequestId, block_ids: Iterable[int]) -> None:
        """A load was planned; `block_ids`: the blocks of its request from the first loaded one on."""
        self._planned[request] = frozenset(block_ids)

    def shared_by(self, request: Request, computed: int) -> bool:
        """Whether the request's local hit has blocks that a load of this very step is to fill: then it must wait."""
        if not self._planned:
            return False
        unproven = frozenset().union(*self._planned.values())
        for block_hash in request.block_hashes[: computed // self._block_size]:
            found = self._pool.get_cached_block(block_hash, [0])
            if found and found[0].block_id in unproven:
                return True
        return False

    def step_planned(self) -> None:
        self._running, self._planned = self._planned, {}

    def failed(self, requests: Iterable[RequestId]) -> None:
        """The loads of these requests failed in the step that ran: nobody may find what it left."""
        for request in requests:
            self._pool.evict_blocks(set(self._running.pop(request, ())))


def why_no_sync_loads(vllm_config: Any, kv_cache_config: Any, config: MultiConfig, child: ChildConfig) -> str | None:
    """Why a synchronous load of this child could not fail safely on this engine, if so."""
    if len(kv_cache_config.kv_cache_groups) > 1:
        return (
            "the model has several KV cache groups, where vLLM can't take a failed synchronous load "
            "(use a child that loads asynchronously)"
        )
    if vllm_config.scheduler_config.async_scheduling:
        return (
            "asynchronous scheduling overlaps steps, and the step after a failed synchronous load would go on with "
            "garbage (start vLLM with --no-async-scheduling)"
        )
    if vllm_config.max_concurrent_batches > 1:
        return (
            "pipeline parallelism overlaps steps, and the step after a failed synchronous load would go on with "
            "garbage (use tensor parallelism)"
        )
    if vllm_config.parallel_config.world_size > 1:
        for other in config.children:
            # A TierConnector commits a step's save only when no rank has dropped it.
            at_once = other.options.run is RunMode.INLINE and other.saves and not other.is_tier
            if at_once and other.index != child.index:
                return (
                    f"child {other.name} saves inside vLLM's workers, where a rank saves before it can know that the "
                    f"load failed on another one (run {other.name} in an actor)"
                )
    return None


def sync_refusal(vllm_config: Any, kv_cache_config: Any, config: MultiConfig, child: ChildConfig) -> str | None:
    """The start-up error for a child known to load synchronously where that can't be made safe."""
    why = why_no_sync_loads(vllm_config, kv_cache_config, config, child)
    return f"child {child.name} ({child.connector}) loads synchronously, but {why}" if why else None
