"""Calls to actors, bounded in time, in parallel where there are several, and their errors in plain words."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raykv.api.errors import OperationError
from raykv.api.reach import Caller
from raykv.errors import HostDied, HostRaised, RayKVError

PAUSE_S = 0.3
MAX_THREADS = 32
REFUSALS = frozenset({"StoreError", "OperationError", "ConfigError", "ChildStartError", "NotFoundError", "RayKVError"})
"""What an actor raises on purpose: its message is a sentence for people, and stands alone."""


def ask(caller: Caller, method: str, *args: Any, timeout: float) -> Any:
    """One call. Raises OperationError with what the actor itself said, or HostTimeout or HostDied."""
    try:
        return caller.call(method, *args, timeout=timeout)
    except HostRaised as error:
        if error.type_name in REFUSALS:
            raise OperationError(error.message) from error
        raise


def ask_until(caller: Caller, method: str, *args: Any, timeout: float) -> Any:
    """The same, again and again while the actor is gone: Ray restarts it. Only for what may be done twice."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return ask(caller, method, *args, timeout=max(0.1, deadline - time.monotonic()))
        except HostDied:
            if time.monotonic() + PAUSE_S > deadline:
                raise
            time.sleep(PAUSE_S)


def at_all(work: Callable[[str], Any], names: Mapping[str, Any] | list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """`work(name)` for each, all at once: the results, and the errors in words, by name."""
    results: dict[str, Any] = {}
    errors: dict[str, str] = {}

    def one(name: str) -> None:
        try:
            results[name] = work(name)
        except RayKVError as error:
            errors[name] = why(error)

    ordered = list(names)
    if len(ordered) == 1:
        one(ordered[0])
    elif ordered:
        with ThreadPoolExecutor(min(MAX_THREADS, len(ordered))) as pool:
            list(pool.map(one, ordered))
    return {name: results[name] for name in ordered if name in results}, errors


def why(error: RayKVError) -> str:
    """For people: what the actor said, without what Ray puts around it."""
    return error.message if isinstance(error, HostRaised) else str(error)
