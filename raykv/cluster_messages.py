"""What crosses between the Controller and those who ask it (router, command line) or whom it commands (engine actors).

Plain frozen records, no heavy import. The Controller is the detached actor CONTROLLER in the cluster's namespace.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

CONTROLLER = "raykv-controller"
"""The name of the Controller's actor."""


class EngineRole(enum.StrEnum):
    """What an engine does of a request: its prefill, its decode, or all of it."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class EngineState(enum.StrEnum):
    """Where an engine is between its start and its end, as its actor sees it."""

    STARTING = "starting"
    """Its process runs and has not answered /health yet."""
    READY = "ready"
    UNHEALTHY = "unhealthy"
    """It was ready, runs and does not answer /health for now."""
    STOPPING = "stopping"
    """It was told to end."""
    STOPPED = "stopped"
    """It was told to, and has ended."""
    FAILED = "failed"
    """Its process has ended by itself, or was ended because it did not get ready; `EngineReport.error` says how."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """One engine as the router sees it: the answer of the Controller's `engines()` is a list of them.

    `name` is unique and stays the same for one replica over its restarts. `url` is the base, such as
    "http://10.0.0.7:41235", without "/v1"; it changes when the engine is started anew. `node` is Ray's node id.
    Only one that is `ready` takes requests. One that leaves a node is ready until its successor is, under its name
    with "@" and the node's id behind it.
    """

    name: str
    role: EngineRole
    url: str
    node: str
    ready: bool


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """What an engine's actor is to run. `command` is complete but for host and port, which the actor adds.

    `environment` is added to the actor's own. `host` is the address to listen on; None: the node's, as Ray knows it.
    `side_ports`: how many ports in a row NIXL's side channel needs. Times in seconds: to get ready, and to be not
    healthy before the process is ended. `digest` names what is wanted: an actor with another one runs an older spec.
    """

    name: str
    role: EngineRole
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    host: str | None = None
    port: int | None = None
    side_ports: int = 0
    startup_timeout_s: float = 600.0
    unhealthy_timeout_s: float = 120.0
    digest: str = ""

    def digested(self, digest: str) -> EngineOrder:
        """The same with its digest."""
        return replace(self, digest=digest)


@dataclass(frozen=True, slots=True)
class EngineReport:
    """An engine's actor about itself and its process. `pid` 0: no process yet or any more; `url` "": not known yet.

    `log_tail`: the last lines that it wrote; only of one that has failed.
    """

    name: str
    role: EngineRole
    state: EngineState
    url: str
    node: str
    pid: int
    actor_pid: int
    digest: str
    error: str = ""
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One engine in the Controller's status. `state`: EngineState's, or waiting (for its node, with `error` saying
    why), launching, no answer, outdated (it serves as an older spec wanted it, until its turn to be changed), leaving.
    `restarts`: how often it was started again."""

    name: str
    role: EngineRole
    state: str
    node: str = ""
    url: str = ""
    pid: int = 0
    restarts: int = 0
    error: str = ""
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreRow:
    """One store in the Controller's status. `state`: up, launching, draining, failed."""

    store: str
    node: str
    state: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node. `state`: alive, draining, drained (empty: it can be removed)."""

    node: str
    host: str
    address: str
    state: str


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The Controller's status: what is wanted, by its JSON (empty: nothing), and what there is."""

    spec: str
    nodes: tuple[NodeRow, ...]
    engines: tuple[EngineRow, ...]
    stores: tuple[StoreRow, ...]
    problem: str = ""
    """Why the Controller can't do its work for now, such as a head that is away."""

    @property
    def ready(self) -> bool:
        """All that is wanted runs, and nothing is on its way out."""
        engines = all(row.state == EngineState.READY for row in self.engines)
        return bool(self.spec) and not self.problem and engines and all(row.state == "up" for row in self.stores)
