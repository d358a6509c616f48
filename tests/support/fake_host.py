"""A host process that is none: `child_link.Host` with a script, for tests that need no Ray.

By default a call completes its records at once. `then(...)` says what the next call with records does instead;
`report(...)` adds to what the next call reports. Nothing here depends on how fast a test runs: a call that hangs
does so until `release` or a successful `kill`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from raykv.errors import HostDied, HostTimeout, HostUnkillable
from raykv.messages import HookFault, HostReport, HostStatus, Phase, StepRecord
from raykv.types import Incarnation, Rank, RequestId, StepId


@dataclass
class Call:
    """What a call does. `hangs`: it has no end by itself; `dies`: the process ends in it; else it completes."""

    hangs: bool = False
    dies: bool = False
    raises: Exception | None = None
    fault: HookFault | None = None
    invalid_blocks: frozenset[int] = frozenset()


class FakeHost:
    """One caller at a time, as with the real one: a second call at once is remembered in `overlaps`."""

    def __init__(self, pid: int = 100, *, unkillable: int = 0) -> None:
        """`unkillable`: how many kills fail before one works."""
        self.pid = pid
        self.batches: list[list[StepRecord]] = []  # of calls with records
        self.polls = 0
        self.kills = 0
        self.closed = False
        self.overlaps = 0
        self.unkillable = unkillable
        self.ticks = 0
        self.ticking = False  # hooks go on returning while a call hangs
        self.silent_looks = 0  # how many status calls get no answer in time
        self.in_call = threading.Event()  # a call that hangs has begun
        self._alive = True
        self._script: deque[Call] = deque()
        self._news = HostReport()
        self._released = threading.Event()
        self._pending: tuple[Call, list[StepRecord]] = (Call(), [])
        self._busy = threading.Lock()

    # -- what a test says -----------------------------------------------------------------------------------

    def then(self, *calls: Call) -> FakeHost:
        self._script.extend(calls)
        return self

    def hang(self, *, ticking: bool = False, silent: bool = False) -> FakeHost:
        """The next call with records hangs; `silent`: as in a stopped process."""
        self.ticking, self.silent_looks = ticking, 10**9 if silent else 0
        return self.then(Call(hangs=True))

    def report(self, sending: Sequence[str] = (), receiving: Sequence[str] = (), failed: Sequence[str] = ()) -> None:
        """The next call that ends, reports this."""
        news = HostReport()
        news.sending, news.receiving, news.failed = (set(map(RequestId, ids)) for ids in (sending, receiving, failed))
        self._news = news

    def release(self) -> None:
        """A call that hangs ends well."""
        self._released.set()

    def die(self) -> None:
        """The process ends by itself."""
        self._alive = False
        self._released.set()

    @property
    def steps(self) -> list[int]:
        """Of all records that it was given."""
        return [record.step for batch in self.batches for record in batch]

    # -- the protocol ---------------------------------------------------------------------------------------

    def run(self, batch: Sequence[StepRecord], wait_s: float, timeout: float) -> HostReport:
        call = Call()
        if batch:
            self.batches.append(list(batch))
            call = self._script.popleft() if self._script else call
        else:
            self.polls += 1
            threading.Event().wait(wait_s)
        self._pending = (call, list(batch))
        return self.resume(timeout)

    def resume(self, timeout: float) -> HostReport:
        if not self._busy.acquire(blocking=False):
            self.overlaps += 1
            raise AssertionError("two calls at once")
        try:
            return self._end(*self._pending, timeout)
        finally:
            self._busy.release()

    def _end(self, call: Call, batch: list[StepRecord], timeout: float) -> HostReport:
        if call.raises is not None:
            raise call.raises
        if call.dies:
            self._alive = False
        elif call.hangs:
            self.in_call.set()
            if not self._released.wait(timeout):
                raise HostTimeout("no answer")
        if not self._alive:
            raise HostDied("gone")
        report, self._news = self._news, HostReport()
        report.done_step = max((r.step for r in batch if r.phase is not Phase.LOAD), default=None)
        report.invalid_blocks = set(call.invalid_blocks)
        if call.fault is not None:
            report.faults.append(call.fault)
        self.ticks += len(batch)
        return report

    def status(self, timeout: float) -> HostStatus:
        if not self._alive:
            raise HostDied("gone")
        if self.silent_looks:
            self.silent_looks -= 1
            raise HostTimeout("no status")
        self.ticks += self.ticking
        return HostStatus(self.pid, "fake", Rank(0), Incarnation(0), True, None, self.ticks)

    def alive(self) -> bool:
        return self._alive

    def kill(self) -> None:
        self.kills += 1
        if self.unkillable:
            self.unkillable -= 1
            raise HostUnkillable("stuck in the kernel")
        self.die()

    def close(self) -> None:
        self.closed = True
        self.die()


def step_record(step: int, phase: Phase = Phase.WHOLE, **fields: object) -> StepRecord:
    """A record with as little in it as possible."""
    return StepRecord(StepId(step), phase, meta=b"" if phase is Phase.SAVE else b"meta", forward=True, **fields)  # type: ignore[arg-type]
