"""The Controller as a Ray actor: started or found by name, called, ended. Part of RayKV's edge to Ray.

The actor is detached, restarted by Ray whenever it dies, and on the head's node; what it needs lies in the GCS.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import ray

from raykv.actors import cluster, controller, handles, ray_metrics
from raykv.actors.controller_world import Record
from raykv.actors.host_base import HostInfo, be_as_nice_as_others, compare_versions
from raykv.actors.nodes import PREFIX, RayWorld
from raykv.cluster_messages import CONTROLLER, ClusterStatus
from raykv.errors import ClusterError, ConfigError, HostError, HostRaised, RayKVError
from raykv.observe.samples import Sample
from raykv.observe.store import controller_samples

HEAD = "node:__internal_head__"
"""The resource that Ray gives the head's node."""
CHANGE = "change"
GROUPS = {handles.CONTROL_GROUP: 2, CHANGE: 2}
CHANGES = frozenset({"apply", "down", "drain", "undrain"})
"""They ask every node, which takes seconds: the router's question must not wait for them."""
START_S = 60.0
CHANGE_S = 120.0
STATUS_S = 10.0


class Controller(controller.Controller):
    """Its class over Ray, by the name that people read there."""

    def __init__(self, namespace: str) -> None:
        be_as_nice_as_others()
        super().__init__(RayWorld(namespace))
        self._reporter = ray_metrics.start("controller", self._samples)

    def _samples(self) -> Iterator[Sample]:
        ray_metrics.put_dashboard()  # each time: a dashboard of Ray's that starts anew clears its folder
        return controller_samples(self.status())

    def close(self) -> None:
        self._reporter.close()
        super().close()


class ControllerHandle:
    """The Controller, whatever its life. Raises ClusterError for what can't be done, ConfigError for a spec."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def apply(self, raw: str) -> None:
        """The spec in this JSON is wanted from now on."""
        self._call("apply", raw, timeout=CHANGE_S)

    def down(self) -> None:
        """Nothing is wanted from now on."""
        self._call("down", timeout=CHANGE_S)

    def drain(self, node: str) -> str:
        """Empty a node; returns its id."""
        return self._call("drain", node, timeout=CHANGE_S)

    def undrain(self, node: str) -> str:
        """Use a node again; returns its id."""
        return self._call("undrain", node, timeout=CHANGE_S)

    def status(self, timeout: float = STATUS_S) -> ClusterStatus:
        """As the Controller saw it last."""
        return self._call("status", timeout=timeout)

    def info(self, timeout: float = START_S) -> HostInfo:
        """Its process, and its versions."""
        return HostInfo.from_wire(self._call("info", timeout=timeout))

    def end(self, namespace: str) -> None:
        """End it for good, and forget what it kept. Nothing that runs ends by that."""
        with contextlib.suppress(Exception):
            ray.kill(self._actor, no_restart=True)
        deadline = time.monotonic() + START_S
        while CONTROLLER in handles.names(namespace) and time.monotonic() < deadline:
            time.sleep(0.05)
        RayWorld(namespace).save(Record())

    def _call(self, method: str, *args: Any, timeout: float) -> Any:
        group = CHANGE if method in CHANGES else handles.CONTROL_GROUP
        try:
            ref = getattr(self._actor, method).options(concurrency_group=group).remote(*args)
            return handles.result_of(CONTROLLER, ref, timeout)
        except HostRaised as error:
            kind = ConfigError if error.type_name in ("ConfigError", "PlacementError") else ClusterError
            raise kind(error.message) from error
        except HostError as error:
            raise ClusterError(f"The Controller can't be reached: {error}") from error


def start(namespace: str = "raykv") -> tuple[ControllerHandle, bool]:
    """Find the Controller or start it; and whether it was started now. Blocks until it answers (about 3 s).

    Raises ClusterError with the fix.
    """
    _check()
    found = find(namespace)
    if found is not None:
        compare_versions(CONTROLLER, found.info())
        return found, False
    try:
        actor = (
            ray.remote(num_cpus=0, num_gpus=0, max_restarts=-1, max_task_retries=0, concurrency_groups=GROUPS)(
                Controller
            )
            .options(
                # Not by affinity: a soft one is ignored for an actor that takes no resources (Ray 2.60).
                resources={HEAD: 0.001},
                name=CONTROLLER,
                namespace=namespace,
                lifetime="detached",
                get_if_exists=True,
            )
            .remote(namespace)
        )
        handle = ControllerHandle(actor)
        compare_versions(CONTROLLER, handle.info())
    except RayKVError as error:
        raise ClusterError(f"The Controller can't be used: {error}") from error
    except Exception as error:
        raise ClusterError(f"The Controller could not be started: {type(error).__name__}: {error}") from error
    return handle, True


def find(namespace: str = "raykv") -> ControllerHandle | None:
    """The Controller, if there is one. Needs the head."""
    _check()
    try:
        return ControllerHandle(ray.get_actor(CONTROLLER, namespace))
    except ValueError:
        return None


def left_over(namespace: str = "raykv") -> bool:
    """Whether there is something that a Controller cares for: engines, or a spec."""
    _check()
    engines = any(name.startswith(PREFIX) for name in handles.names(namespace))
    with contextlib.suppress(RayKVError, json.JSONDecodeError):
        return engines or RayWorld(namespace).load() != Record()
    return True


def _check() -> None:
    if not ray.is_initialized():  # Ray would start a cluster by itself
        raise ClusterError("The Controller can't be used: this process is in no Ray cluster (cluster.connect).")
    if not cluster.head_reachable():  # Ray would wait for it for a minute
        raise ClusterError("The Controller can't be found while Ray's head is away: `raykv restart-head`.")
