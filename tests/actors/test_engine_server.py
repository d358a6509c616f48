"""An engine's process: it starts, is watched, and ends with all that it started, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raykv.actors import engine_server
from raykv.actors.engine_process import EngineProcess, engine_environment
from raykv.actors.engine_server import EngineServer
from raykv.actors.ports import free_port
from raykv.actors.processes import Pidfd, parent_of, pids
from raykv.cluster_messages import EngineOrder, EngineRole, EngineState
from tests.support.waiting import eventually

pytestmark = pytest.mark.process

FAKE = (sys.executable, "-S", str(Path(__file__).resolve().parents[1] / "support" / "fake_vllm.py"))
LOOPBACK = "127.0.0.1"


def order(*options: str, **more: Any) -> EngineOrder:
    return EngineOrder("e-0", EngineRole.BOTH, (*FAKE, "model", *options), host=LOOPBACK, digest="d", **more)


def gone(pid: int) -> bool:
    process = Pidfd.open(pid)
    return process is None or process.wait(0)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EngineServer]]:
    monkeypatch.setattr(engine_server, "POLL_S", 0.02)
    servers: list[EngineServer] = []

    def started(wanted: EngineOrder, environment: dict[str, str] | None = None, **more: Any) -> EngineServer:
        servers.append(EngineServer(wanted, environment or {}, LOOPBACK, **more))
        return servers[-1]

    yield started
    for server in servers:
        server.stop(0)


def ready(server: EngineServer) -> EngineServer:
    eventually(lambda: server.report().state is EngineState.READY)
    return server


def about(server: EngineServer) -> dict[str, Any]:
    with urllib.request.urlopen(server.report().url + "/about", timeout=10) as answer:
        return json.load(answer)


def test_it_gets_ready_on_a_free_port_of_its_address(start: Callable[..., EngineServer]) -> None:
    changes = threading.Event()
    server = ready(start(order("--max-model-len", "64"), on_change=changes.set))
    report = server.report()
    assert changes.is_set()
    assert report.url.startswith("http://127.0.0.1:")
    assert report.pid and report.actor_pid == os.getpid()
    assert about(server)["rest"] == ["--max-model-len", "64"]


def test_its_environment_is_the_actors_without_rays_own(
    start: Callable[..., EngineServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_JOB_ID", "01000000")
    server = ready(start(order(environment=(("OWN", "1"),), side_ports=2), {"RAY_ADDRESS": "127.0.0.1:1"}))
    environment = about(server)["environment"]
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-5"
    assert environment["OWN"] == "1"
    assert environment["RAY_ADDRESS"] == "127.0.0.1:1"
    assert environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == LOOPBACK
    assert int(environment["VLLM_NIXL_SIDE_CHANNEL_PORT"]) > 0
    assert "RAY_JOB_ID" not in environment and "OMP_NUM_THREADS" not in environment
    assert engine_environment({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "4"}) == {"OMP_NUM_THREADS": "4"}


def test_one_that_fails_says_why_with_its_last_lines(start: Callable[..., EngineServer]) -> None:
    server = start(order("--fail", "no such option --foo"))
    report = eventually(lambda: server.report() if server.report().state is EngineState.FAILED else None)
    assert report.error == "Its process ended with status 3."
    assert report.log_tail == ("fake engine for model", "no such option --foo")
    assert report.pid == 0


def test_a_program_that_is_not_there(start: Callable[..., EngineServer]) -> None:
    server = start(EngineOrder("e-0", EngineRole.BOTH, ("/no/such/program",), host=LOOPBACK))
    report = eventually(lambda: server.report() if server.report().state is EngineState.FAILED else None)
    assert "/no/such/program can't be started" in report.log_tail[0]


def test_a_port_in_use_is_an_error_before_anything_starts(start: Callable[..., EngineServer]) -> None:
    first = ready(start(order()))
    port = int(first.report().url.rpartition(":")[2])
    report = start(order(port=port)).report()
    assert report.state is EngineState.FAILED
    assert f"Port {port} on 127.0.0.1 is in use" in report.error


def test_one_that_does_not_get_ready_is_ended(start: Callable[..., EngineServer]) -> None:
    server = start(order("--delay", "1000", startup_timeout_s=0.5))
    report = eventually(lambda: server.report() if server.report().state is EngineState.FAILED else None)
    assert report.error == "It was not ready within 0.5 s."


def test_one_that_hangs_is_not_ready_and_is_ended_at_last(
    start: Callable[..., EngineServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_server, "HEALTH_TIMEOUT_S", 0.2)
    server = ready(start(order(unhealthy_timeout_s=2.0)))
    os.kill(server.report().pid, signal.SIGSTOP)
    eventually(lambda: server.report().state is EngineState.UNHEALTHY)
    report = eventually(lambda: server.report() if server.report().state is EngineState.FAILED else None)
    assert "did not answer /health" in report.error


def test_its_death_is_seen_without_a_look_at_its_health(
    start: Callable[..., EngineServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ready(start(order("--grandchild")))
    child = about(server)["child"]
    monkeypatch.setattr(engine_server, "POLL_S", 1000)
    os.kill(server.report().pid, signal.SIGKILL)
    report = eventually(lambda: server.report() if server.report().state is EngineState.FAILED else None)
    assert report.error == "Its process ended by signal SIGKILL."
    assert gone(child)


@pytest.mark.parametrize("deaf", [False, True])
def test_stop_leaves_nothing(start: Callable[..., EngineServer], deaf: bool) -> None:
    server = ready(start(order("--grandchild", *(["--deaf"] if deaf else []))))
    pid, child = server.report().pid, about(server)["child"]
    server.stop(0.2 if deaf else 20)
    assert gone(pid) and gone(child)
    assert server.report().state is EngineState.STOPPED


def test_nothing_is_left_when_the_guard_is_killed(start: Callable[..., EngineServer]) -> None:
    server = ready(start(order()))
    pid = server.report().pid
    os.kill(parent_of(pid) or 0, signal.SIGKILL)
    eventually(lambda: gone(pid))
    eventually(lambda: server.report().state is EngineState.FAILED)


OWNER = """
import sys, time
from raykv.actors.engine_process import EngineProcess
import os
show = lambda line: print(line, flush=True)
process = EngineProcess(sys.argv[1:], os.environ, on_line=show, on_end=lambda code: None)
process.wait_started(10)
print("pid", process.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("by_ray", [False, True])
def test_nothing_is_left_when_the_owner_is_killed(by_ray: bool) -> None:
    """`by_ray`: an actor that ends by `ray.kill`, or when its raylet has, first kills its own children."""
    port = str(free_port(LOOPBACK))
    command = [*FAKE, "model", "--grandchild", "--deaf", "--host", LOOPBACK, "--port", port]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *command], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(next(line for line in owner.stdout if line.startswith("pid")).split()[1])
    next(line for line in owner.stdout if line == "ready\n")
    with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/about", timeout=10) as answer:
        child = json.load(answer)["child"]
    for own in [one for one in pids() if parent_of(one) == owner.pid] if by_ray else []:
        os.kill(own, signal.SIGKILL)
    owner.kill()
    owner.wait()
    eventually(lambda: gone(pid) and gone(child))
    owner.stdout.close()


