"""What is asked of an engine's desk, typed."""

from __future__ import annotations

import time
from typing import cast

from raykv.api.asking import ask, ask_until
from raykv.api.errors import OperationError
from raykv.api.reach import Caller
from raykv.engine_messages import ChainOrder, EngineEvent, EngineView, Hashed, HashOrder, OrderState, Story
from raykv.errors import HostTimeout
from raykv.types import RequestId

POLL_S = 0.05
POLL_MAX_S = 0.5
STORY_S = 8.0
"""A desk waits 5 s for an engine that must be asked."""


class Desk:
    """One engine's. Every method blocks for `timeout` seconds at most; raises OperationError, HostTimeout, HostDied."""

    def __init__(self, caller: Caller) -> None:
        self.name = caller.name
        self._caller = caller

    def view(self, timeout: float) -> EngineView | None:
        """What the engine told last; None: nothing yet."""
        return cast("EngineView | None", ask(self._caller, "view", timeout=timeout))

    def story(self, request: str, timeout: float) -> Story | None:
        """Of one request, by vLLM's id or its client's; None: not known any more, or never. The desk itself waits for
        the engine a while. Raises OperationError if several fit."""
        return cast("Story | None", ask(self._caller, "story", RequestId(request), timeout=max(timeout, STORY_S)))

    def requests(self, timeout: float) -> tuple[str, ...]:
        """The requests of which it keeps the stories, oldest first."""
        return tuple(map(str, ask(self._caller, "requests", timeout=timeout)))

    def events(self, after: int, timeout: float) -> tuple[EngineEvent, ...]:
        """What has changed behind that event, without waiting for more."""
        return cast("tuple[EngineEvent, ...]", ask(self._caller, "watch", after, 0.0, timeout=timeout))

    def order(self, order: ChainOrder, timeout: float) -> OrderState:
        """Leave an order; a repeat is answered by the state of the first."""
        return cast(OrderState, ask_until(self._caller, "order", order, timeout=timeout))

    def hashes(self, order: HashOrder, timeout: float) -> bytes:
        """The prompt's block hashes in that engine. Raises OperationError with the engine's own reason."""
        deadline, pause = time.monotonic() + timeout, POLL_S
        while True:
            left = max(0.1, deadline - time.monotonic())
            hashed = cast("Hashed | None", ask_until(self._caller, "hash", order, timeout=left))
            if hashed is not None:
                break
            if time.monotonic() + pause > deadline:
                raise HostTimeout(f"{self.name}: the engine did not hash the prompt within {timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, POLL_MAX_S)
        if hashed.error:
            raise OperationError(hashed.error)
        return hashed.hashes
