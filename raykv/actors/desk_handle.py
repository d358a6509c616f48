"""An engine's desk as a Ray actor: started or found by name, called, listed. Part of RayKV's edge to Ray.

The actor is not detached: it ends with the process that made it, and with the last handle there. Ray does not restart
it; its engine starts another one, which it then tells all it knows.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import ray

from raykv.actors import cluster, named_actor, ray_calls
from raykv.actors.engine_desk import EngineDesk
from raykv.actors.host_base import OWNER_VARIABLE
from raykv.actors.named_actor import NamedActor
from raykv.actors.processes import start_time
from raykv.errors import ClusterError, HostDied
from raykv.types import EngineId

PREFIX = "raykv-desk-"
GROUPS = {"engine": 2, "ask": 16, "watch": 16, ray_calls.CONTROL_GROUP: 4}
"""Threads by concurrency group: whoever waits at the desk keeps nobody else from it, least of all its engine."""
GROUP_OF = {"fetch": "engine", "push": "engine", "hash": "ask", "story": "ask", "watch": "watch"}
OPEN_S = 60.0


class DeskHandle(NamedActor):
    """A desk, by its name."""

    def __init__(self, name: str, actor: Any) -> None:
        super().__init__(name, actor, "EngineDesk", GROUP_OF)

    def end(self) -> None:
        """End it now; at the latest it ends with the process that made it. Waits for nothing."""
        with contextlib.suppress(Exception):
            if cluster.head_reachable():
                ray.kill(self._actor, no_restart=True)


def desk_name(engine: EngineId) -> str:
    """The name of the actor."""
    return f"{PREFIX}{engine}"


def open_desk(engine: EngineId, last_stories: int, *, namespace: str = "raykv", timeout: float = OPEN_S) -> DeskHandle:
    """Start this process's desk for its engine, or find it. Blocks until it answers (about 2 s).

    Raises ClusterError: no head, or another process has an engine of this id; or another RayKVError.
    """
    named_actor.check("An engine's desk", "found or started")
    name, own = desk_name(engine), (os.getpid(), start_time(os.getpid()) or 0)
    handle = _found(name, own, namespace, timeout) or _start(name, engine, last_stories, own, namespace)
    handle.checked(timeout)
    return handle


def _found(name: str, own: tuple[int, int], namespace: str, timeout: float) -> DeskHandle | None:
    """The desk that runs already, if it is this process's; None: none runs. (Ray may still name one that has died.)"""
    try:
        handle = DeskHandle(name, ray.get_actor(name, namespace))
        owner = handle.call("owner", timeout=timeout)
    except (ValueError, HostDied):
        return None
    if tuple(owner or ()) != own:
        raise ClusterError(
            f"The desk {name} is that of another process ({owner[0] if owner else 'unknown'}): an engine with the "
            "same engine_id runs in this cluster, or has just ended. Give each engine an engine_id of its own."
        )
    return handle


def _start(name: str, engine: EngineId, last_stories: int, own: tuple[int, int], namespace: str) -> DeskHandle:
    node = ray.get_runtime_context().get_node_id()
    remote = ray.remote(num_cpus=0, num_gpus=0, max_restarts=0, max_task_retries=0, concurrency_groups=GROUPS)
    try:
        actor = (
            remote(EngineDesk)
            .options(
                name=name,
                namespace=namespace,
                **named_actor.on_node(node),
                # Ray tells an actor of its owner's end, but not while the head is away.
                runtime_env={"env_vars": {OWNER_VARIABLE: f"{own[0]}:{own[1]}", "CUDA_VISIBLE_DEVICES": ""}},
            )
            .remote(engine, last_stories)
        )
    except Exception as error:
        raise ClusterError(f"The desk {name} could not be started: {type(error).__name__}: {error}") from error
    return DeskHandle(name, actor)


def desks(namespace: str = "raykv") -> list[str]:
    """The names of the desks of all engines in the cluster. Needs the head."""
    return [name for name in ray_calls.names(namespace) if name.startswith(PREFIX)]


def find_desk(name: str, namespace: str = "raykv") -> DeskHandle:
    """The desk whose actor has this name. Raises HostDied if there is none, ClusterError if there is no head to ask."""
    named_actor.check("An engine's desk", "found")
    actor = named_actor.find(name, namespace)
    if actor is None:
        raise HostDied(f"There is no desk {name} in this cluster: its engine has ended.")
    return DeskHandle(name, actor)
