"""The Directory as a Ray actor: found or started by name, called, ended. Part of RayKV's edge to Ray.

The actor is detached and restarted by Ray whenever it dies, on the head's node: without a head Ray restarts nothing
anyway. Calls are never retried by Ray: who publishes does that himself, and a look-up that is late is worth nothing.
"""

from __future__ import annotations

import contextlib
import signal
from functools import partial
from typing import Any

import ray

from raykv.actors import cluster, handles
from raykv.actors.directory_actor import Directory
from raykv.actors.directory_call import FindDirectory
from raykv.actors.host_base import HostInfo, compare_versions
from raykv.actors.processes import Pidfd
from raykv.actors.store_call import Done, reason
from raykv.errors import ClusterError, HostError, RayKVError

NAME = "raykv-directory"
GROUPS = {"locate": 1, "publish": 1, handles.CONTROL_GROUP: 2}
"""Threads by concurrency group. A look-up waits for look-ups only; more threads would share one interpreter's lock."""
GROUP_OF = {"locate": "locate", "publish": "publish"}
HEAD = "node:__internal_head__"
"""The resource that Ray gives the head's node, whichever that is: a head that comes back may be another node. Ray does
not keep to a node that an actor without resources asks for softly (seen in 2.60)."""
OPEN_S = 60.0
FIND_S = 5.0
SHUTDOWN_S = 10.0


class DirectoryHandle:
    """Implements `directory_call.DirectoryCaller` over Ray: a call goes to whatever life of the actor there is."""

    name = NAME
    label = "Directory"

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._methods: dict[str, Any] = {}  # kept, since Ray makes a new object each time

    def submit(self, method: str, *args: Any, done: Done) -> None:
        """About 0.1 to 0.4 ms; `done` runs in a thread of Ray's. Raises HostError if it can't be sent."""
        handles.on_done(self.name, self._sent(method, args), done)

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        """Raises HostTimeout, HostDied or HostRaised."""
        return handles.result_of(self.name, self._sent(method, args), timeout)

    def _sent(self, method: str, args: tuple[Any, ...]) -> Any:
        try:
            bound = self._methods.get(method)
            if bound is None:
                group = GROUP_OF.get(method, handles.CONTROL_GROUP)
                bound = self._methods[method] = getattr(self._actor, method).options(concurrency_group=group)
            return bound.remote(*args)
        except Exception as error:  # before it was sent, or after: the caller can't tell
            raise handles.translated(self.name, error) from error


def open_directory(namespace: str = "raykv", timeout: float = OPEN_S) -> DirectoryHandle:
    """Find the Directory, or start it. Blocks until it answers. Raises ClusterError with the fix."""
    check("found or started")
    try:
        actor = (
            ray.remote(num_cpus=0, num_gpus=0, max_restarts=-1, max_task_retries=0, concurrency_groups=GROUPS)(
                Directory
            )
            .options(
                name=NAME,
                namespace=namespace,
                lifetime="detached",
                get_if_exists=True,
                resources=place(),
            )
            .remote(nodes, own_process=True)
        )
        return _answering(actor, timeout)
    except RayKVError as error:
        raise ClusterError(f"The Directory of this cluster can't be used: {reason(error)}") from error
    except Exception as error:
        raise ClusterError(f"The Directory could not be started: {type(error).__name__}: {error}") from error


def find_directory(namespace: str = "raykv", timeout: float = FIND_S) -> DirectoryHandle | None:
    """The Directory that runs; None: there is none. Raises ClusterError, HostTimeout or another RayKVError."""
    check("found")
    try:
        actor = ray.get_actor(NAME, namespace)
    except ValueError:
        return None
    return _answering(actor, timeout)


def finder(namespace: str = "raykv", *, start: bool = False) -> FindDirectory:
    """`find_directory`, or with `start` `open_directory`, for a publisher or a locator. It can be pickled."""
    return partial(open_directory if start else find_directory, namespace)


def shutdown_directory(namespace: str = "raykv", timeout: float = SHUTDOWN_S) -> bool:
    """End the Directory for good; whether there was one. What it knew, stores tell the next one. Needs the head."""
    try:
        actor = ray.get_actor(NAME, namespace)
    except ValueError:
        return False
    end_for_good(actor, DirectoryHandle(actor), timeout)
    return True


def end_for_good(actor: Any, handle: Any, timeout: float, last: str = "") -> None:
    """End a named actor that Ray would start again, after a call of its method `last`. `handle`: how it is called."""
    process = None
    with contextlib.suppress(HostError):
        info = handle.call("info", timeout=timeout)
        if info["node_id"] == handles.runtime_ids()[0]:
            process = Pidfd.open(info["pid"], info["started"])
        if last:
            handle.call(last, timeout=timeout)
    ray.kill(actor, no_restart=True)
    if process is not None and not process.wait(1.0):
        process.signal(signal.SIGKILL)  # Ray's own kill is asked for, not enforced
        process.wait(timeout)


def nodes() -> list[dict[str, Any]]:
    """`cluster.nodes`, or ClusterError at once while the head is away."""
    if not cluster.head_reachable():
        raise ClusterError("Ray's head is away: `raykv restart-head`.")
    return cluster.nodes()


def check(what: str, whom: str = "The Directory") -> None:
    """Raise ClusterError unless Ray can be asked for an actor now."""
    if not ray.is_initialized():  # Ray would start a cluster by itself
        raise ClusterError(f"{whom} can't be {what}: this process is in no Ray cluster (cluster.connect).")
    if not cluster.head_reachable():  # Ray would wait for it for a minute
        raise ClusterError(f"{whom} can't be {what} while Ray's head is away: `raykv restart-head`.")


def place() -> dict[str, float]:
    """The head's node, or any where no node says that it is the head's."""
    known = any(node["alive"] and HEAD in node["resources"] for node in cluster.nodes())
    return {HEAD: 0.001} if known else {}


def _answering(actor: Any, timeout: float) -> DirectoryHandle:
    handle = DirectoryHandle(actor)
    compare_versions(NAME, HostInfo.from_wire(handle.call("info", timeout=timeout)))
    return handle
