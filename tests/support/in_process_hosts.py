"""Hosts in this process: the real `ConnectorHost` and its real runtime, behind a process that is only acted.

`Hosts` takes the place of Ray in three names (see `patch`): the launcher that a hosted child starts hosts with, the
watch of the supervisor, and the cluster. What crosses a process boundary is pickled here too.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from types import SimpleNamespace
from typing import Any

import pytest

from raykv.actors.connector_host import ConnectorHost
from raykv.connector import start_up, supervisor, worker_setup
from raykv.connector.desk_link import DeskLink
from raykv.errors import HostDied, HostRaised, HostTimeout, RayKVError
from raykv.messages import HostReport, HostStatus, StepRecord
from raykv.types import Incarnation, Rank
from tests.support.fake_control import ProcessDeath, holds, local


def end_of_thread() -> None:
    """The last work of a dead host's thread."""


class InProcessHost(ConnectorHost):
    """A `ConnectorHost` whose end does not end the tests."""

    def __init__(self, factory: str, label: str, rank: int) -> None:
        self.dead = threading.Event()
        self.rank = rank
        super().__init__(factory, label)

    def _hooks_thread(self) -> None:
        local.host = self
        while True:
            work, future = self._inbox.get()
            try:
                if self.dead.is_set():
                    raise ProcessDeath
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
                if work is end_of_thread:
                    return

    def retire(self) -> None:
        raise AssertionError("a fake host is ended by FakeProcess.die")


class FakeProcess:
    """The process of one host: `child_link.Host`, and what a test does to it."""

    _pids = iter(range(100_001, 10**9))

    def __init__(self, child: str, rank: int, factory: str) -> None:
        self.pid = next(self._pids)
        self.child, self.rank = child, rank
        self.host = InProcessHost(factory, f"{child} rank {rank}", rank)
        self.incarnation = Incarnation(-1)
        self.engine_id = ""
        self.runs = 0
        self._open = threading.Event()
        self._open.set()
        self._stopped = threading.Event()
        self._running: Future[HostReport] | None = None
        self._threads: list[threading.Thread] = []

    # -- what a test does -------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Take calls but run nothing until `release`: a slow host, not a hung one."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def stop(self) -> None:
        """SIGSTOP: nothing is answered any more."""
        self._stopped.set()
        self._open.clear()

    def die(self) -> None:
        """SIGKILL: when this returns, none of its code runs any more."""
        self.host.dead.set()
        self._open.set()
        for thread in self._threads:
            thread.join()
        holds.died(self.child, self.rank, self.engine_id)

    @property
    def held(self) -> bool:
        return not self._open.is_set()

    # -- child_link.Host --------------------------------------------------------------------------------------

    def run(self, batch: Sequence[StepRecord], wait_s: float, timeout: float) -> HostReport:
        if self.host.dead.is_set():
            raise HostDied(f"{self.child}: the host is dead")
        data, future = pickle.dumps(list(batch)), Future[HostReport]()

        def work() -> None:
            self._open.wait()
            try:
                # Not with `wait_s`: the link polls again at once, and the test need not wait.
                future.set_result(pickle.loads(pickle.dumps(self.host.run(pickle.loads(data), 0.0))))
            except BaseException as error:
                future.set_exception(error)

        self._running = future
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        return self.resume(timeout)

    def resume(self, timeout: float) -> HostReport:
        assert self._running is not None
        limited = self._stopped.is_set() or not self.held
        try:
            report = self._running.result(timeout if limited else None)
        except FutureTimeout as error:
            raise HostTimeout(f"{self.child}: no answer") from error
        except ProcessDeath as error:
            raise HostDied(f"{self.child}: the host died") from error
        except Exception as error:
            if self.host.dead.is_set():
                raise HostDied(f"{self.child}: the host died") from error
            raise HostRaised(self.child, type(error).__name__, str(error), "") from error
        if self.host.dead.is_set():
            raise HostDied(f"{self.child}: the host died")
        self.runs += 1
        return report

    def status(self, timeout: float) -> HostStatus:
        if self.host.dead.is_set():
            raise HostDied(f"{self.child}: the host is dead")
        if self._stopped.is_set():
            raise HostTimeout(f"{self.child}: no answer")
        return self.host.status()

    def alive(self) -> bool:
        return not self.host.dead.is_set()

    def kill(self) -> None:
        self.die()

    def close(self) -> None:
        self.die()


class FakeLauncher:
    """In place of `hosted_process.HostLauncher`."""

    def __init__(self, hosts: Hosts, child: str, rank: int, factory: str) -> None:
        self._hosts, self._child, self._rank, self._factory = hosts, child, rank, factory

    def prelaunch(self) -> None:
        """There is nothing to start early."""

    def start(self, setup: bytes, caches: bytes) -> tuple[FakeProcess, bytes | None]:
        if self._child in self._hosts.unstartable:
            raise RayKVError(f"{self._child} can't be started")
        process = FakeProcess(self._child, self._rank, self._factory)
        process.host.build(setup)
        runtime: Any = process.host._runtime
        process.incarnation = runtime.incarnation
        process.engine_id = runtime._connector._kv_transfer_config.engine_id
        handshake = process.host.register(caches)
        self._hosts.started.append(process)
        return process, handshake

    def close(self) -> None:
        """There is no spare."""


class Hosts:
    """All hosts of one engine, and its watch."""

    def __init__(self) -> None:
        self.started: list[FakeProcess] = []
        self.unstartable: set[str] = set()

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Until the patch is undone, hosted children need no Ray."""
        cluster = SimpleNamespace(
            connect=lambda *args, **kwargs: SimpleNamespace(address="nowhere", node_id="0" * 16),
            check_head_loss_settings=lambda: [],
        )
        monkeypatch.setattr(start_up, "cluster", cluster)
        monkeypatch.setattr(start_up, "RayHostWatch", lambda *args, **kwargs: self)
        monkeypatch.setattr(worker_setup, "HostLauncher", self._launcher)
        monkeypatch.setattr(DeskLink, "start", lambda link: None)
        monkeypatch.setattr(supervisor, "LOOK_EVERY_S", 0.005)
        monkeypatch.setattr(supervisor, "LOOK_AT_LIVING_EVERY_S", 0.005)

    def _launcher(self, *, child: str, rank: int, factory: str, **_: Any) -> FakeLauncher:
        return FakeLauncher(self, child, rank, factory)

    def of(self, child: str, rank: int = 0) -> FakeProcess:
        """The newest host of a child's rank."""
        return [p for p in self.started if (p.child, p.rank) == (child, rank)][-1]

    def close(self) -> None:
        for process in self.started:
            process.die()
            process.host._inbox.put((end_of_thread, Future()))

    # -- supervisor.HostWatch ---------------------------------------------------------------------------------

    def connect(self) -> None:
        """There is no cluster to join."""

    def statuses(self, child: str, rank: Rank) -> list[HostStatus]:
        found = [p for p in list(self.started) if (p.child, p.rank) == (child, rank) and p.alive()]
        return [process.host.status() for process in found if not process._stopped.is_set()]

    def retire(self, child: str, rank: Rank, incarnation: Incarnation) -> None:
        for process in list(self.started):
            if (process.child, process.rank, process.incarnation) == (child, rank, incarnation):
                process.die()
