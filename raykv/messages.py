"""What crosses a process boundary: plain frozen records, no heavy import.

The scheduler half numbers steps and attempts; worker halves and hosts only repeat these numbers. That is how
a late report is told from a current one, whatever order the hooks of a step ran in.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from raykv.types import Attempt, Incarnation, Rank, RequestId, StepId

ChildIndex = int
"""The id of a child on the wire (names are for people): its position in the `connectors` list, or the next number
for one that was added to a running engine. Never used again when the child is gone."""

NO_ATTEMPT: Attempt = Attempt(-1)
"""Attempt of an event about a load that the host was never asked for."""


REPLACED = "replaced"
"""Detail of a DOWN event that only repeats, for the ledger, a death that somebody else has seen."""

REMOVED = "removed"
"""Detail of the DOWN event of a child that was taken out of the chain: on this rank nothing of it is left."""


class Phase(enum.Enum):
    """Which hooks of a step a record asks a host to run."""

    LOAD = "load"  # a step with synchronous loads, before the forward pass
    SAVE = "save"  # the rest of that step, after the forward pass
    WHOLE = "whole"  # a step without synchronous loads: everything, after the forward pass


class EventKind(enum.Enum):
    """What a rank tells the ledger about one of its children."""

    RECV_DONE = "recv_done"  # the child finished an asynchronous load, well
    RECV_FAILED = "recv_failed"  # the load ended and its blocks are not valid; nothing writes them any more
    SEND_DONE = "send_done"  # the child no longer reads a finished request's blocks
    SEND_UNASKED = "send_unasked"  # the child reported a send that it does not, or not yet, owe: proof of nothing
    SYNC_FAILED = "sync_failed"  # a synchronous load failed; the step's forward pass ran on garbage
    DOWN = "down"  # the process is dead, confirmed; its incarnation holds nothing any more
    FAULT = "fault"  # the child raised in a hook that moves no data


@dataclass(frozen=True, slots=True)
class ChildEvent:
    """One fact about one child on one rank."""

    kind: EventKind
    child: ChildIndex
    rank: Rank
    incarnation: Incarnation
    request: RequestId | None = None
    attempt: Attempt = NO_ATTEMPT
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A load that begins in a step: the request, which try of it this is, and the block ids it fills."""

    request: RequestId
    attempt: Attempt
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """What one step holds for one child, the same for every rank.

    `meta` is the child's own connector metadata, pickled once by the scheduler half (None: the scheduler half
    of the child failed, so nothing may run and every load of the step has failed). `incarnations` is the
    process generation, by rank, that the plan was made for: a host of another generation must not run it.
    """

    meta: bytes | None
    incarnations: tuple[Incarnation, ...]
    loads: tuple[LoadOrder, ...] = ()
    sync_loads: tuple[RequestId, ...] = ()
    sync_blocks: tuple[int, ...] = ()
    owed_sends: tuple[RequestId, ...] = ()
    finished: frozenset[RequestId] = frozenset()
    idle: bool = False


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step's work for one host. Hooks run in the order of the records.

    An `idle` one only gives the child its turn: of several that wait, the last is enough.
    """

    step: StepId
    phase: Phase
    meta: bytes
    forward: bool
    loads: tuple[LoadOrder, ...] = ()
    sync: bool = False
    finished: frozenset[RequestId] = frozenset()
    owed: frozenset[RequestId] = frozenset()
    skip_saves: bool = False
    idle: bool = False


@dataclass(frozen=True, slots=True)
class HookFault:
    """A hook of the child raised. `unsettled`: it moves data, so only the process's death settles its step."""

    hook: str
    message: str
    unsettled: bool


@dataclass(slots=True)
class HostReport:
    """What a host tells its worker after a batch of records (or a poll).

    `sending`, `receiving` and `failed` are request ids as the child reported them; `unasked` are sends of requests
    that it does not owe. Objects of the child (its
    statistics, events, worker metadata) travel pickled, because this layer knows nothing of vLLM.
    """

    done_step: StepId | None = None
    sending: set[RequestId] = field(default_factory=set)
    unasked: set[RequestId] = field(default_factory=set)
    receiving: set[RequestId] = field(default_factory=set)
    failed: set[RequestId] = field(default_factory=set)
    invalid_blocks: set[int] = field(default_factory=set)
    faults: list[HookFault] = field(default_factory=list)
    objects: list[bytes] = field(default_factory=list)
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HostStatus:
    """Answer of a host's control group, also while its hooks run. `ticks` counts the hooks that returned."""

    pid: int
    child: str
    rank: Rank
    incarnation: Incarnation
    registered: bool
    handshake: bytes | None
    ticks: int
