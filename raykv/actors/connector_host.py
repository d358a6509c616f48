"""The actor that runs the worker half of one child for one rank.

It knows nothing of vLLM: the runtime that does is named by an import path. All hooks of the child run in one
thread, which was also the one that built it, because connectors keep thread-bound state (NIXL agents, ZMQ
sockets). The control group answers beside it.
"""

from __future__ import annotations

import importlib
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from raykv.actors.host_base import HostBase, be_as_nice_as_others, owner_pid
from raykv.actors.processes import off_core_of
from raykv.messages import HostReport, HostStatus, Phase, StepRecord
from raykv.types import Incarnation, Rank

POLL_PAUSE_S = 0.0005
"""Pause between two polls of the child inside one call: half a Ray round trip on a small machine (1 ms)."""


class Runtime(Protocol):
    """What a host drives. Every method is called by the hooks' thread only, `build` first, then `register`."""

    child: str
    rank: Rank
    incarnation: Incarnation

    def register(self, caches: bytes) -> bytes | None:
        """Map the engine's KV cache and register it; returns the pickled handshake metadata."""

    def run(self, record: StepRecord, report: HostReport, tick: Callable[[], None]) -> None:
        """Run the record's hooks; what they raise goes to `report.faults`. Calls `tick` after each hook."""

    def poll(self, report: HostReport) -> bool:
        """Ask the child for completions; True if it reported something."""

    def close(self) -> None:
        """Shut the child down."""


class ConnectorHost(HostBase):
    """One child's worker half. `factory` is `module:callable` taking the setup's bytes, giving a Runtime."""

    CONTROL_METHODS = ("info", "status", "retire")

    def __init__(self, factory: str, label: str) -> None:
        self._label = label
        be_as_nice_as_others()
        module, _, name = factory.partition(":")
        # Import now: this is the slow part of a start, and a warm spare has it behind it.
        with off_core_of(owner_pid() or 0):
            self._factory: Callable[[bytes], Runtime] = getattr(importlib.import_module(module), name)
        self._runtime: Runtime | None = None
        self._handshake: bytes | None = None
        self._registered = False
        self._ticks = 0
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._hooks_thread, name="raykv-hooks", daemon=True).start()

    def __repr__(self) -> str:
        return f"ConnectorHost({self._label})"

    # -- the hooks' thread ----------------------------------------------------------------------------------

    def _hooks_thread(self) -> None:
        while True:
            work, future = self._inbox.get()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    def _in_hooks_thread(self, work: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._inbox.put((work, future))
        return future.result()

    def _tick(self) -> None:
        self._ticks += 1

    # -- calls of the worker --------------------------------------------------------------------------------

    def build(self, setup: bytes) -> None:
        """Make the child. Raises what its constructor raises."""

        def work() -> None:
            self._runtime = self._factory(setup)

        self._in_hooks_thread(work)

    def register(self, caches: bytes) -> bytes | None:
        """Map and register the engine's KV cache; returns the child's pickled handshake metadata."""

        def work() -> bytes | None:
            assert self._runtime is not None
            return self._runtime.register(caches)

        self._handshake = self._in_hooks_thread(work)
        self._registered = True
        return self._handshake

    def run(self, batch: list[StepRecord], wait_s: float) -> HostReport:
        """Run the records in order, then poll the child for up to `wait_s` or until it reports something."""

        def work() -> HostReport:
            assert self._runtime is not None
            report = HostReport()
            started = time.monotonic()
            for record in batch:
                self._runtime.run(record, report, self._tick)
                if record.phase is not Phase.LOAD:  # the saves of that step are still to come
                    report.done_step = record.step
                if any(fault.unsettled for fault in report.faults):
                    break
            report.busy_s = time.monotonic() - started
            heard = report.receiving or report.sending or report.faults
            deadline = time.monotonic() + (0.0 if heard else wait_s)
            while not self._runtime.poll(report) and time.monotonic() < deadline:
                self._tick()
                time.sleep(POLL_PAUSE_S)
            return report

        return self._in_hooks_thread(work)

    # -- control group --------------------------------------------------------------------------------------

    def status(self) -> HostStatus:
        """Answers also while hooks run, as long as the process is scheduled and the GIL is free."""
        runtime = self._runtime
        return HostStatus(
            pid=os.getpid(),
            child=runtime.child if runtime else self._label,
            rank=runtime.rank if runtime else Rank(-1),
            incarnation=runtime.incarnation if runtime else Incarnation(-1),
            registered=self._registered,
            handshake=self._handshake,
            ticks=self._ticks,
        )

    def retire(self) -> None:
        """End this process soon. The worker sees the death, settles by it, and starts a new incarnation."""
        threading.Timer(0.05, lambda: os._exit(0)).start()

    def shutdown(self, wait_s: float) -> None:
        """Shut the child down within `wait_s`, then end."""

        def work() -> None:
            if self._runtime is not None:
                self._runtime.close()

        future: Future[Any] = Future()
        self._inbox.put((work, future))
        try:
            future.result(wait_s)
        finally:
            self.retire()
