"""Waiting for what another thread, process or node does in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 90.0
"""What takes longer never comes, also on a machine that others use."""

MAX_PAUSE_S = 0.05

Found = TypeVar("Found")


def eventually(true: Callable[[], Found], why: str = "", patience_s: float = PATIENCE_S) -> Found:
    """What `true` gives, as soon as it gives something; AssertionError with `why` when the patience is at an end.

    It asks often at first, so that what is quick is seen at once, and seldom at last.
    """
    deadline, pause_s = time.monotonic() + patience_s, 0.001
    while not (found := true()):
        assert time.monotonic() < deadline, f"waited {patience_s:g} s in vain{why and f': {why}'}"
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, MAX_PAUSE_S)
    return found
