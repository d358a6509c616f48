"""The cluster behind the API, over Ray. Implements `reach.World`; what it needs of Ray is in `raykv.actors`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from raykv.actors import cluster, controller_handle, desk_handle, store_handle
from raykv.api.asking import at_all
from raykv.api.errors import NotDoneError
from raykv.api.objects import split_actor
from raykv.api.reach import Caller, NodeFact, Tell
from raykv.api.words import show_seconds
from raykv.errors import ClusterError, HostDied, RayKVError
from raykv.types import NODE_CHARS

logger = logging.getLogger("raykv")

_lock = threading.Lock()
_open = 0
_joined = False


class _Kept:
    """An actor's caller, found once. `lost` hears when the actor has died: one of the same name may have followed it
    (an engine starts a new desk), which the next look then finds."""

    def __init__(self, caller: Caller, lost: Callable[[str], object]) -> None:
        self.name = caller.name
        self._caller, self._lost = caller, lost

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        """As `reach.Caller` says."""
        try:
            return self._caller.call(method, *args, timeout=timeout)
        except HostDied:
            self._lost(self.name)
            raise


class RayWorld:
    """One connection of this process. Several may be open: the last one that is closed leaves the cluster, if the
    first one joined it."""

    def __init__(self, address: str | None, namespace: str, timeout: float) -> None:
        """Raises ClusterError with the fix."""
        global _open, _joined
        with _lock:
            info = cluster.connect(address, namespace=namespace)
            if _open == 0:
                _joined = info.owns_connection
            _open += 1
        self.address, self.namespace = info.address, namespace
        self._timeout = timeout
        self._closed = False
        self._callers: dict[str, Caller] = {}

    def close(self) -> None:
        """Once; a second time does nothing."""
        global _open
        with _lock:
            if self._closed:
                return
            self._closed = True
            _open -= 1
            if _open == 0 and _joined:
                cluster.disconnect()

    def nodes(self) -> list[NodeFact]:
        """With the Controller's word on those that are drained."""
        self._check()
        states: dict[str, str] = {}
        try:
            controller = controller_handle.find(self.namespace)
            if controller is not None:
                states = {row.node: row.state for row in controller.status(min(3.0, self._timeout)).nodes}
        except RayKVError as error:
            logger.debug("the Controller is not asked: %s", error)
        return [
            NodeFact(
                node["node_id"],
                node["host"],
                node["ip"],
                states.get(node["node_id"], "alive") if node["alive"] else "dead",
                node["resources"].get("CPU", 0.0),
                node["resources"].get("GPU", 0.0),
            )
            for node in cluster.nodes()
        ]

    def desks(self) -> Mapping[str, Caller]:
        """By name; one whose actor is gone by now is left out."""
        self._check()
        return self._found(desk_handle.desks(self.namespace), desk_handle.find_desk)

    def stores(self) -> Mapping[str, Caller]:
        """By name; one whose actor is gone by now is left out."""
        self._check()
        return self._found(store_handle.stores(self.namespace), store_handle.find_store)

    def _found(self, names: Iterable[str], find: Callable[[str, str], Caller]) -> dict[str, Caller]:
        found: dict[str, Caller] = {}
        for name in names:
            caller = self._callers.get(name)
            if caller is None:
                try:
                    caller = _Kept(find(name, self.namespace), lambda one: self._callers.pop(one, None))
                except RayKVError as error:
                    logger.debug("%s is gone: %s", name, error)
                    continue
            found[name] = self._callers[name] = caller
        return found

    def drain(self, node: str, timeout: float, tell: Tell) -> str:
        """By the Controller, which moves engines too; without one only the node's stores are drained."""
        from raykv.launch import up

        self._check()
        if controller_handle.find(self.namespace) is not None:
            up.drain(
                node,
                lambda line: tell(f"{line.kind} {line.name}".strip(), f"{line.state} {line.detail}".strip()),
                namespace=self.namespace,
                timeout=timeout,
            )
            return f"Node {node[:NODE_CHARS]} is empty: it can be removed."
        return self._drain_stores(node, timeout, tell)

    def _drain_stores(self, node: str, timeout: float, tell: Tell) -> str:
        callers = self.stores()
        here = [name for name in callers if node.startswith(split_actor(name)[1])]
        if not here:
            return f"Node {node[:NODE_CHARS]} has no store: nothing was to do."
        deadline = time.monotonic() + timeout

        def one(name: str) -> object:
            own = split_actor(name)[0]
            takers = [other for other in callers if other != name and split_actor(other)[0] == own]
            tell(name, "draining")
            left = max(1.0, deadline - time.monotonic())
            return callers[name].call("drain", left, takers, timeout=left + 10.0)

        reports, errors = at_all(one, here)
        for name, report in reports.items():
            tell(name, str(report))
        problems = [f"{name}: {problem}" for name, problem in errors.items()]
        problems += [f"{name}: {report}" for name, report in reports.items() if report.problem or report.left_blocks]
        if problems:
            raise NotDoneError(
                f"The stores of node {node[:NODE_CHARS]} could not be emptied within {show_seconds(timeout)}: "
                f"{'; '.join(problems)}. They save nothing new; `raykv drain --undo` takes that back."
            )
        return f"The stores of node {node[:NODE_CHARS]} are empty; its engines, which no Controller moves, still run."

    def undrain(self, node: str, timeout: float) -> str:
        """The other way round."""
        self._check()
        controller = controller_handle.find(self.namespace)
        if controller is not None:
            controller.undrain(node)
            return f"Node {node[:NODE_CHARS]} takes engines and stores again."
        callers = self.stores()
        here = [name for name in callers if node.startswith(split_actor(name)[1])]
        _, errors = at_all(lambda name: callers[name].call("undrain", timeout=timeout), here)
        if errors:
            raise NotDoneError("; ".join(f"{name}: {problem}" for name, problem in errors.items()))
        return (
            f"The stores of node {node[:NODE_CHARS]} take saves again."
            if here
            else f"Node {node[:NODE_CHARS]} has no store."
        )

    def _check(self) -> None:
        if self._closed:
            raise ClusterError("This connection was closed. Make a new one with raykv.connect().")
        if not cluster.head_reachable():  # Ray would wait for it for a minute
            raise ClusterError("Ray's head is away: `raykv restart-head`. What runs goes on meanwhile.")
