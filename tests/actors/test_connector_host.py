"""ConnectorHost as the plain class it is: no Ray, no vLLM, a runtime that records what is done to it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raykv.actors import connector_host
from raykv.actors.connector_host import ConnectorHost
from raykv.messages import HookFault, HostReport, Phase, StepRecord
from raykv.types import Incarnation, Rank, RequestId
from tests.support.fake_host import step_record

FACTORY = f"{__name__}:make_runtime"
PATIENCE = 30.0


class FakeRuntime:
    """A child's worker half. Every call notes its thread."""

    def __init__(self, setup: bytes) -> None:
        self.child, self.rank, self.incarnation = setup.decode(), Rank(2), Incarnation(3)
        self.threads = {threading.get_ident()}
        self.calls: list[str] = ["build"]
        self.faults: dict[int, HookFault] = {}  # by step
        self.raises: Exception | None = None
        self.news: list[HostReport] = []  # what the next polls find; an empty one finds nothing
        self.in_hook, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def _call(self, name: str) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append(name)

    def register(self, caches: bytes) -> bytes | None:
        self._call("register")
        return b"handshake of " + caches

    def run(self, record: StepRecord, report: HostReport, tick: Callable[[], None]) -> None:
        self._call(f"run {record.step}")
        self.in_hook.set()
        assert self.go_on.wait(PATIENCE)
        if self.raises is not None:
            raise self.raises
        if record.step in self.faults:
            report.faults.append(self.faults[record.step])
        tick()

    def poll(self, report: HostReport) -> bool:
        self._call("poll")
        if not self.news:
            return False
        found = self.news.pop(0)
        report.receiving |= found.receiving
        return bool(found.receiving)

    def close(self) -> None:
        self._call("close")


runtimes: list[FakeRuntime] = []


