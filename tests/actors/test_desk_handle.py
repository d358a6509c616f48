"""The desk over a real Ray: found by its engine's name, killed and told anew, and gone with its engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from raykv.actors import cluster, desk_handle, observer
from raykv.actors.desk_handle import DeskHandle
from raykv.actors.processes import Pidfd
from raykv.engine_messages import ChainOrder, ChildOp, Errands, HashOrder, OrderState, Progress, Story
from raykv.errors import ClusterError, HostDied, HostRaised
from raykv.types import EngineId, RequestId
from tests.support.linked_engine import LinkedEngine
from tests.support.process import REPOSITORY
from tests.support.ray_cluster import RayCluster
from tests.support.waiting import eventually

pytestmark = pytest.mark.ray

PATIENCE = 90.0
E = EngineId(f"engine-{os.getpid()}")
ORDER = ChainOrder("1", ChildOp.PAUSE, "files")


@pytest.fixture(scope="module", autouse=True)
def joined(ray_cluster: RayCluster) -> Iterator[cluster.ClusterInfo]:
    yield cluster.connect(ray_cluster.address)
    cluster.disconnect()


@pytest.fixture
def handle() -> Iterator[DeskHandle]:
    found = desk_handle.open_desk(E, 10)
    yield found
    found.end()
    gone(E)


def gone(engine: EngineId) -> None:
    eventually(lambda: desk_handle.desk_name(engine) not in desk_handle.desks())


def kill(handle: DeskHandle) -> None:
    info = handle.call("info", timeout=PATIENCE)
    process = Pidfd.open(info["pid"], info["started"])
    assert process is not None
    process.signal(signal.SIGKILL)
    assert process.wait(PATIENCE)


def test_it_is_seen_among_the_actors(handle: DeskHandle) -> None:
    pid = handle.call("info", timeout=PATIENCE)["pid"]
    assert [(row.state, row.pid) for row in observer.look(None).hosts if row.name == handle.name] == [("desk", pid)]


def test_operators_and_engine_meet_there(handle: DeskHandle, joined: cluster.ClusterInfo) -> None:
    assert desk_handle.desks() == [f"raykv-desk-{E}"]
    mine = desk_handle.open_desk(E, 10)
    info = mine.call("info", timeout=PATIENCE)
    assert info["pid"] == handle.call("info", timeout=PATIENCE)["pid"] != os.getpid()
    assert info["node_id"] == joined.node_id and info["cuda_visible_devices"] == ""
    operator = desk_handle.find_desk(handle.name)
    found: list[Errands] = []
    thread = threading.Thread(target=lambda: found.append(handle.call("fetch", PATIENCE, timeout=PATIENCE)))
    thread.start()
    assert operator.call("order", ORDER, timeout=PATIENCE).progress is Progress.WAITING
    thread.join(PATIENCE)
    assert found == [Errands(orders=(ORDER,))]
    story = Story(RequestId("cmpl-a-0-1"), E, 1.0, 10, (), hashes=b"x" * 64)
    done = OrderState("1", Progress.DONE, "", 2.0)
    handle.call("push", None, [story], [done], timeout=PATIENCE)
    assert operator.call("order_state", "1", timeout=PATIENCE) == done
    assert operator.call("story", "a", timeout=PATIENCE) == story
    assert [one.state for one in operator.call("watch", -1, 0.0, timeout=PATIENCE)] == ["waiting", "done"]
    with pytest.raises(HostRaised, match="is that of another order") as caught:
        operator.call("order", ChainOrder("1", ChildOp.REMOVE, "files"), timeout=PATIENCE)
    assert caught.value.type_name == "RayKVError"


def test_whoever_waits_keeps_nobody_else(handle: DeskHandle) -> None:
    """Watchers and questions that wait, more than there are threads for, and the engine and a look go on."""
    operator = desk_handle.find_desk(handle.name)
    for number in range(20):
        operator.submit("watch", 1 << 60, 30.0, done=lambda *_: None)
        operator.submit("hash", HashOrder(str(number), (1,)), done=lambda *_: None)
    eventually(lambda: handle.call("fetch", 0.0, timeout=PATIENCE).hashes)
    assert operator.call("view", timeout=PATIENCE) is None
    handle.call("push", timeout=PATIENCE)


def test_there_is_none_where_no_engine_is() -> None:
    with pytest.raises(HostDied, match="its engine has ended"):
        desk_handle.find_desk("raykv-desk-nobody")


def test_without_a_cluster_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "head_reachable", lambda: False)
    for call in (lambda: desk_handle.open_desk(E, 1), lambda: desk_handle.find_desk("x")):
        with pytest.raises(ClusterError, match="restart-head"):
            call()


@dataclass
class Other:
    """An engine's process: it has a desk."""

    engine: str
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        code = (
            "import sys; from raykv.actors import cluster, desk_handle; cluster.connect();"
            f"desk = desk_handle.open_desk({self.engine!r}, 1);"
            "print(desk.call('info', timeout=60)['pid'], flush=True); sys.stdin.read()"
        )
        environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        assert self.process.stdout is not None
        self.pid = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def test_it_ends_with_its_engine_and_belongs_to_one() -> None:
    other = Other("twice")
    desk = Pidfd.open(other.pid)
    assert desk is not None
    try:
        with pytest.raises(ClusterError, match=rf"another process \({other.process.pid}\).*engine_id of its own"):
            desk_handle.open_desk(EngineId("twice"), 1)
    finally:
        other.kill()
    assert desk.wait(PATIENCE), "its engine was killed"
    gone(EngineId("twice"))
    opened: list[DeskHandle] = []

    def free() -> bool:
        try:
            opened.append(desk_handle.open_desk(EngineId("twice"), 1))
        except ClusterError:  # its name is not free yet
            return False
        return True

    eventually(free)
    opened[0].end()
    gone(EngineId("twice"))


@pytest.mark.vllm
def test_an_engine_s_link_from_start_to_end_and_over_a_kill() -> None:
    """Start, orders, hashes, stories; kill -9 of the desk; all of it once more; the end of the engine."""
    with LinkedEngine("linked") as engine:
        desk = engine.desk()
        eventually(lambda: desk.call("view", timeout=PATIENCE) is not None)
        view = desk.call("view", timeout=PATIENCE)
        assert (view.engine, view.pid, view.served, view.max_tokens) == ("linked", engine.pid, ("small",), 100)
        assert view.node == cluster.connect().node_id
        engine.request("r0")
        eventually(lambda: desk.call("requests", timeout=PATIENCE) == ("r0",))
        began = time.monotonic()
        assert desk.call("hash", HashOrder("1", (1,)), timeout=PATIENCE).hashes == b"x" * 32
        print(f"a question to the engine took {1e3 * (time.monotonic() - began):.0f} ms")
        desk.call("order", ORDER, timeout=PATIENCE)
        eventually(lambda: desk.call("order_state", "1", timeout=PATIENCE).progress is Progress.REFUSED)
        kill(desk)
        killed = time.monotonic()
        engine.request("r1")
        eventually(lambda: engine.told() == ("r0", "r1"))
        print(f"a killed desk was back, and had heard all, after {time.monotonic() - killed:.1f} s")
        again = engine.desk()
        eventually(lambda: again.call("order", ORDER, timeout=PATIENCE).progress is Progress.REFUSED)
        eventually(lambda: again.call("view", timeout=PATIENCE).tokens == {"computed": 40})
        assert engine.end() == {"alive": False}
        gone(EngineId("linked"))