LEAK = """
import os, time
from multiprocessing import shared_memory
made = shared_memory.SharedMemory(create=True, size=4096)
print(made.name, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("whole", [False, True])
def test_shared_memory_of_a_killed_engine_is_removed(whole: bool) -> None:
    """`whole`: by the guard, of all of it; else of its own process only."""
    lines: list[str] = []
    process = EngineProcess([sys.executable, "-c", LEAK], os.environ, on_line=lines.append, on_end=lambda _: None)
    eventually(lambda: lines)
    segment = Path("/dev/shm") / lines[0]
    assert segment.exists()
    if whole:
        process.kill()
    else:
        os.kill(process.pid, signal.SIGKILL)
    assert process.wait(30)
    assert not segment.exists()


def test_empty_waits_for_the_requests(start: Callable[..., EngineServer]) -> None:
    assert ready(start(order())).empty(10)
    busy = ready(start(order("--busy", "2")))
    assert busy.requests() == 2
    assert not busy.empty(0.5)
    busy.stop(10)
    assert busy.empty(0.5)


def test_lines_are_passed_on_whole() -> None:
    lines: list[str] = []
    code = "import sys; print('a' * 100_000); sys.stdout.write('10%\\r50%\\r100%\\n'); print('last', end='')"
    ended: list[int] = []
    process = EngineProcess([sys.executable, "-c", code], os.environ, on_line=lines.append, on_end=ended.append)
    assert process.wait(30)
    eventually(lambda: ended)
    assert lines == ["a" * 100_000, "100%", "last"]
    assert ended == [0]
