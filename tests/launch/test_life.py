"""`up` to `down` on a simulated cluster of several raylets, with a fake vLLM: everything may be killed in between."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from raykv.actors.processes import Pidfd, parent_of
from raykv.cluster_messages import CONTROLLER, ClusterStatus, EngineRow
from raykv.config.cluster_spec import ClusterSpec
from raykv.core.reconcile import Instance
from raykv.errors import ConfigError
from raykv.launch import up as launch
from raykv.launch.spec_file import spec_from
from tests.support.process import REPOSITORY, free_ports
from tests.support.sim_cluster import SimCluster, router_replicas
from tests.support.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

FAKE = [sys.executable, "-S", str(Path(__file__).resolve().parents[1] / "support" / "fake_vllm.py")]
PATIENCE_S = 120.0
SMALL = {"object_store_memory": 80 << 20}


def spec(*engines: dict[str, Any], **more: Any) -> ClusterSpec:
    wanted = [{"resources": {"num_cpus": 1}, **engine} for engine in engines]
    return spec_from(json.dumps({"model": "tiny", "command": FAKE, "engines": wanted, "startup_timeout_s": 60, **more}))


until = partial(eventually, patience_s=PATIENCE_S)


def gone(pid: int) -> bool:
    process = Pidfd.open(pid)
    return process is None or process.wait(0)


def health(row: EngineRow) -> int:
    with urllib.request.urlopen(row.url + "/health", timeout=10) as answer:
        return int(answer.status)


class Running:
    """What `up` has started, looked at through the Controller."""

    def __init__(self) -> None:
        self.lines: list[launch.Progress] = []

    def up(self, wanted: ClusterSpec) -> ClusterStatus:
        return launch.up(wanted, self.lines.append).status

    def down(self) -> bool:
        return launch.down(self.lines.append)

    @property
    def controller(self) -> Any:
        from raykv.actors import controller_handle

        found = controller_handle.find()
        assert found is not None
        return found

    def status(self) -> ClusterStatus:
        return self.controller.status(60.0)

    def rows(self) -> dict[str, EngineRow]:
        return {row.name: row for row in self.status().engines}

    def ready_again(self, others: dict[str, EngineRow], but: set[str]) -> dict[str, EngineRow]:
        """Wait until `but` run as new processes; all others must be the same processes as before."""

        def settled() -> dict[str, EngineRow] | None:
            rows = self.rows()
            if not self.status().ready or rows.keys() != others.keys():
                return None
            return rows if all(rows[name].pid != others[name].pid for name in but) else None

        rows = until(settled, f"{but} did not come back: {self.rows()}")
        for name in others.keys() - but:
            assert rows[name].pid == others[name].pid, f"{name} was touched"
            assert health(rows[name]) == 200
        return rows


@pytest.fixture(scope="module")
def sim() -> Iterator[SimCluster]:
    cluster = SimCluster(
        [{"num_cpus": 2, **SMALL}, {"num_cpus": 2, "num_gpus": 2, "labels": {"pool": "decode"}, **SMALL}]
    )
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def running(sim: SimCluster) -> Iterator[Running]:
    found = Running()
    yield found
    found.down()
    assert not found.down()


def test_up_spreads_finds_everything_again_and_down_leaves_nothing(running: Running) -> None:
    wanted = spec({"name": "e", "replicas": 2}, vllm={"max_model_len": 64, "enforce_eager": True})
    status = running.up(wanted)
    assert len({row.node for row in status.engines}) == 2
    pids = {row.name: row.pid for row in status.engines}
    assert all(health(row) == 200 for row in status.engines)
    # The same again changes nothing.
    assert {row.name: row.pid for row in running.up(wanted).engines} == pids
    # More of it touches nothing that runs.
    more = running.up(spec({"name": "e", "replicas": 3}, vllm={"max_model_len": 64, "enforce_eager": True}))
    assert {row.name: row.pid for row in more.engines if row.name in pids} == pids
    assert len(more.engines) == 3
    # Other options start them anew.
    other = running.up(spec({"name": "e", "replicas": 1}, vllm={"max_model_len": 128}))
    assert [row.name for row in other.engines if row.state == "ready"] == ["e-0"]
    assert running.down()
    assert all(gone(pid) for pid in pids.values())


def test_a_changed_spec_goes_from_one_engine_to_the_next(running: Running) -> None:
    before = {row.name: row for row in running.up(spec({"name": "e", "replicas": 3})).engines}
    running.lines.clear()
    after = {
        row.name: row for row in running.up(spec({"name": "e", "replicas": 3}, vllm={"max_model_len": 64})).engines
    }
    assert all(after[name].pid != row.pid for name, row in before.items())
    lines = [(line.name, line.state) for line in running.lines if line.kind == "engine" and line.state != "ended"]
    last = [max(i for i, line in enumerate(lines) if line == (name, "ready")) for name in sorted(after)]
    first = [
        min(i for i, (n, state) in enumerate(lines) if n == name and state != "outdated") for name in sorted(after)
    ]
    # Each is touched when the one before it is ready again.
    assert all(ready < touched for ready, touched in zip(last, first[1:], strict=False)), lines


def test_each_engine_has_the_gpu_that_ray_gave_its_actor(running: Running) -> None:
    status = running.up(spec({"name": "e", "replicas": 2, "resources": {"num_gpus": 1}}))
    devices = []
    for row in status.engines:
        with urllib.request.urlopen(row.url + "/about", timeout=10) as answer:
            devices.append(json.load(answer)["environment"]["CUDA_VISIBLE_DEVICES"])
    assert sorted(devices) == ["0", "1"]


def child_of(row: EngineRow) -> int:
    """What the fake engine has started."""
    with urllib.request.urlopen(row.url + "/about", timeout=10) as answer:
        return int(json.load(answer)["child"])


def actor_of(row: EngineRow) -> Any:
    """Its actor, as the Controller finds it."""
    from raykv.actors.nodes import RayWorld

    return RayWorld("raykv").engines([row.node])[Instance(row.name, row.node)]


def test_kill_the_process_the_actor_and_the_controller(running: Running) -> None:
    import ray

    rows = {
        row.name: row for row in running.up(spec({"name": "e", "replicas": 2, "options": {"grandchild": True}})).engines
    }
    grandchild = child_of(rows["e-0"])

    os.kill(rows["e-0"].pid, signal.SIGKILL)
    again = running.ready_again(rows, {"e-0"})
    assert gone(grandchild)
    assert again["e-0"].restarts == 1

    grandchild = child_of(again["e-1"])
    os.kill(actor_of(again["e-1"]).report.actor_pid, signal.SIGKILL)
    until(lambda: gone(again["e-1"].pid) and gone(grandchild), "the engine has outlived its actor")
    rows = running.ready_again(again, {"e-1"})

    grandchild = child_of(rows["e-1"])
    ray.kill(ray.get_actor(actor_of(rows["e-1"]).actor, "raykv"))
    until(lambda: gone(rows["e-1"].pid) and gone(grandchild), "the engine has outlived its actor, which Ray ended")
    rows = running.ready_again(rows, {"e-1"})

    os.kill(running.controller.info().pid, signal.SIGKILL)
    lists: list[int] = []

    def back() -> bool:
        """What the router would be told meanwhile: nothing, or all."""
        with contextlib.suppress(Exception):
            lists.append(len(ray.get(ray.get_actor(CONTROLLER, "raykv").engines.remote(), timeout=30)))
        return bool(lists) and _answers(running)

    until(back, "the Controller did not come back")
    assert set(lists) == {2}
    assert running.ready_again(rows, set()).keys() == rows.keys()


def _answers(running: Running) -> bool:
    try:
        return running.status().ready
    except Exception:
        return False


def test_a_node_that_dies_is_replaced_and_one_that_joins_is_used(sim: SimCluster, running: Running) -> None:
    victim = sim.add(num_cpus=2, resources={"big": 1}, **SMALL)
    wanted = spec(
        {"name": "fixed", "resources": {"num_cpus": 1, "labels": {"pool": "decode"}}},
        {
            "name": "movable",
            "resources": {"num_cpus": 1, "custom": {"big": 1}},
            "options": {"grandchild": True},
        },
    )
    rows = {row.name: row for row in running.up(wanted).engines}
    assert rows["movable-0"].node == victim.node_id
    grandchild = child_of(rows["movable-0"])
    sim.kill(victim)
    until(lambda: gone(rows["movable-0"].pid) and gone(grandchild), "the engine has outlived its raylet")
    waiting = until(
        lambda: next((r for r in running.status().engines if r.name == "movable-0" and r.state == "waiting"), None),
        "the lost node was not noticed",
    )
    assert "big" in waiting.error
    new = sim.add(num_cpus=2, resources={"big": 1}, **SMALL)
    again = running.ready_again(rows, {"movable-0"})
    assert again["movable-0"].node == new.node_id


def test_a_drained_node_is_left_when_the_successor_is_ready(sim: SimCluster, running: Running) -> None:
    rows = {row.name: row for row in running.up(spec({"name": "e", "replicas": 2})).engines}
    node = rows["e-1"].node
    assert launch.drain(node[:10], running.lines.append, timeout=PATIENCE_S) == node
    moved = running.ready_again(rows, {"e-1"})
    assert moved["e-1"].node != node
    states = [(line.name, line.state) for line in running.lines if line.name == "e-1"]
    assert states.index(("e-1", "leaving")) < len(states)
    assert {row.node: row.state for row in running.status().nodes}[node] == "drained"
    assert launch.undrain(node) == node
    until(lambda: running.status().ready, "it is not ready after undrain")
    assert running.rows()["e-1"].pid == moved["e-1"].pid  # nothing moves back by itself


def test_a_failed_start_shows_the_last_lines_and_leaves_nothing(running: Running) -> None:
    with pytest.raises(launch.LaunchError, match=r"(?s)Engine e-0 could not start.*no such option --fooo"):
        running.up(spec({"name": "e", "options": {"fail": "no such option --fooo"}}))
    assert not running.down()


def test_a_failed_change_goes_back_to_what_was(running: Running) -> None:
    rows = {row.name: row for row in running.up(spec({"name": "e"})).engines}
    with pytest.raises(launch.LaunchError):
        running.up(spec({"name": "e"}, {"name": "other", "options": {"fail": "no"}}))
    until(lambda: running.rows().keys() == {"e-0"} and running.status().ready, "it did not go back")
    assert running.rows()["e-0"].pid == rows["e-0"].pid


@pytest.mark.parametrize(
    ("wanted", "match"),
    [
        (({"name": "e", "resources": {"labels": {"pool": "nowhere"}}},), "pool=nowhere is not on it"),
        (({"name": "e", "resources": {"num_gpus": 8}},), "of GPU and 8 is wanted"),
        (({"name": "e", "replicas": 50},), "finds no node"),
    ],
)
def test_what_fits_nowhere_is_said_before_anything_starts(
    running: Running, wanted: tuple[dict[str, Any], ...], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        running.up(spec(*wanted))
    assert not running.down()


def test_a_model_path_a_store_and_a_port_that_can_not_be(running: Running, tmp_path: Path) -> None:
    missing = spec({"name": "e"}).raw.replace('"tiny"', json.dumps(str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="none does not exist on it"):
        running.up(spec_from(missing))
    with pytest.raises(ConfigError, match=r"the host tier of store default has 1048576.0 GiB"):
        running.up(spec({"name": "e"}, tiers=[{"medium": "host", "capacity": "1PiB"}]))
    [port] = free_ports(1)
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ConfigError, match=f"router.port is {port}"):
            running.up(spec({"name": "e"}, router={"port": port}))
    assert not running.down()


def test_a_store_runs_on_the_engines_node_and_ends_with_down(running: Running) -> None:
    from raykv.actors import store_handle

    status = running.up(spec({"name": "e"}, tiers=[{"medium": "host", "capacity": "64MiB"}]))
    [store] = status.stores
    assert (store.state, store.node) == ("up", status.engines[0].node)
    os.kill(store_pid(store.node), signal.SIGKILL)  # Ray restarts it
    until(lambda: running.status().ready, "the store did not come back")
    assert running.rows()["e-0"].pid == status.engines[0].pid
    running.down()
    assert store_handle.stores() == []


def raykv(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "raykv.cli", *arguments, "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S * 2)
    return {"rc": done.returncode, **json.loads(done.stdout)}


def test_the_command_line_with_a_router(sim: SimCluster, running: Running, tmp_path: Path) -> None:
    [port] = free_ports(1)
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump({**json.loads(spec({"name": "e"}).raw), "router": {"port": port}}))
    up = raykv("up", str(file))
    assert up["rc"] == 0, up
    assert up["router"] == f"http://127.0.0.1:{port}"
    [engine] = up["engines"]
    status = raykv("status")["cluster"]
    assert status["ready"] and status["engines"][0]["pid"] == engine["pid"]
    with urllib.request.urlopen(f"{up['router']}/health", timeout=60) as answer:
        assert answer.status == 200
    [replica] = router_replicas()
    assert parent_of(replica) == sim.head_raylet, "it would be lost with a node of the engines"
    again = raykv("up", str(file))
    assert again["engines"] == up["engines"] and router_replicas() == [replica]
    file.write_text(file.read_text().replace("model:", "modle:"))
    wrong = raykv("up", str(file))
    assert (wrong["rc"], wrong["type"]) == (1, "ConfigError")
    assert "Did you mean" in wrong["error"]
    down = raykv("down")
    assert down == {"rc": 0, "ended": True}
    assert gone(engine["pid"])
    assert raykv("status")["cluster"] is None
    assert raykv("down") == {"rc": 0, "ended": False}


def store_pid(node: str) -> int:
    import ray

    from raykv.actors import store_handle

    name = store_handle.store_name("default", node)
    return int(store_handle.StoreHandle(name, ray.get_actor(name, "raykv")).call("info", timeout=60)["pid"])
