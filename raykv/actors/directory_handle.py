"""The Directory as a Ray actor: found or started by name, called, ended. Part of RayKV's edge to Ray.

The actor is detached and restarted by Ray whenever it dies, on the head's node: without a head Ray restarts nothing
anyway. Calls are never retried by Ray: who publishes does that himself, and a look-up that is late is worth nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from raykv.actors import cluster, named_actor, ray_calls
from raykv.actors.directory_actor import Directory
from raykv.actors.directory_call import FindDirectory
from raykv.actors.named_actor import NamedActor
from raykv.actors.store_call import reason
from raykv.errors import ClusterError, RayKVError

NAME = "raykv-directory"
GROUPS = {"locate": 1, "publish": 1, ray_calls.CONTROL_GROUP: 2}
"""Threads by concurrency group. A look-up waits for look-ups only; more threads would share one interpreter's lock."""
GROUP_OF = {"locate": "locate", "publish": "publish"}
OPEN_S = 60.0
FIND_S = 5.0
SHUTDOWN_S = 10.0


class DirectoryHandle(NamedActor):
    """Implements `directory_call.DirectoryCaller` over Ray: a call goes to whatever life of the actor there is."""

    def __init__(self, actor: Any) -> None:
        super().__init__(NAME, actor, "Directory", GROUP_OF)


def open_directory(namespace: str = "raykv", timeout: float = OPEN_S) -> DirectoryHandle:
    """Find the Directory, or start it. Blocks until it answers. Raises ClusterError with the fix."""
    named_actor.check("The Directory", "found or started")
    try:
        started = named_actor.start(Directory, NAME, namespace, GROUPS, resources=named_actor.on_head())
        return _answering(started.remote(nodes, own_process=True), timeout)
    except RayKVError as error:
        raise ClusterError(f"The Directory of this cluster can't be used: {reason(error)}") from error
    except Exception as error:
        raise ClusterError(f"The Directory could not be started: {type(error).__name__}: {error}") from error


def find_directory(namespace: str = "raykv", timeout: float = FIND_S) -> DirectoryHandle | None:
    """The Directory that runs; None: there is none. Raises ClusterError, HostTimeout or another RayKVError."""
    named_actor.check("The Directory", "found")
    actor = named_actor.find(NAME, namespace)
    return _answering(actor, timeout) if actor is not None else None


def finder(namespace: str = "raykv", *, start: bool = False) -> FindDirectory:
    """`find_directory`, or with `start` `open_directory`, for a publisher or a locator. It can be pickled."""
    return partial(open_directory if start else find_directory, namespace)


def shutdown_directory(namespace: str = "raykv", timeout: float = SHUTDOWN_S) -> bool:
    """End the Directory for good; whether there was one. What it knew, stores tell the next one. Needs the head."""
    actor = named_actor.find(NAME, namespace)
    if actor is not None:
        DirectoryHandle(actor).end_for_good(timeout)
    return actor is not None


def nodes() -> list[dict[str, Any]]:
    """`cluster.nodes`, or ClusterError at once while the head is away."""
    if not cluster.head_reachable():
        raise ClusterError("Ray's head is away: `raykv restart-head`.")
    return cluster.nodes()


def _answering(actor: Any, timeout: float) -> DirectoryHandle:
    handle = DirectoryHandle(actor)
    handle.checked(timeout)
    return handle
