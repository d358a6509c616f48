"""Pins on vLLM's block pool: what `core.pins` decides, done.

vLLM names blocks by id in what it schedules; the pool has the objects. Takes and gives back references in the
call that decides so, in EngineCore's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from raykv.connector import vllm_compat
from raykv.core.pins import Fence, PinTable
from raykv.messages import ChildIndex
from raykv.types import RequestId


class BlockPins:
    """The pins of one engine."""

    def __init__(self, windowed_groups: frozenset[int]) -> None:
        """`windowed_groups`: KV groups whose requests give blocks back while they run."""
        self._table = PinTable()
        self._windowed = windowed_groups
        self._pool: Any = None

    def bind(self, block_pool: Any) -> None:
        self._pool = block_pool

    # -- taking ---------------------------------------------------------------------------------------------

    def grow(self, output: Any, fence: Callable[[], Fence]) -> None:
        """Pin what a step gives to its requests. A request that starts again has lost its older blocks."""
        for new in output.scheduled_new_reqs:
            self._start(RequestId(new.req_id), new.block_ids, fence)
        cached = output.scheduled_cached_reqs
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is None:
                continue
            request = RequestId(req_id)
            if req_id in cached.resumed_req_ids:
                self._start(request, block_ids, fence)
            elif self._table.is_open(request):
                self._add_groups(request, block_ids)

    def _start(self, request: RequestId, block_ids: Sequence[Sequence[int]], fence: Callable[[], Fence]) -> None:
        if self._table.is_open(request):
            self._table.close(request, fence())
        self._add_groups(request, block_ids)

    def hold(self, request: RequestId, block_ids: Sequence[Sequence[int]]) -> None:
        """Pin an ending request's blocks, unless they are pinned from its steps."""
        if not self._table.is_open(request):
            self._add_groups(request, block_ids)

    def _add_groups(self, request: RequestId, block_ids: Sequence[Sequence[int]]) -> None:
        for group, ids in enumerate(block_ids):
            self.add(request, group, ids)

    def add(self, request: RequestId, group: int, block_ids: Sequence[int]) -> None:
        """Pin these blocks of the request, which holds them now."""
        self._pool.touch(self._table.grow(request, group, vllm_compat.pool_blocks(self._pool, block_ids)))

    # -- giving back ----------------------------------------------------------------------------------------

    def step_planned(self, output: Any, requests: Mapping[RequestId, Any], fence: Callable[[], Fence]) -> None:
        """Requests that vLLM preempted in this step no longer hold their blocks, and blocks behind a sliding window
        that only pins still hold are on their way out. `requests`: those that live."""
        # One that runs in this step was not preempted in it, so there is nothing to look at for most.
        for request_id in self._table.open_but(output.num_scheduled_tokens):
            request = requests.get(request_id)
            if request is not None and vllm_compat.is_status(request, "PREEMPTED"):
                self._table.close(request_id, fence())
        if self._windowed:
            now = fence()
            for request_id in output.num_scheduled_tokens:
                for group in self._windowed:
                    self._table.trim(RequestId(request_id), group, now)

    def close(self, request: RequestId, fence: Fence, sends: Iterable[ChildIndex]) -> None:
        """The request has ended; `sends` are the children that still read its blocks."""
        self._table.close(request, fence, sends)

    def send_settled(self, request: RequestId, child: ChildIndex) -> None:
        self._table.send_settled(request, child)

    def release(self, completed: Fence) -> None:
        """Give back what every host is done with."""
        freed = self._table.release(completed)
        if freed:
            self._pool.free_blocks(freed)

    # -- questions ------------------------------------------------------------------------------------------

    @property
    def any_closing(self) -> bool:
        return self._table.any_closing

    def waits_for(self, child: ChildIndex) -> bool:
        return self._table.waits_for(child)

    def frees_soon(self) -> bool:
        return self._table.frees_soon()

    def pinned(self) -> Counter[int]:
        """By block id: how many references are RayKV's."""
        return self._table.pinned()

    def check_integrity(self) -> None:
        self._table.check_integrity()