def make_runtime(setup: bytes) -> FakeRuntime:
    if setup == b"broken":
        raise ValueError("this child can't be built")
    runtimes.append(FakeRuntime(setup))
    return runtimes[-1]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set when the host would have ended its process."""
    event = threading.Event()
    monkeypatch.setattr(connector_host.os, "_exit", lambda code: event.set())
    yield event
    for timer in threading.enumerate():
        if isinstance(timer, threading.Timer):
            timer.join(PATIENCE)  # or it would end this process for real


@pytest.fixture
def host() -> ConnectorHost:
    host = ConnectorHost(FACTORY, "child rank 2")
    host.build(b"child")
    return host


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    return thread, results


def received(*requests: str) -> HostReport:
    report = HostReport()
    report.receiving = {RequestId(request) for request in requests}
    return report


def fault(unsettled: bool) -> HookFault:
    return HookFault("save_kv_layer", "bad", unsettled)


def test_all_hooks_run_in_the_thread_that_built_the_child(host: ConnectorHost, ended: threading.Event) -> None:
    assert host.register(b"caches") == b"handshake of caches"
    for start in (host.run, lambda batch, wait: host.run(batch, wait)):
        thread, _ = in_thread(lambda start=start: start([step_record(0)], 0.0))  # whoever calls
        thread.join(PATIENCE)
    host.shutdown(PATIENCE)
    runtime = runtimes[-1]
    assert len(runtime.threads) == 1 and threading.get_ident() not in runtime.threads
    assert runtime.calls == ["build", "register", "run 0", "poll", "run 0", "poll", "close"]
    assert ended.wait(PATIENCE)


def test_what_a_child_raises_while_it_is_built_reaches_the_caller(host: ConnectorHost) -> None:
    with pytest.raises(ValueError, match="can't be built"):
        host.build(b"broken")
    host.build(b"another")  # the thread goes on
    assert host.status().child == "another"


def test_status_before_anything_was_built(host: ConnectorHost) -> None:
    bare = ConnectorHost(FACTORY, "label")
    status = bare.status()
    assert (status.child, status.rank, status.incarnation, status.registered) == ("label", -1, -1, False)
    assert repr(bare) == "ConnectorHost(label)"


def test_status_answers_while_a_hook_blocks(host: ConnectorHost) -> None:
    host.register(b"caches")
    runtime = runtimes[-1]
    runtime.go_on.clear()
    thread, results = in_thread(lambda: host.run([step_record(0), step_record(1)], 0.0))
    assert runtime.in_hook.wait(PATIENCE)
    first, second = host.status(), host.status()
    assert first == second and not results
    assert (first.pid, first.child, first.rank, first.incarnation) == (os.getpid(), "child", 2, 3)
    assert (first.registered, first.handshake) == (True, b"handshake of caches")
    runtime.go_on.set()
    thread.join(PATIENCE)
    assert host.status().ticks >= first.ticks + 2, "progress can be seen"
    assert results[0].done_step == 1


def test_a_batch_runs_in_order_and_is_completed_by_its_last_step(host: ConnectorHost) -> None:
    report = host.run([step_record(step) for step in (3, 4, 5)], 0.0)
    assert runtimes[-1].calls == ["build", "run 3", "run 4", "run 5", "poll"]
    assert (report.done_step, report.faults) == (5, [])


def test_a_load_phase_does_not_complete_its_step(host: ConnectorHost) -> None:
    assert host.run([step_record(3), step_record(4, Phase.LOAD)], 0.0).done_step == 3
    assert host.run([step_record(5, Phase.LOAD)], 0.0).done_step is None
    assert host.run([step_record(5, Phase.SAVE)], 0.0).done_step == 5


def test_an_unsettled_fault_stops_the_batch_and_others_do_not(host: ConnectorHost) -> None:
    runtime = runtimes[-1]
    runtime.faults = {1: fault(unsettled=False), 2: fault(unsettled=True)}
    report = host.run([step_record(step) for step in range(4)], 60.0)
    assert [call for call in runtime.calls if call.startswith("run")] == ["run 0", "run 1", "run 2"]
    assert report.faults == [fault(False), fault(True)]
    assert runtime.calls.count("poll") == 1, "a fault is not kept waiting"


def test_what_the_runtime_itself_raises_reaches_the_caller(host: ConnectorHost) -> None:
    runtimes[-1].raises = KeyError("a defect")
    with pytest.raises(KeyError):
        host.run([step_record(0)], 0.0)
    runtimes[-1].raises = None
    assert host.run([step_record(1)], 0.0).done_step == 1


def test_a_call_waits_in_the_host_until_the_child_reports(host: ConnectorHost) -> None:
    runtime = runtimes[-1]
    runtime.news = [received(), received(), received("a"), received("b")]
    ticks = host.status().ticks
    report = host.run([], 60.0)
    assert report.receiving == {"a"}
    assert runtime.calls.count("poll") == 3
    assert host.status().ticks > ticks, "waiting is progress"


def test_a_call_that_may_not_wait_polls_once(host: ConnectorHost) -> None:
    runtimes[-1].news = [received(), received("a")]
    assert host.run([step_record(0)], 0.0).receiving == set()
    assert host.run([], 0.0).receiving == {"a"}


def test_a_call_ends_without_news_too(host: ConnectorHost) -> None:
    report = host.run([], 0.01)
    assert (report.receiving, report.done_step) == (set(), None)
    assert runtimes[-1].calls.count("poll") >= 2


def test_retire_answers_first_and_ends_the_process_then(host: ConnectorHost, ended: threading.Event) -> None:
    host.retire()
    assert ended.wait(PATIENCE)
    assert "close" not in runtimes[-1].calls, "as if killed"


def test_shutdown_ends_the_process_even_if_the_child_hangs(host: ConnectorHost, ended: threading.Event) -> None:
    runtime = runtimes[-1]
    runtime.go_on.clear()
    thread, _ = in_thread(lambda: host.run([step_record(0)], 0.0))
    assert runtime.in_hook.wait(PATIENCE)
    with pytest.raises(TimeoutError):
        host.shutdown(0.01)
    assert ended.wait(PATIENCE)
    runtime.go_on.set()
    thread.join(PATIENCE)


def test_shutdown_without_a_child(ended: threading.Event, host: ConnectorHost) -> None:
    ConnectorHost(FACTORY, "bare").shutdown(PATIENCE)
    assert ended.wait(PATIENCE)
