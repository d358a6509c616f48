"""What runs in a cluster, seen by somebody who owns nothing of it (the command line)."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from raykv.actors import cluster, handles, ray_calls
from raykv.actors.desk_handle import PREFIX as DESK
from raykv.actors.directory_handle import NAME as DIRECTORY
from raykv.actors.store_handle import PREFIX
from raykv.errors import HostDied, HostError


@dataclass(frozen=True)
class HostRow:
    """One actor of RayKV's. What is None was not answered; `error` says why.

    `figures`: a store's StoreStatus or the Directory's DirectoryStatus as plain values.
    """

    name: str
    state: str  # up, starting, spare, store, directory, desk, no answer, gone
    child: str | None = None
    rank: int | None = None
    incarnation: int | None = None
    pid: int | None = None
    node_id: str | None = None
    error: str | None = None
    figures: dict[str, Any] | None = None

    @property
    def is_store(self) -> bool:
        return self.name.startswith(PREFIX)

    @property
    def store_and_node(self) -> tuple[str, str]:
        """Of a store: its own name, and the first letters of its node's id."""
        store, _, node = self.name.removeprefix(PREFIX).rpartition("-")
        return store, node


@dataclass(frozen=True)
class ClusterView:
    """The cluster at one moment."""

    address: str
    nodes: list[dict[str, Any]]
    hosts: list[HostRow]

    @property
    def stores(self) -> list[HostRow]:
        """The stores of all nodes."""
        return [row for row in self.hosts if row.is_store]

    @property
    def directory(self) -> HostRow | None:
        """The Directory, if there is one."""
        return next((row for row in self.hosts if row.name == DIRECTORY), None)


def look(address: str | None, namespace: str = "raykv", timeout: float = 3) -> ClusterView:
    """Join the cluster and ask every actor of RayKV's, all at once; one that hangs is a row like the others."""
    info = cluster.connect(address, namespace=namespace)
    names = ray_calls.names(namespace)
    with ThreadPoolExecutor(max_workers=max(1, min(32, len(names)))) as pool:
        rows = list(pool.map(lambda name: _row(name, namespace, timeout), names))
    return ClusterView(info.address, cluster.nodes(), rows)


def _row(name: str, namespace: str, timeout: float) -> HostRow:
    host = handles.find(name, namespace)
    if host is None:
        return HostRow(name, "gone")
    try:
        # Not wait_ready: an actor of another version is worth a row too.
        info = host.call("info", timeout=timeout)
    except HostDied as error:
        return HostRow(name, "gone", error=str(error))
    except HostError as error:
        return HostRow(name, "no answer", error=str(error))
    known: dict[str, Any] = {"pid": info["pid"], "node_id": info["node_id"]}
    if name.startswith(DESK):
        return HostRow(name, "desk", **known)  # it has views of its engine, and no figures of its own
    try:
        status = host.call("status", timeout=timeout)
    except HostError as error:
        return HostRow(name, "no answer", error=str(error), **known)
    if name == DIRECTORY or name.startswith(PREFIX):
        state = "directory" if name == DIRECTORY else "store"
        return HostRow(name, state, figures=_figures(status), **known)
    child = getattr(status, "child", None) or None
    if child is None:
        return HostRow(name, "spare", **known)
    state = "up" if getattr(status, "registered", True) else "starting"
    return HostRow(name, state, child, getattr(status, "rank", None), getattr(status, "incarnation", None), **known)


def _figures(status: Any) -> dict[str, Any] | None:
    """None for a record of another RayKV, which may lack what this one's has."""
    try:
        return dataclasses.asdict(status)
    except (TypeError, AttributeError):
        return None
