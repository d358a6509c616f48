"""Promises of asynchronous loads that vLLM can never take, and how they are withdrawn.

vLLM 0.32 admits an asynchronous load only if the blocks that all requests in their prefill still need stay free.
A request whose load has failed counts among these although it holds no block and waits itself, so that after some
failures at once the rest may not fit: nothing runs, nothing is freed, and vLLM asks for the same loads for ever.
Computing the request needs no such reserve. So a load that was promised, and not taken in two steps in a row in
which nothing ran and nothing was on its way, is promised no more.
"""

from __future__ import annotations

from raykv.types import RequestId


class StallWatch:
    """One engine's promises that wait for blocks. One thread: the scheduler's."""

    def __init__(self) -> None:
        self._promised: set[RequestId] = set()
        self._withdrawn: set[RequestId] = set()
        self._stalled = False

    def promised(self, request: RequestId) -> None:
        """In this step vLLM was told of an asynchronous hit."""
        self._promised.add(request)

    def taken(self, request: RequestId) -> None:
        """Blocks were allocated for the request, or it has ended."""
        self._promised.discard(request)
        self._withdrawn.discard(request)

    def is_withdrawn(self, request: RequestId) -> bool:
        return request in self._withdrawn

    def step_planned(self, idle: bool) -> None:
        """`idle`: the step runs no request, and no load and no pin is under way that could free a block."""
        if idle and self._stalled:
            self._withdrawn |= self._promised
        self._stalled = idle and bool(self._promised)
        self._promised = set()
