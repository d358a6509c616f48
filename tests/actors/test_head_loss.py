"""The head of a cluster goes away and comes back; also the commands that a person would use for it.

A few seconds here. That nothing changes after 60 s, where Ray by default ends every process, is the soak's part.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raykv.actors import cluster, ray_calls
from raykv.actors.processes import Pidfd
from raykv.errors import HostStartError
from tests.actors.hosts import READY_S, launch, ready
from tests.support.process import REPOSITORY, free_ports, watch_session

pytestmark = pytest.mark.ray


def raykv(*arguments: str, status: int = 0) -> dict[str, Any]:
    """One command of the command line, with --json."""
    command = [sys.executable, "-m", "raykv.cli", *arguments, "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=180)
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What `raykv start` said about a cluster of its own."""
    monkeypatch.setenv("RAYKV_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    temp = f"/tmp/rkh{os.getpid()}"  # short: Ray's sockets lie below it
    options = ("--num-cpus", "2", "--object-store-memory", "100000000", "--temp-dir", temp, "--no-dashboard")
    said = raykv("start", "--port", str(free_ports(1)[0]), *options)
    watch_session(os.getsid(said["processes"]["raylet"]))
    yield said
    cluster.disconnect()
    raykv("stop")
    subprocess.run(["rm", "-rf", temp], check=True)


def kill_head(said: dict[str, Any]) -> None:
    head = Pidfd.open(said["processes"]["gcs_server"])
    assert head is not None
    head.signal(signal.SIGKILL)
    assert head.wait(30)


def test_commands(started: dict[str, Any]) -> None:
    assert started["started"] and started["reachable_from_outside"] == []
    again = raykv("start", "--port", "1")
    assert not again["started"] and again["address"] == started["address"]
    assert raykv("restart-head")["restarted"] == []
    seen = raykv("status", "--address", started["address"])
    assert [node["alive"] for node in seen["nodes"]] == [True] and seen["hosts"] == []
    raylet = Pidfd.open(started["processes"]["raylet"])
    assert raylet is not None
    assert raykv("stop")["stopped"] == started["address"]
    assert not raylet.alive()
    assert raykv("stop")["stopped"] is None
    assert "raykv start" in raykv("restart-head", status=1)["error"]


def test_a_port_in_use(started: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("RAYKV_STATE_DIR", str(tmp_path / "other"))
        said = raykv("start", "--port", started["address"].rpartition(":")[2], status=1)
    assert said["type"] == "ClusterError" and "in use" in said["error"] and "--port" in said["error"]


def test_a_lost_head_comes_back(started: dict[str, Any]) -> None:
    assert cluster.connect(started["address"]).address == started["address"]
    assert cluster.check_head_loss_settings() == []
    host = ready()
    kill_head(started)

    waiting = launch()
    until = time.monotonic() + 4
    while time.monotonic() < until:
        assert host.call("add", 1, 2, timeout=30) == 3
    with pytest.raises(HostStartError, match="head can't be reached"):
        waiting.wait_ready(0.5)
    given_up = launch()
    given_up_name = given_up.label
    given_up.kill()
    assert "raykv restart-head" in raykv("status", "--address", started["address"], status=1)["error"]
    assert "restart-head" in raykv("start", status=1)["error"]

    assert raykv("restart-head")["restarted"] == ["gcs_server"]
    assert waiting.wait_ready(READY_S).pid  # launched while the head was away
    assert host.call("add", 1, 2, timeout=30) == 3
    host.kill()
    fresh = ready()
    assert fresh.call("add", 1, 2, timeout=30) == 3
    assert set(ray_calls.names()) == {waiting.label, fresh.label} and given_up_name not in ray_calls.names()
    rows = raykv("status", "--address", started["address"])["hosts"]
    assert {row["pid"] for row in rows} == {h.info.pid for h in (waiting, fresh) if h.info}
    waiting.kill()
    fresh.retire()


def test_a_host_ends_with_its_owner_while_the_head_is_away(started: dict[str, Any]) -> None:
    code = (
        "import os, sys; from raykv.actors import cluster; from tests.actors.hosts import ready\n"
        f"cluster.connect({started['address']!r}); host = ready(); print(host.info.pid, flush=True)\n"
        "sys.stdin.readline(); os.kill(os.getpid(), 9)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None and owner.stdin is not None
    process = Pidfd.open(int(owner.stdout.readline()))
    assert process is not None
    kill_head(started)
    assert process.alive()
    owner.stdin.write("die\n")
    owner.stdin.flush()
    assert owner.wait(30) == -signal.SIGKILL
    assert process.wait(30)
