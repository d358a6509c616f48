"""Waking an engine that is idle: it waits for a client's message, and steps only when one has come.

Read from `EngineCoreProc` (vllm/v1/engine/core.py, 0.32): without work its loop blocks on `input_queue.get()`, and
looks at `has_requests`, and so at the connector's `has_pending_push_work`, after each message. `WAKEUP` is its own
message for just that. Nobody hands that queue to a connector, so it is found once, when the scheduler binds it: that
call comes from inside the engine's constructor.
"""

from __future__ import annotations

import logging
import queue
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

logger = logging.getLogger("raykv")


def find_waker() -> Callable[[], None] | None:
    """Call it below the constructor of vLLM's EngineCore. What it returns has the engine look for work: any thread,
    does not wait. None where an engine has no loop of its own (an LLM in its user's process, tests): there whoever
    steps the engine is waited for.
    """
    core: Any = sys.modules.get("vllm.v1.engine.core")
    kind, request_type = getattr(core, "EngineCoreProc", None), getattr(core, "EngineCoreRequestType", None)
    wakeup = getattr(request_type, "WAKEUP", None)
    if kind is None:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        engine = frame.f_locals.get("self")
        if isinstance(engine, kind):
            inbox = getattr(engine, "input_queue", None)
            if wakeup is None or not isinstance(inbox, queue.Queue):
                logger.warning("this vLLM can't be woken by RayKV: changes of an idle engine wait for its next request")
                return None
            return lambda: inbox.put_nowait((wakeup, None))
        frame = frame.f_back
    return None
