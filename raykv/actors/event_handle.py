"""The event stream as a Ray actor: found or started by name, ended. Part of RayKV's edge to Ray.

As the Directory: detached, restarted by Ray, on the head's node. Off in a cluster until somebody opens it; stores find
it within seconds.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from raykv.actors import directory_handle, named_actor, ray_calls
from raykv.actors.directory_call import FindDirectory
from raykv.actors.named_actor import NamedActor
from raykv.errors import ClusterError, RayKVError
from raykv.event_messages import EventsOptions, EventsStatus

NAME = "raykv-events"
GROUPS = {"publish": 1, ray_calls.CONTROL_GROUP: 2}
GROUP_OF = {"publish": "publish"}
OPEN_S = 60.0
LISTEN_S = 5.0
CALL_S = 10.0
POLL_S = 0.1


class EventsHandle(NamedActor):
    """Implements `directory_call.DirectoryCaller`: a call goes to whatever life of the stream's actor there is."""

    def __init__(self, actor: Any) -> None:
        super().__init__(NAME, actor, "EventStream", GROUP_OF)


def open_events(options: EventsOptions, namespace: str = "raykv", timeout: float = OPEN_S) -> EventsStatus:
    """Have the stream with these options: find it, start it, or start it anew if it has others.

    Blocks until it listens. Raises ClusterError with the fix; then none runs that this call has started.
    """
    named_actor.check("The event stream", "found or started")
    wanted = [options.host, options.port, options.int_hashes]
    try:
        handle = find_events(namespace)
        if handle is not None and list(handle.call("info", timeout=timeout)["options"]) != wanted:
            shutdown_events(namespace)
            handle = None
        fresh = handle is None
        if handle is None:
            handle = _started(options, namespace, timeout)
    except RayKVError as error:
        raise ClusterError(f"The event stream of this cluster can't be used: {error}") from error
    except Exception as error:
        raise ClusterError(f"The event stream could not be started: {type(error).__name__}: {error}") from error
    status = _listening(handle)
    if status.problem and fresh:
        shutdown_events(namespace)
    if status.problem:
        raise ClusterError(
            f"The event stream can't listen: {status.problem}. Choose another `port` (it takes two, that one and the "
            "next), or end what listens there."
        )
    return status


def find_events(namespace: str = "raykv", timeout: float = directory_handle.FIND_S) -> EventsHandle | None:
    """The stream that runs; None: there is none. Raises ClusterError, HostTimeout or another RayKVError."""
    named_actor.check("The event stream", "found")
    actor = named_actor.find(NAME, namespace)
    return _answering(actor, timeout) if actor is not None else None


def finder(namespace: str = "raykv") -> FindDirectory:
    """`find_events`, for a store's feed. It can be pickled."""
    return partial(find_events, namespace)


def status(namespace: str = "raykv") -> EventsStatus | None:
    """Its figures; None: there is none. Raises RayKVError."""
    handle = find_events(namespace)
    found: EventsStatus | None = handle.call("status", timeout=CALL_S) if handle is not None else None
    return found


def shutdown_events(namespace: str = "raykv", timeout: float = CALL_S) -> bool:
    """End the stream for good; whether there was one. Needs the head."""
    actor = named_actor.find(NAME, namespace)
    if actor is not None:
        EventsHandle(actor).end_for_good(timeout, "close")  # which gives the ports back
    return actor is not None


def _started(options: EventsOptions, namespace: str, timeout: float) -> EventsHandle:
    from raykv.actors.event_stream import EventStream  # ZMQ, which stores and the command line do without

    started = named_actor.start(EventStream, NAME, namespace, GROUPS, resources=named_actor.on_head())
    return _answering(started.remote(options, directory_handle.nodes, own_process=True), timeout)


def _listening(handle: EventsHandle) -> EventsStatus:
    """Once it listens; or as it is after LISTEN_S, since what runs is a port that somebody else has."""
    deadline = time.monotonic() + LISTEN_S
    while True:
        found: EventsStatus = handle.call("status", timeout=CALL_S)
        if not found.problem or time.monotonic() > deadline:
            return found
        time.sleep(POLL_S)


def _answering(actor: Any, timeout: float) -> EventsHandle:
    handle = EventsHandle(actor)
    handle.checked(timeout)
    return handle
