"""A node's store as a Ray actor: found or started by name, called, listed, shut down. Part of RayKV's edge to Ray.

The actor is detached and restarted by Ray whenever it dies: it outlives engines, and a kill is how a link settles what
it can't wait for. Calls are never retried by Ray, for a job of one life must not reach the next.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray

from raykv.actors import cluster, directory_handle, event_handle, named_actor, ray_calls
from raykv.actors.named_actor import NamedActor
from raykv.actors.peer_finder import DirectoryFinder, PeerDoor
from raykv.actors.processes import Pidfd
from raykv.actors.store_call import reason
from raykv.errors import RayKVError, StoreError
from raykv.store_messages import Attached, StoreSpec
from raykv.types import NODE_CHARS

PREFIX = "raykv-store-"
GROUPS = {
    "look_up": 1,
    "load": 8,
    "save": 8,
    "settle": 1,
    "reach": 4,
    "lend": 1,
    "drain": 2,
    "adopt": 2,
    "admin": 2,
    ray_calls.CONTROL_GROUP: 4,
}
"""Threads by concurrency group: a look-up waits for look-ups only, a rank's load for nobody's save."""
ADMIN = ("view", "where", "why", "pin", "unpin", "forget", "set_quota", "begin", "operation", "operations")
"""For operators: see `store_admin`."""
GROUP_OF = {
    "look_ups": "look_up",
    "give_back": "lend",
    **{name: name for name in GROUPS},
    **dict.fromkeys(ADMIN, "admin"),
}
OPEN_S = 60.0
SHUTDOWN_S = 10.0


class StoreHandle(NamedActor):
    """Implements `store_call.StoreCaller` over Ray: a call goes to whatever life of the actor there is."""

    def __init__(self, name: str, actor: Any) -> None:
        super().__init__(name, actor, "NodeStore", GROUP_OF)

    def process(self, attached: Attached) -> Pidfd | None:
        """The process of that life, if it lives and is of this node."""
        return Pidfd.open(attached.pid, attached.started)


def store_name(store: str, node_id: str) -> str:
    """The name of the actor: one per node and store."""
    return f"{PREFIX}{store}-{node_id[:NODE_CHARS]}"


def open_store(
    spec: StoreSpec, node_id: str | None = None, *, namespace: str = "raykv", timeout: float = OPEN_S
) -> StoreHandle:
    """Find the store of a node (this process's own by default), or start it as `spec` says.

    Blocks until it answers. Raises StoreError with the fix; also if a store of that name runs with other tiers.
    """
    named_actor.check("A store", "found or started", StoreError)
    from raykv.actors.store_actor import NodeStore  # torch, which the command line does without

    node = node_id or ray.get_runtime_context().get_node_id()
    name = store_name(spec.name, node)
    try:
        door, tag = _door(spec, node, name, namespace)
        started = named_actor.start(NodeStore, name, namespace, GROUPS, **named_actor.on_node(node))
        handle = StoreHandle(name, started.remote(spec, namespace, own_process=True, door=door, tag=tag))
        info = handle.checked(timeout)
    except RayKVError as error:
        raise StoreError(f"The store {spec.name!r} of this node can't be used: {reason(error)}") from error
    except Exception as error:
        raise StoreError(f"The store {spec.name!r} could not be started: {type(error).__name__}: {error}") from error
    conflict = _conflict(spec, info["spec"])
    if conflict:
        raise StoreError(
            f"The store {spec.name!r} of this node runs with {conflict}. Engines that share a store must describe it "
            "alike: give this engine the same, or another `store` name and another disk path; or end the store with "
            "`raykv stop`."
        )
    return handle


def find_store(name: str, namespace: str = "raykv") -> StoreHandle:
    """The store whose actor has this name, on whatever node. Raises StoreError if there is none, or no head to ask."""
    named_actor.check(name, "found", StoreError)
    actor = named_actor.find(name, namespace)
    if actor is None:
        raise StoreError(f"There is no store {name} in this cluster.")
    return StoreHandle(name, actor)


def _door(spec: StoreSpec, node: str, name: str, namespace: str) -> tuple[PeerDoor, str]:
    """How a store of this node reaches others, and what its files' names need where a machine has several nodes."""
    nodes = {one["node_id"]: one["ip"] for one in cluster.nodes() if one["alive"]}
    ip = nodes.get(node, "")
    find = directory_handle.finder(namespace, start=spec.peer)
    door = PeerDoor(
        make_finder=partial(DirectoryFinder, find),
        open_peer=partial(find_store, namespace=namespace),
        node=node,
        store=name,
        loopback=_is_loopback(ip),
        find_directory=find,
        find_events=event_handle.finder(namespace),
    )
    return door, node[:NODE_CHARS] if list(nodes.values()).count(ip) > 1 else ""


def _is_loopback(ip: str) -> bool:
    try:
        return ipaddress.ip_address(ip).is_loopback
    except ValueError:
        return False


def _conflict(spec: StoreSpec, running: Mapping[str, Any]) -> str:
    """How the running store differs from what an engine wants; empty if it does not matter."""
    wanted = [(str(tier.medium), tier.capacity, tier.path) for tier in spec.tiers]
    # An operator may have changed them since: who wants what was configured may come back, and who wants what is now.
    if all([tuple(tier) for tier in running.get(key, ())] != wanted for key in ("tiers", "tiers_now")):
        return f"the tiers {running['tiers']}, not {wanted}"
    if running["checksum"] != spec.checksum:
        return f"checksum={running['checksum']}, not {spec.checksum}"
    if bool(running.get("peer")) != spec.peer:
        return f"{'a' if running.get('peer') else 'no'} peer tier"
    if spec.slot_nbytes and spec.slot_nbytes != running["slot"]:
        return f"slot={running['slot'] or 'automatic'}, not {spec.slot_nbytes}"
    return ""


def stores(namespace: str = "raykv") -> list[str]:
    """The names of all stores in the cluster. Needs the head."""
    return [name for name in ray_calls.names(namespace) if name.startswith(PREFIX)]


def shutdown_stores(
    namespace: str = "raykv", node_id: str | None = None, *, remove_host: bool = True, timeout: float = SHUTDOWN_S
) -> list[str]:
    """End the stores of a node (this one's by default) for good; disk tiers stay. Returns their names.

    What can't end by itself within `timeout` is killed. Needs the head.
    """
    node = node_id or ray.get_runtime_context().get_node_id()
    ended = []
    for name in stores(namespace):
        if not name.endswith(f"-{node[:NODE_CHARS]}"):
            continue
        actor = named_actor.find(name, namespace)
        if actor is not None:
            StoreHandle(name, actor).end_for_good(timeout, "shutdown", remove_host, here=True)
            ended.append(name)
    return ended
