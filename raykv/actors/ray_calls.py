"""Calls to actors: their results, their errors in RayKV's words, and who may be called. Part of RayKV's edge to Ray."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

import ray

from raykv.errors import HostDied, HostError, HostRaised, HostTimeout

CONTROL_GROUP = "control"
"""The concurrency group of what must be answered while an actor works."""
GONE = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.ObjectLostError,
)
"""The call gets no result because a process is gone, or can't be reached for now."""


def result_of(label: str, ref: Any, timeout: float) -> Any:
    """The result of a call to the actor `label`. Raises HostTimeout, HostDied or HostRaised. Releases the GIL."""
    try:
        return ray.get(ref, timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        raise HostTimeout(f"{label} did not answer within {timeout:g} s") from None
    except Exception as error:
        raise translated(label, error) from error


def on_done(label: str, ref: Any, callback: Callable[[Any, HostError | None], None]) -> None:
    """Have `callback(result, error)` called once, in a thread of Ray's, when the call ends. It must be short."""

    def done(future: concurrent.futures.Future[Any]) -> None:
        error = future.exception()
        if error is None:
            callback(future.result(), None)
        else:
            callback(None, translated(label, error))

    ref.future().add_done_callback(done)


def translated(label: str, error: BaseException) -> HostError:
    """What a call to the actor `label` has raised, in RayKV's words."""
    if isinstance(error, GONE):
        return HostDied(f"{label} is gone: {last_line(error)}")
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause if error.cause is not None else error
        return HostRaised(label, type(cause).__name__, str(cause), str(error))
    return HostRaised(label, type(error).__name__, str(error), "")


def names(namespace: str = "raykv") -> list[str]:
    """The names of all living actors of RayKV's in the cluster. Needs the head."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in actors if actor["namespace"] == namespace)


def runtime_ids() -> tuple[str, str]:
    """This process's node id and actor id; each empty where there is none."""
    if not ray.is_initialized():
        return "", ""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_actor_id() or ""


def last_line(error: BaseException) -> str:
    """Of what an error says, where Ray puts the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
