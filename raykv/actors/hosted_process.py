"""A `ConnectorHost` seen from the worker that owns it: launch, spare, calls, confirmed end."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raykv.actors.connector_host import ConnectorHost
from raykv.actors.handles import RemoteHost
from raykv.errors import ChildStartError, HostRaised, RayKVError
from raykv.messages import HostReport, HostStatus, StepRecord

SHUTDOWN_S = 5.0
"""How long a child may take to shut down by itself at the engine's end."""


def actor_name(engine_id: str, child: str, rank: int, serial: int) -> str:
    """The name of a host's actor: observers in other processes find it by `actor_prefix`."""
    return f"{actor_prefix(engine_id, child, rank)}{serial}"


def actor_prefix(engine_id: str, child: str, rank: int) -> str:
    """What the names of all hosts of a child's rank begin with."""
    return f"host.{engine_id}.{child}.{rank}."


class HostedProcess:
    """Implements `child_link.Host` over Ray. One caller at a time."""

    def __init__(self, remote: RemoteHost, pid: int) -> None:
        self.pid = pid
        self._remote = remote
        self._pending: Any = None

    def run(self, batch: Sequence[StepRecord], wait_s: float, timeout: float) -> HostReport:
        self._pending = self._remote.submit("run", list(batch), wait_s)
        return self.resume(timeout)

    def resume(self, timeout: float) -> HostReport:
        return self._remote.wait(self._pending, timeout)

    def status(self, timeout: float) -> HostStatus:
        return self._remote.call("status", timeout=timeout)

    def alive(self) -> bool:
        return self._remote.alive()

    def kill(self) -> None:
        self._remote.kill()

    def close(self) -> None:
        try:
            if self.alive():
                self._remote.call("shutdown", SHUTDOWN_S, timeout=SHUTDOWN_S + 2)
        except RayKVError:
            pass  # it ends by the kill
        finally:
            self._remote.kill()


@dataclass
class HostLauncher:
    """Starts the hosts of one child on one rank, one after the other, and keeps a spare if asked to."""

    engine_id: str
    child: str
    rank: int
    namespace: str
    factory: str
    env: Mapping[str, str]
    cuda_uuid: str | None
    startup_timeout_s: float
    warm_spare: bool = False
    first_serial: int = 0
    """Where the numbers in its actors' names begin: a child that comes again under its name must not meet its old
    actors, whose names Ray gives back some time after their death."""

    def __post_init__(self) -> None:
        self._serial = self.first_serial
        self._spare: RemoteHost | None = None
        self._lock = threading.Lock()

    def prelaunch(self) -> None:
        """Start a process now, so that the next `start` finds it with its imports done. Does not block."""
        with self._lock:
            if self._spare is None:
                self._spare = self._launch()

    def _launch(self) -> RemoteHost:
        name = actor_name(self.engine_id, self.child, self.rank, self._serial)
        self._serial += 1
        label = f"{self.child} rank {self.rank}"
        return RemoteHost.launch(
            ConnectorHost,
            (self.factory, label),
            name=name,
            env=self.env,
            cuda_uuid=self.cuda_uuid,
            namespace=self.namespace,
        )

    def start(self, setup: bytes, caches: bytes) -> tuple[HostedProcess, bytes | None]:
        """Build and register a child in the prelaunched process or in a new one; blocks.

        Returns the process and the child's handshake metadata. Raises ChildStartError with the child's own
        reason; then no process is left.
        """
        with self._lock:
            remote, self._spare = self._spare or self._launch(), None
        try:
            info = remote.wait_ready(self.startup_timeout_s)
            remote.call("build", setup, timeout=self.startup_timeout_s)
            handshake = remote.call("register", caches, timeout=self.startup_timeout_s)
        except RayKVError as error:
            remote.kill()
            reason = f"{error.type_name}: {error.message}" if isinstance(error, HostRaised) else str(error)
            raise ChildStartError(
                f"The child {self.child} could not be started in its actor (rank {self.rank}). It said: {reason}"
            ) from error
        if self.warm_spare:
            self.prelaunch()
        return HostedProcess(remote, info.pid), handshake

    def close(self) -> None:
        """End the spare."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None:
            spare.kill()
