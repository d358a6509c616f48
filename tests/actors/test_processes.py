import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from raykv.actors import host_base, listeners, processes, settings
from raykv.actors.cluster_record import ClusterRecord, HeadProcess
from raykv.actors.host_base import HostInfo, compare_versions, own_info
from raykv.actors.processes import Pidfd, start_time
from raykv.errors import VersionMismatchError
from tests.support.process import REPOSITORY

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    child = subprocess.Popen(SLEEP, env={**os.environ, "RAYKV_TEST_VARIABLE": f"value {os.getpid()}"})
    yield child
    child.kill()
    child.wait()


def test_a_pidfd_sees_the_end_of_its_process(sleeper: subprocess.Popen) -> None:
    handle = Pidfd.open(sleeper.pid, start_time(sleeper.pid))
    assert handle is not None and handle.alive() and not handle.wait(0.01)
    handle.signal(signal.SIGSTOP)
    assert handle.alive()
    handle.signal(signal.SIGKILL)
    assert handle.wait(30) and not handle.alive()
    # A zombie now: its memory is gone, its parent has not asked.
    assert start_time(sleeper.pid) is not None and processes.command_of(sleeper.pid) == []
    sleeper.wait()
    handle.signal(signal.SIGKILL)  # nothing happens
    assert start_time(sleeper.pid) is None


def test_a_pid_that_means_another_process_is_refused(sleeper: subprocess.Popen) -> None:
    started = start_time(sleeper.pid)
    assert started is not None
    assert Pidfd.open(sleeper.pid, started - 1) is None
    sleeper.kill()
    sleeper.wait()
    assert Pidfd.open(sleeper.pid) is None


def test_a_process_is_found_by_what_it_was_started_with(sleeper: subprocess.Popen) -> None:
    assert processes.find_by_environment("RAYKV_TEST_VARIABLE", f"value {os.getpid()}") == sleeper.pid
    assert processes.find_by_environment("RAYKV_TEST_VARIABLE", "another") is None


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('set', flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    handle = Pidfd.open(child.pid)
    assert handle is not None
    assert processes.end_all([handle], grace=0.2) == []
    assert child.wait(30) == -signal.SIGKILL


def test_a_host_ends_with_its_owner(sleeper: subprocess.Popen) -> None:
    """Without Ray: the kernel tells it. So it also works while the head is away."""
    code = (
        "import time; from raykv.actors.host_base import HostBase\n"
        "class Host(HostBase): pass\n"
        "host = Host(); print('up', flush=True); time.sleep(600)"
    )
    owner = f"{sleeper.pid}:{start_time(sleeper.pid)}"
    env = {**os.environ, host_base.OWNER_VARIABLE: owner}
    host = subprocess.Popen([sys.executable, "-c", code], env=env, cwd=REPOSITORY, stdout=subprocess.PIPE)
    assert host.stdout is not None and host.stdout.readline() == b"up\n"
    time.sleep(0.2)
    assert host.poll() is None
    sleeper.kill()
    assert host.wait(30) == 0


def test_a_host_whose_owner_is_gone_already_ends() -> None:
    code = "import time; from raykv.actors.host_base import HostBase; HostBase(); time.sleep(600)"
    env = {**os.environ, host_base.OWNER_VARIABLE: f"{os.getpid()}:1"}  # our pid, but another process
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=REPOSITORY, timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("package", "theirs", "fits"),
    [
        ("python", "3.11.99", True),
        ("python", "3.10.7", False),
        ("vllm", "0.31.0", False),
        ("vllm", None, False),
        ("ray", "2.59.0", False),
        ("raykv", "9.9.9", False),
    ],
)
def test_versions_must_agree(monkeypatch: pytest.MonkeyPatch, package: str, theirs: str | None, fits: bool) -> None:
    mine = {"python": "3.11.7", "ray": "2.60.0", "raykv": "0.1.0", "vllm": "0.32.0"}
    monkeypatch.setattr(host_base, "versions", lambda: mine)
    info = HostInfo.from_wire({"pid": 1, "from_the_future": 2, **mine, package: theirs})
    if fits:
        compare_versions("host", info)
        return
    with pytest.raises(VersionMismatchError) as caught:
        compare_versions("host", info)
    assert all(part in str(caught.value) for part in ("host", package, theirs or "not installed", str(mine[package])))


def test_info_without_ray() -> None:
    info = HostInfo.from_wire(own_info())
    assert (info.pid, info.started, info.node_id) == (os.getpid(), start_time(os.getpid()), "")


def test_listeners_that_others_can_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.2", 0)):
        assert listeners.reachable_from_outside([os.getpid()]) == []


def test_loopback_as_the_kernel_prints_it() -> None:
    """gRPC listens on the IPv4 loopback address mapped into IPv6."""
    addresses = {"0100007F": True, "0000000000000000FFFF00000100007F": True, "00000000": False, "0" * 32: False}
    for printed, loopback in addresses.items():
        assert listeners._is_loopback(listeners._address(printed)) is loopback


RECONNECT = settings.GCS_RECONNECT.name


@pytest.mark.parametrize(("environ", "enough"), [({}, 0), ({RECONNECT: "60"}, 0), ({RECONNECT: "100000"}, 1)])
def test_reconnect_time(environ: dict[str, str], enough: bool) -> None:
    assert settings.is_set(settings.GCS_RECONNECT, environ, {}) == enough


def test_system_config_of_a_gcs_counts() -> None:
    # {"gcs_storage": "rocksdb"}
    assert settings.missing_on_head({}, {"config_list": "eyJnY3Nfc3RvcmFnZSI6ICJyb2Nrc2RiIn0="}) == []
    assert settings.missing_on_head({}, {"redis_address": "10.0.0.1"}) == []
    assert [s.name for s in settings.missing_on_head({}, {})] == ["RAY_gcs_storage", "RAY_gcs_storage_path"]


def test_a_session_number_that_means_another_session_is_left_alone(sleeper: subprocess.Popen) -> None:
    """`raykv stop` after a crash or a reboot must not end strangers."""
    leader = HeadProcess("gcs_server", sleeper.pid, start_time(sleeper.pid) or 0, SLEEP)
    record = ClusterRecord("127.0.0.1:1", "", [sleeper.pid], [leader], {}, "")
    assert record.live_sessions() == [sleeper.pid] and record.missing() == []
    stranger = replace(record, processes=[replace(leader, started=leader.started - 1)])
    assert stranger.live_sessions() == [] and [p.role for p in stranger.missing()] == ["gcs_server"]
    assert replace(record, boot="another").live_sessions() == []
