"""Actors over a real Ray: launched, called, raising, hung, killed, retired."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from raykv.actors import cluster, handles, host_base, observer, ray_calls
from raykv.actors.handles import RemoteHost
from raykv.errors import HostDied, HostError, HostRaised, HostStartError, HostTimeout, VersionMismatchError
from tests.actors.hosts import READY_S, launch, ready
from tests.support.ray_cluster import RayCluster

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def joined(ray_cluster: RayCluster) -> Iterator[cluster.ClusterInfo]:
    yield cluster.connect(ray_cluster.address)
    cluster.disconnect()


@pytest.fixture
def host() -> Iterator[RemoteHost]:
    host = ready()
    yield host
    host.kill()


def test_a_call_comes_back(host: RemoteHost, joined: cluster.ClusterInfo) -> None:
    assert host.call("add", 2, 3, timeout=30) == 5
    assert host.info is not None and host.info.node_id == joined.node_id and host.info.pid != os.getpid()
    assert host.call("thread", timeout=30) == host.call("thread", timeout=30)  # one thread for all of a child's hooks


def test_environment_and_no_gpu() -> None:
    host = ready(RAYKV_TEST_VARIABLE="given")
    assert host.call("variable", "RAYKV_TEST_VARIABLE", timeout=30) == "given"
    assert host.call("variable", "CUDA_VISIBLE_DEVICES", timeout=30) == ""
    host.kill()
    host = ready(cuda_uuid="GPU-1234")
    assert host.call("variable", "CUDA_VISIBLE_DEVICES", timeout=30) == "GPU-1234"
    host.kill()


def test_status_answers_while_work_runs(host: RemoteHost) -> None:
    work = host.submit("sleep", 5)
    assert host.call("status", timeout=4) == "up"
    with pytest.raises(HostTimeout, match="did not answer"):
        host.wait(work, 0.01)
    assert host.wait(work, 60) == 5


def test_a_method_that_raises(host: RemoteHost) -> None:
    with pytest.raises(HostRaised) as caught:
        host.call("boom", timeout=30)
    error = caught.value
    assert (error.type_name, error.message) == ("KeyError", "'block 7'") and "in boom" in error.traceback_text
    assert host.call("add", 1, 1, timeout=30) == 2


def test_a_callback_hears_result_and_error(host: RemoteHost) -> None:
    heard: list[tuple[object, HostError | None]] = []
    both = threading.Semaphore(0)

    def done(result: object, error: HostError | None) -> None:
        heard.append((result, error))
        both.release()

    ray_calls.on_done(host.label, host.submit("add", 1, 2), done)
    assert both.acquire(timeout=30)
    ray_calls.on_done(host.label, host.submit("boom"), done)
    assert both.acquire(timeout=30)
    assert heard[0] == (3, None) and isinstance(heard[1][1], HostRaised)


def test_a_killed_process_is_reported(host: RemoteHost) -> None:
    assert host.info is not None and host.alive()
    work = host.submit("sleep", 600)
    os.kill(host.info.pid, signal.SIGKILL)
    with pytest.raises(HostDied):
        host.wait(work, 60)
    assert host.wait_dead(60) and not host.alive()


def test_a_stopped_process_times_out_and_can_be_killed(host: RemoteHost) -> None:
    assert host.info is not None
    os.kill(host.info.pid, signal.SIGSTOP)
    with pytest.raises(HostTimeout):
        host.call("add", 1, 2, timeout=0.5)
    assert host.alive() and not host.wait_dead(0.01)
    host.kill()
    assert not host.alive()
    host.kill()  # twice is once
    with pytest.raises(HostDied):
        host.call("add", 1, 2, timeout=60)


def test_a_constructor_that_raises() -> None:
    host = launch("raise")
    with pytest.raises(HostStartError, match="RuntimeError: no such device"):
        host.wait_ready(READY_S)
    host.kill()


def test_a_constructor_that_hangs() -> None:
    host = launch("hang")
    deadline = time.monotonic() + READY_S
    said = ""
    while "its process" not in said and time.monotonic() < deadline:
        with pytest.raises(HostStartError, match="not ready within") as caught:
            host.wait_ready(1)
        said = str(caught.value)
    assert "its constructor takes longer, or hangs" in said
    host.kill()
    assert host.wait_dead(0) and not host.alive()


def test_killed_before_it_is_ready() -> None:
    """Whether Ray has started a process by then or not: afterwards there is none."""
    host = launch("hang")
    host.kill(timeout=60)
    assert host.wait_dead(0) and not host.alive()


def test_a_name_that_is_taken(host: RemoteHost) -> None:
    second = launch(name=host.label)
    with pytest.raises(HostStartError, match="already"):
        second.wait_ready(READY_S)
    second.kill()
    assert host.call("add", 1, 1, timeout=30) == 2


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {**host_base.versions(), "raykv": "9.9.9"}
    monkeypatch.setattr(host_base, "versions", lambda: mine)
    host = launch()
    with pytest.raises(VersionMismatchError, match=r"raykv 9\.9\.9"):
        host.wait_ready(READY_S)
    host.kill()


def test_a_replaced_gpu_choice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1, where Ray sets CUDA_VISIBLE_DEVICES itself."""
    host = launch(cuda_uuid="GPU-1234")
    host._cuda = "GPU-5678"
    with pytest.raises(HostStartError, match="RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        host.wait_ready(READY_S)
    host.kill()


def test_retire_lets_work_end_and_kills_what_hangs() -> None:
    host = ready()
    work = host.submit("sleep", 0.5)
    host.retire(timeout=30)
    assert not host.alive()
    host = ready()
    work = host.submit("sleep", 600)
    host.retire(timeout=0.5)
    assert not host.alive() and work is not None


def test_observers_see_it(host: RemoteHost) -> None:
    assert host.info is not None
    found = handles.find(host.label)
    assert found is not None and found.wait_ready(READY_S) == host.info and found.alive()
    assert handles.find("nobody") is None
    rows = {row.name: row for row in observer.look(None).hosts}
    assert rows[host.label].pid == host.info.pid
    host.kill()


def test_dropping_the_last_reference_ends_it() -> None:
    host = ready()
    assert host.info is not None
    pid, started = host.info.pid, host.info.started
    process = host_base.Pidfd.open(pid, started)
    del host
    assert process is not None and process.wait(60)
