"""The Controller as a Ray actor: started or found by name, called, ended. Part of RayKV's edge to Ray.

The actor is detached, restarted by Ray whenever it dies, and on the head's node; what it needs lies in the GCS.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from raykv.actors import controller, named_actor, ray_calls, ray_metrics
from raykv.actors.controller_world import Record
from raykv.actors.engine_actors import PREFIX
from raykv.actors.host_base import HostInfo, be_as_nice_as_others, compare_versions
from raykv.actors.named_actor import NamedActor
from raykv.actors.nodes import RayWorld
from raykv.cluster_messages import CONTROLLER, ClusterStatus
from raykv.errors import ClusterError, ConfigError, HostError, HostRaised, RayKVError
from raykv.observe.samples import Sample
from raykv.observe.store import controller_samples

CHANGE = "change"
GROUPS = {ray_calls.CONTROL_GROUP: 2, CHANGE: 2}
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
        self._caller = NamedActor(CONTROLLER, actor, "Controller", dict.fromkeys(CHANGES, CHANGE))

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
        named_actor.kill(self._actor, CONTROLLER, namespace, START_S)
        RayWorld(namespace).save(Record())

    def _call(self, method: str, *args: Any, timeout: float) -> Any:
        try:
            return self._caller.call(method, *args, timeout=timeout)
        except HostRaised as error:
            kind = ConfigError if error.type_name in ("ConfigError", "PlacementError") else ClusterError
            raise kind(error.message) from error
        except HostError as error:
            raise ClusterError(f"The Controller can't be reached: {error}") from error


def start(namespace: str = "raykv") -> tuple[ControllerHandle, bool]:
    """Find the Controller or start it; and whether it was started now. Blocks until it answers (about 3 s).

    Raises ClusterError with the fix.
    """
    named_actor.check("The Controller", "found or started")
    found = find(namespace)
    if found is not None:
        compare_versions(CONTROLLER, found.info())
        return found, False
    try:
        # Not by affinity: a soft one is ignored for an actor that takes no resources (Ray 2.60).
        where = {named_actor.HEAD: 0.001}
        started = named_actor.start(Controller, CONTROLLER, namespace, GROUPS, resources=where)
        handle = ControllerHandle(started.remote(namespace))
        compare_versions(CONTROLLER, handle.info())
    except RayKVError as error:
        raise ClusterError(f"The Controller can't be used: {error}") from error
    except Exception as error:
        raise ClusterError(f"The Controller could not be started: {type(error).__name__}: {error}") from error
    return handle, True


def find(namespace: str = "raykv") -> ControllerHandle | None:
    """The Controller, if there is one. Needs the head."""
    named_actor.check("The Controller", "found")
    actor = named_actor.find(CONTROLLER, namespace)
    return ControllerHandle(actor) if actor is not None else None


def left_over(namespace: str = "raykv") -> bool:
    """Whether there is something that a Controller cares for: engines, or a spec."""
    named_actor.check("The Controller", "looked for")
    engines = any(name.startswith(PREFIX) for name in ray_calls.names(namespace))
    with contextlib.suppress(RayKVError, json.JSONDecodeError):
        return engines or RayWorld(namespace).load() != Record()
    return True
