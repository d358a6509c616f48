"""What a `ChildLink` is made of: its states, options and output, the host that it drives, and how it calls it."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from raykv.errors import HostTimeout, RayKVError
from raykv.messages import ChildEvent, HostReport, HostStatus, LoadOrder, StepRecord
from raykv.types import Incarnation, RequestId, StepId

LOOKS_PER_LIMIT = 4
"""How often within `timeout_s` a host that does not answer a call is asked whether its hooks go on."""
STATUS_LIMIT_S = 2.0
ALIVE_CHECK_S = 0.25
"""How often a host that has a call is looked at in the kernel (a pidfd poll, microseconds)."""


class LinkState(enum.Enum):
    """Where a link stands; see the table above. DOWN with a host: it was not seen to die yet."""

    STARTING = "starting"
    UP = "up"
    DOWN = "down"
    CLOSED = "closed"


class Host(Protocol):
    """What a link needs of a host process; `actors.handles` has the one over Ray, the tests have a fake."""

    pid: int

    def run(self, batch: Sequence[StepRecord], wait_s: float, timeout: float) -> HostReport:
        """Raises HostTimeout, HostDied or HostRaised."""

    def resume(self, timeout: float) -> HostReport:
        """Go on waiting for the call that timed out."""

    def status(self, timeout: float) -> HostStatus:
        """Raises as `run` does."""

    def alive(self) -> bool: ...
    def kill(self) -> None:
        """Returns once the process is dead. Raises HostUnkillable."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class LinkOptions:
    """The parts of a child's options that concern its link; seconds."""

    timeout_s: float
    load_timeout_s: float
    max_faults: int
    fault_window_s: float
    retry_s: float
    max_retry_s: float = 60.0


@dataclass
class LinkOutput:
    """What has happened since the last `drain`."""

    events: list[ChildEvent] = field(default_factory=list)
    objects: list[bytes] = field(default_factory=list)
    done_step: StepId | None = None


@dataclass(eq=False)
class Item:
    """A record on a link's queue, or a wake-up without one."""

    record: StepRecord | None
    incarnation: Incarnation
    order: tuple[LoadOrder, ...] = ()
    owed: tuple[RequestId, ...] = ()
    done: threading.Event | None = None
    failed: bool = True

    def answer(self, failed: bool) -> None:
        """Tell a waiting `load_now` how it went."""
        self.failed = failed
        if self.done is not None:
            self.done.set()


def bounded_call(host: Host, records: Sequence[StepRecord], wait_s: float, limit_s: float) -> HostReport:
    """Have the host run the records. Bounded by progress: a host whose hooks return is not hung.

    Raises RayKVError when no hook has returned for `limit_s`, or when the host died or the call itself raised.
    """
    pause = limit_s / LOOKS_PER_LIMIT
    slice_s = min(pause, ALIVE_CHECK_S)
    moved, ticks = time.monotonic(), -1
    look_at = moved + wait_s + pause
    resume = False
    while True:
        try:
            return host.resume(slice_s) if resume else host.run(records, wait_s, wait_s + slice_s)
        except HostTimeout as error:
            resume = True
            if not host.alive():  # Ray may take seconds to say so
                raise RayKVError("its process ended") from error
            if time.monotonic() < look_at:
                continue
            look_at = time.monotonic() + pause
            seen = _ticks(host, min(pause, STATUS_LIMIT_S))
            now = time.monotonic()
            if seen is not None and seen != ticks:
                moved, ticks = now, seen
            elif now - moved >= limit_s:
                raise RayKVError(f"no hook returned within timeout_s={limit_s:g}") from error


def _ticks(host: Host, timeout: float) -> int | None:
    """How many hooks have returned; None: the host did not say in time. Raises if it has died."""
    try:
        return host.status(timeout).ticks
    except HostTimeout:
        return None
