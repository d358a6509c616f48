"""Engines as actors: started on a node, found by name, ended. Part of RayKV's edge to Ray.

An engine's actor is detached and never restarted by Ray: the Controller decides that. It is found by its name, which
says what it is: replica, node, and the digest of what it was ordered to run.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Mapping
from typing import Any

import ray

from raykv.actors import named_actor, own_node, ray_calls, settings
from raykv.actors.controller_world import FoundEngine, WorldError
from raykv.actors.engine_server import EngineServer
from raykv.cluster_messages import CONTROLLER, EngineOrder
from raykv.core.reconcile import Instance
from raykv.errors import HostDied, HostError
from raykv.types import NODE_CHARS

PREFIX = "raykv-engine-"
GROUPS = {ray_calls.CONTROL_GROUP: 4}
REPORT_S = 2.0
EMPTY_S = 300.0
"""How long an engine that is to go may take to finish its requests."""
NOTICE_S = 3.0
"""An engine that is to go is named as not ready first, for so long: routers ask every second who is."""
GRACE_S = 30.0
GONE_S = 30.0


class Engine(EngineServer):
    """The class of the actor: it tells the Controller when its state changes, so that a death is seen at once."""

    def __init__(self, order: EngineOrder, variables: Mapping[str, str], address: str, namespace: str) -> None:
        self._namespace = namespace
        super().__init__(order, variables, address, own_process=True, on_change=self._tell)

    def _tell(self) -> None:
        with contextlib.suppress(Exception):  # it looks by itself, too
            ray.get_actor(CONTROLLER, self._namespace).wake.remote()


class EngineActors:
    """Those of one namespace. Any thread. Needs the head, for which Ray's own calls wait."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._actors: dict[str, Any] = {}

    def found(self, nodes: Collection[str]) -> Mapping[Instance, FoundEngine]:
        """The engines on these nodes. One that does not answer in REPORT_S has no report."""
        full = {node[:NODE_CHARS]: node for node in nodes}
        names = [name for name in ray_calls.names(self._namespace) if name.startswith(PREFIX)]
        refs: dict[str, Any] = {}
        for name in names:
            actor = self._actor(name)
            if actor is not None:
                refs[name] = actor.report.options(concurrency_group=ray_calls.CONTROL_GROUP).remote()
        ready = set(ray.wait(list(refs.values()), num_returns=len(refs), timeout=REPORT_S)[0]) if refs else set()
        found: dict[Instance, FoundEngine] = {}
        for name, ref in refs.items():
            replica, node, digest = _parse(name)
            if node not in full:
                continue
            engine = FoundEngine(name, digest, None)
            if ref in ready:
                try:
                    engine = FoundEngine(name, digest, ray.get(ref))
                except Exception as error:
                    if isinstance(ray_calls.translated(name, error), HostDied):
                        self._actors.pop(name, None)
                        continue  # it is gone, and its name soon too
            found[Instance(replica, full[node])] = engine
        for name in set(self._actors) - set(names):
            self._actors.pop(name, None)
        return found

    def start(self, instance: Instance, order: EngineOrder, resources: Mapping[str, float], address: str) -> None:
        """Have Ray start the engine's actor. Returns when Ray has taken it; its state is seen by `found`.

        `address`: its node's, where the engine listens. Raises HostError."""
        others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
        try:
            self._actors[_name(instance, order.digest)] = (
                ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups=GROUPS)(Engine)
                .options(
                    name=_name(instance, order.digest),
                    namespace=self._namespace,
                    lifetime="detached",
                    num_cpus=resources.get("CPU", 0),
                    num_gpus=resources.get("GPU", 0),
                    resources=others,
                    **named_actor.on_node(instance.node),
                )
                .remote(order, _variables(instance.node), address, self._namespace)
            )
        except Exception as error:
            raise ray_calls.translated(order.name, error) from error

    def stop(self, instance: Instance, empty: bool) -> None:
        """End an engine and its actor, and wait until the actor's name is free. `empty`: routers have the time to hear
        that it goes, then its requests to end."""
        if empty:
            time.sleep(NOTICE_S)
        for name in [n for n in ray_calls.names(self._namespace) if n.startswith(PREFIX)]:
            if _parse(name)[:2] != (instance.replica, instance.node[:NODE_CHARS]):
                continue
            actor = self._actor(name)
            if actor is None:
                continue
            with contextlib.suppress(HostError):  # whatever it says, it is killed
                if empty:
                    ray_calls.result_of(name, actor.empty.remote(EMPTY_S), EMPTY_S + 5)
                ray_calls.result_of(name, actor.stop.remote(GRACE_S if empty else 5.0), GRACE_S + 30)
            kill(actor, f"actor {name}", name, self._namespace)
            self._actors.pop(name, None)

    def _actor(self, name: str) -> Any:
        actor = self._actors.get(name)
        if actor is None:
            actor = named_actor.find(name, self._namespace)
            if actor is not None:
                self._actors[name] = actor
        return actor


def kill(actor: Any, what: str, name: str, namespace: str) -> None:
    """Kill it for good, and wait until its name is free. Raises WorldError if that is not so in GONE_S."""
    if not named_actor.kill(actor, name, namespace, GONE_S):
        raise WorldError(f"Ray does not say that the {what} is gone.")


def _variables(node: str) -> dict[str, str]:
    """What an engine needs to join the Ray of its actor."""
    wait = settings.GCS_RECONNECT
    return {
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        own_node.NODE_VARIABLE: node,
        wait.name: os.environ.get(wait.name, wait.value),
    }


def _name(instance: Instance, digest: str) -> str:
    return f"{PREFIX}{instance.replica}-{instance.node[:NODE_CHARS]}-{digest}"


def _parse(name: str) -> tuple[str, str, str]:
    """Replica, the first letters of its node's id, digest."""
    replica, node, digest = name.removeprefix(PREFIX).rsplit("-", 2)
    return replica, node, digest
