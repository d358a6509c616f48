"""An actor that has a name: found, started to outlive who starts it, called, ended. One way for all handles.

Part of RayKV's edge to Ray, above `ray_calls`. Ray's own calls wait for a head that is away for a minute, and start a
cluster of their own where there is none: so `check` comes before them.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv.actors import cluster, ray_calls
from raykv.actors.host_base import HostInfo, compare_versions
from raykv.actors.processes import Pidfd
from raykv.actors.store_call import Done
from raykv.errors import ClusterError, HostError, RayKVError

HEAD = "node:__internal_head__"
"""The resource that Ray gives the head's node, whichever that is: a head that comes back may be another node. Ray does
not keep to a node that an actor without resources asks for softly (seen in 2.60)."""
NAME_POLL_S = 0.05


class NamedActor:
    """Any thread. `groups`: the concurrency group of each method; others are of the control group."""

    def __init__(self, name: str, actor: Any, label: str, groups: Mapping[str, str]) -> None:
        """`label`: the class's name, for Ray's timeline."""
        self.name = name
        self._actor, self._label, self._groups = actor, label, groups
        self._methods: dict[str, Any] = {}  # kept, since Ray makes a new object each time

    def submit(self, method: str, *args: Any, done: Done) -> None:
        """About 0.1 to 0.4 ms; `done` runs in a thread of Ray's. Raises HostError if it can't be sent."""
        ray_calls.on_done(self.name, self._sent(method, args), done)

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        """Blocks for `timeout` seconds at most. Raises HostTimeout, HostDied or HostRaised."""
        return ray_calls.result_of(self.name, self._sent(method, args), timeout)

    def checked(self, timeout: float) -> dict[str, Any]:
        """Its `info`, once it answers. Raises VersionMismatchError, or what `call` raises."""
        info: dict[str, Any] = self.call("info", timeout=timeout)
        compare_versions(self.name, HostInfo.from_wire(info))
        return info

    def end_for_good(self, timeout: float, *last: Any, here: bool = False) -> None:
        """End an actor that Ray would start again, after a call of its method `last` (with arguments).

        `here`: its process is of this machine, whatever its node; else it is looked for only if it is of this
        process's node. Blocks for about three times `timeout` seconds at most. Needs the head.
        """
        deadline = time.monotonic() + timeout
        process = None
        with contextlib.suppress(HostError):  # whatever it says, it is killed
            info = self.call("info", timeout=timeout)
            if here or info["node_id"] == ray_calls.runtime_ids()[0]:
                process = Pidfd.open(info["pid"], info["started"])
            if last:
                self.call(*last, timeout=max(0.1, deadline - time.monotonic()))
        ray.kill(self._actor, no_restart=True)
        if process is not None and not process.wait(1.0):
            process.signal(signal.SIGKILL)  # Ray's own kill is asked for, not enforced
            process.wait(timeout)

    def _sent(self, method: str, args: tuple[Any, ...]) -> Any:
        try:
            bound = self._methods.get(method)
            if bound is None:
                group = self._groups.get(method, ray_calls.CONTROL_GROUP)
                options = {"concurrency_group": group, "name": f"{self._label}.{method}"}
                bound = self._methods[method] = getattr(self._actor, method).options(**options)
            return bound.remote(*args)
        except Exception as error:  # before it was sent, or after: the caller can't tell
            raise ray_calls.translated(self.name, error) from error


def check(whom: str, what: str, error: type[RayKVError] = ClusterError) -> None:
    """Raise `error` unless Ray can be asked for an actor now. `whom` can't be `what` then, for people."""
    if not ray.is_initialized():  # Ray would start a cluster by itself
        raise error(f"{whom} can't be {what}: this process is in no Ray cluster (cluster.connect).")
    if not cluster.head_reachable():  # Ray would wait for it for a minute
        raise error(f"{whom} can't be {what} while Ray's head is away: `raykv restart-head`.")


def find(name: str, namespace: str) -> Any:
    """Ray's handle of the actor that has this name; None: there is none. After `check`: it needs the head."""
    try:
        return ray.get_actor(name, namespace)
    except ValueError:
        return None


def start(actor_class: type, name: str, namespace: str, groups: Mapping[str, int], **place: Any) -> Any:
    """What makes a detached actor that Ray restarts, or finds the one that has this name: call `remote` of it.

    `groups`: threads by concurrency group. `place`: Ray's options that say where. Ray retries no call.
    """
    remote = ray.remote(num_cpus=0, num_gpus=0, max_restarts=-1, max_task_retries=0, concurrency_groups=dict(groups))
    return remote(actor_class).options(name=name, namespace=namespace, lifetime="detached", get_if_exists=True, **place)


def on_head() -> dict[str, float]:
    """The resources that ask for the head's node, or for any where no node says that it is the head's."""
    known = any(node["alive"] and HEAD in node["resources"] for node in cluster.nodes())
    return {HEAD: 0.001} if known else {}


def on_node(node: str) -> dict[str, Any]:
    """Ray's option for what runs on this node (its id) or nowhere."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def kill(actor: Any, name: str, namespace: str, timeout: float) -> bool:
    """Have Ray kill an actor for good; whether its name is free within `timeout` seconds, for which this blocks."""
    with contextlib.suppress(Exception):
        ray.kill(actor, no_restart=True)
    deadline = time.monotonic() + timeout
    while name in ray_calls.names(namespace):
        if time.monotonic() > deadline:
            return False
        time.sleep(NAME_POLL_S)
    return True
