"""`raykv.connect` and the world over Ray, with RayKV's edge to Ray faked; and that importing raykv stays light."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import raykv
from raykv.actors import cluster, controller_handle, desk_handle, store_handle
from raykv.api import NotDoneError
from raykv.api import ray_world as module
from raykv.api.ray_world import RayWorld
from raykv.errors import ClusterError, ConfigError, StoreError
from raykv.store_messages import DrainReport
from raykv.types import StoreLife
from tests.api.cases import LEFT, RIGHT
from tests.support.fake_operators import HOSTS, NODES, FakeCaller, FakeWorld


class Edge:
    """What RayKV asks Ray, answered from a fake world."""

    def __init__(self) -> None:
        self.world = FakeWorld()
        self.joined = self.left = 0
        self.owns, self.head = True, True
        self.controller: Any = None
        self.asked: list[str] = []

    def connect(self, address: str | None, *, namespace: str) -> Any:
        self.joined += 1
        return SimpleNamespace(address=address or "10.0.0.1:6379", owns_connection=self.owns and self.joined == 1)

    def disconnect(self) -> None:
        self.left += 1

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"node_id": node, "host": host, "ip": "10.0.0.1", "alive": host == "left", "resources": {"CPU": 4.0}}
            for node, host in zip(NODES, HOSTS, strict=True)
        ]

    def find_store(self, name: str, namespace: str) -> Any:
        self.asked.append(name)
        if name not in self.world.store_callers:
            raise StoreError(f"There is no store {name} in this cluster.")
        return self.world.store_callers[name]


@pytest.fixture
def edge(monkeypatch: pytest.MonkeyPatch) -> Edge:
    made = Edge()
    monkeypatch.setattr(module, "_open", 0)
    monkeypatch.setattr(module, "_joined", False)
    monkeypatch.setattr(cluster, "connect", made.connect)
    monkeypatch.setattr(cluster, "disconnect", made.disconnect)
    monkeypatch.setattr(cluster, "nodes", made.nodes)
    monkeypatch.setattr(cluster, "head_reachable", lambda timeout=1.0: made.head)
    monkeypatch.setattr(controller_handle, "find", lambda namespace: made.controller)
    monkeypatch.setattr(store_handle, "stores", lambda namespace: [LEFT, RIGHT, "raykv-store-gone-cccc"])
    monkeypatch.setattr(store_handle, "find_store", made.find_store)
    monkeypatch.setattr(desk_handle, "desks", lambda namespace: list(made.world.desk_callers))
    monkeypatch.setattr(desk_handle, "find_desk", lambda name, namespace: made.world.desk_callers[name])
    return made


@pytest.mark.parametrize("module_name", ["raykv", "raykv.api", "raykv.api.doctor", "raykv.cli"])
def test_importing_it_imports_nothing_heavy(module_name: str) -> None:
    code = f"import {module_name}, sys; print({{'ray', 'torch', 'vllm', 'transformers', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


def test_connect_is_found_lazily() -> None:
    code = "import raykv, sys; a = 'raykv.api' in sys.modules; raykv.connect; print(a, 'raykv.api' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "True"]
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        _ = raykv.conect  # type: ignore[attr-defined]


def test_what_is_seen_through_it(edge: Edge) -> None:
    with raykv.connect("10.0.0.9:6379", timeout_s=2) as kv:
        assert (kv.address, kv.namespace) == ("10.0.0.9:6379", "raykv")
        assert [(node.host, node.state, node.cpus) for node in kv.nodes] == [
            ("left", "alive", 4.0),
            ("right", "dead", 4.0),
        ]
        assert [store.actor for store in kv.stores] == [LEFT, RIGHT]  # the third is gone by now
        assert [engine.id for engine in kv.engines] == ["engine-a", "engine-b"]
        asked = edge.asked.count(LEFT)
        assert kv.stores and edge.asked.count(LEFT) == asked == 1  # handles are kept
    assert edge.left == 1
    with pytest.raises(ClusterError, match=r"was closed.*raykv\.connect"):
        _ = kv.nodes


def test_a_desk_that_follows_a_dead_one_is_found(edge: Edge) -> None:
    """An engine whose desk has died starts a new one of the same name."""
    desks = edge.world.desk_callers
    name = next(name for name in desks if name.endswith("engine-b"))
    with raykv.connect() as kv:
        assert [engine.id for engine in kv.engines] == ["engine-a", "engine-b"]
        old, desks[name] = desks[name], FakeCaller(name, desks[name].target)
        old.dead = True
        assert [engine.id for engine in kv.engines] == ["engine-a"]
        assert [engine.id for engine in kv.engines] == ["engine-a", "engine-b"]


def test_who_joined_leaves(edge: Edge) -> None:
    one, two = raykv.connect(), raykv.connect()
    one.close()
    one.close()
    assert edge.left == 0 and two.stores
    two.close()
    assert edge.left == 1


def test_a_process_that_was_in_the_cluster_stays_there(edge: Edge) -> None:
    edge.owns = False
    raykv.connect().close()
    assert edge.left == 0


def test_a_head_that_is_away(edge: Edge) -> None:
    with raykv.connect() as kv:
        edge.head = False
        for look in (lambda: kv.nodes, lambda: kv.stores, lambda: kv.drain_node("left")):
            with pytest.raises(ClusterError, match="Ray's head is away"):
                look()


def test_a_bad_time_limit_joins_nothing(edge: Edge) -> None:
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        raykv.connect(timeout_s=0)
    assert edge.joined == 0


def test_the_controllers_word_on_nodes(edge: Edge) -> None:
    row = SimpleNamespace(node=NODES[0], state="draining")
    edge.controller = SimpleNamespace(status=lambda timeout: SimpleNamespace(nodes=[row]))
    assert raykv.connect().node("left").state == "draining"

    def silent(timeout: float) -> Any:
        raise ClusterError("The Controller can't be reached.")

    edge.controller = SimpleNamespace(status=silent)
    assert raykv.connect().node("left").state == "alive"


def test_stores_are_drained_without_a_controller(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    left: Any = edge.world.store_callers[LEFT]
    heard: list[tuple[str, str]] = []
    world = RayWorld(None, "raykv", 5.0)
    assert "are empty" in world.drain(NODES[0], 10.0, lambda where, said: heard.append((where, said)))
    assert left.target.drained and not edge.world.store_callers[RIGHT].target.drained  # type: ignore[attr-defined]
    assert [where for where, _ in heard] == [LEFT, LEFT]
    assert "take saves again" in world.undrain(NODES[0], 10.0) and not left.target.drained
    assert "has no store" in world.drain("dd" * 14, 10.0, lambda *_: None)
    report = DrainReport(StoreLife("x"), left_blocks=4, problem="no other store has room")
    monkeypatch.setattr(left.target, "drain", lambda *_: report)
    with pytest.raises(NotDoneError, match=r"could not be emptied within 10 s: .*no other store has room"):
        world.drain(NODES[0], 10.0, lambda *_: None)


def test_nodes_are_drained_by_the_controller(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    from raykv.launch import up

    drained: list[str] = []

    def drain(node: str, tell: Any, *, namespace: str, timeout: float) -> str:
        tell(up.Progress("engine", "decode-0", "leaving", "node a1"))
        drained.append(node)
        return node

    monkeypatch.setattr(up, "drain", drain)
    edge.controller = SimpleNamespace(undrain=drained.append, status=lambda timeout: SimpleNamespace(nodes=[]))
    heard: list[str] = []
    kv = raykv.connect()
    done = kv.drain_node("left", tell=lambda progress: heard.append(f"{progress.where}: {progress.detail}"))
    assert drained == [NODES[0]] and heard == ["engine decode-0: leaving node a1"] and "can be removed" in done.said
    kv.undrain_node("left")
    assert drained == [NODES[0]] * 2
