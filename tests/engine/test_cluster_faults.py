"""One prefill and two decode engines on three nodes under a load of requests, while one part after the other is killed.

The cluster is one for the whole module, and the faults come in an order: the harshest last. Each adds a row to the
report ($RAYKV_FAULTS_REPORT, faults-report.json), of which docs/soak.md has the last one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raykv.actors.processes import command_of, pids, session_of
from raykv.launch import up as launch
from raykv.launch.spec_file import spec_from
from raykv.types import NODE_CHARS
from tests.support import process
from tests.support.cluster_load import Load, Outcome
from tests.support.prompts import MAX_TOKENS, PROMPTS, prompt
from tests.support.real_cluster import BLOCK, Answer, RealCluster, ask, spec, tiers_for, until
from tests.support.sim_cluster import SimCluster, router_replicas

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(1800)]

# Room for two engines, so that one finds another place when its node is drained or dies.
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}
OWN_DISKS = os.geteuid() == 0
LIMIT_S = 120.0
"""No request takes longer, whatever is killed: a bound for a hang."""
HEAD_AWAY_S = 90.0
SMALL_KV = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 128}
"""Blocks for a third of the load's prompts, so that the tiers are needed all the time."""


@pytest.fixture(scope="module")
def sim() -> Iterator[SimCluster]:
    cluster = SimCluster([], durable=True)
    try:
        for _ in range(3):
            cluster.add(own_disk=OWN_DISKS, **NODE)
        yield cluster
    finally:
        cluster.stop()


class Report:
    """Rows by fault, written after each."""

    def __init__(self) -> None:
        self._path = Path(os.environ.get("RAYKV_FAULTS_REPORT", "faults-report.json"))
        self._rows: dict[str, dict[str, Any]] = {}

    def add(self, name: str, **row: Any) -> None:
        self._rows[name] = row
        self._path.write_text(json.dumps(self._rows, indent=1) + "\n")
        print(f"{name}: {row}")


@pytest.fixture(scope="module")
def report() -> Report:
    return Report()


def up(model: Path, sim: SimCluster, transport: str, report: Report, folder: Path) -> RealCluster:
    """`raykv up` to the first answer, on three nodes."""
    began = time.monotonic()
    tiers = tiers_for(transport, folder, sim.disk if OWN_DISKS else None)
    found = RealCluster(spec(model, transport, tiers, decode=2, **SMALL_KV))
    try:
        ready = time.monotonic() - began
        found.complete(PROMPTS["short"], 1)
        report.add(f"up, {transport}", ready_s=round(ready, 1), first_answer_s=round(time.monotonic() - began, 1))
        assert len({row.node for row in found.first.values()}) == 3, "each on a node of its own"
    except BaseException:
        found.down()
        raise
    return found


def check_tokens_and_reuse(cluster: RealCluster, baseline: dict[str, list[int]], report: Report, name: str) -> None:
    """Right tokens through the router, and what one decode engine was given the other one finds in its tiers."""
    decode = [engine for engine in cluster.first if engine.startswith("d-")]
    assert len(decode) == 2
    row = {}
    for asked in ("page", "long", "branch", "aligned"):
        before = {engine: cluster.seen(engine) for engine in cluster.first}
        assert cluster.complete(PROMPTS[asked], MAX_TOKENS) == baseline[asked], asked
        [served] = [engine for engine in decode if cluster.seen(engine) > before[engine]]
        assert cluster.seen("p-0") > before["p-0"], "nothing was prefilled"
        cluster.settle()
        [other] = set(decode) - {served}
        computed, external = cluster.computed(other), cluster.external(other)
        prefilled = cluster.seen("p-0")
        assert cluster.complete(PROMPTS[asked], MAX_TOKENS, other) == baseline[asked], asked
        whole = (len(PROMPTS[asked]) - 1) // BLOCK * BLOCK
        computed, external = cluster.computed(other) - computed, cluster.external(other) - external
        row[asked] = {"from tiers": int(external), "computed": int(computed)}
        # `branch` begins as `long`, which this engine has in its own memory by now.
        assert computed <= len(PROMPTS[asked]) - whole, (asked, computed, external)
        assert external >= (whole if asked != "branch" else 0)
        assert cluster.seen("p-0") == prefilled
    report.add(name, **row)


@pytest.mark.parametrize("transport", ["nixl", "fs"])
def test_the_other_transports(
    sim: SimCluster, tiny_model: Path, baseline: dict[str, list[int]], report: Report, tmp_path: Path, transport: str
) -> None:
    cluster = up(tiny_model, sim, transport, report, tmp_path)
    try:
        check_tokens_and_reuse(cluster, baseline, report, f"reuse, {transport}")
    finally:
        cluster.down()


@pytest.fixture(scope="module")
def cluster(
    sim: SimCluster, tiny_model: Path, report: Report, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealCluster]:
    found = up(tiny_model, sim, "tiers", report, tmp_path_factory.mktemp("shared"))
    try:
        yield found
    finally:
        found.down()


@pytest.fixture
def load(cluster: RealCluster, load_baseline: dict[str, list[int]]) -> Iterator[Load]:
    until(cluster.ready, f"what the test before did is not over: {cluster.status()}")
    with Load(cluster.router, cluster.model, load_baseline) as found:
        yield found


def in_hand(first: float, last: float) -> Callable[[Outcome], bool]:
    """Requests that were under way while the harm was done."""
    return lambda one: one.began <= last and one.ended >= first


def streams_in_hand(first: float, last: float) -> Callable[[Outcome], bool]:
    return lambda one: one.stream and in_hand(first, last)(one)


def nobody(first: float, last: float) -> Callable[[Outcome], bool]:
    return lambda one: False


Allowed = Callable[[float, float], Callable[[Outcome], bool]]


def survive(
    load: Load,
    report: Report,
    name: str,
    harm: Callable[[], None],
    recovered: Callable[[], Any],
    may_fail: Allowed = nobody,
    may_break: Allowed = nobody,
) -> None:
    """Do harm under load and see it repaired. `may_fail`: who may get an error; `may_break`: who may get none even."""
    load.answered_since(time.monotonic(), 4)
    began = time.monotonic()
    harm()
    done = time.monotonic()
    until(recovered, f"{name}: it did not recover")
    took = time.monotonic() - began
    load.answered_since(time.monotonic(), 8)
    seen = [one for one in load.outcomes if one.ended >= began]
    failed = [one for one in seen if not one.well]
    slowest = max(one.ended - one.began for one in seen)
    report.add(name, recovered_s=round(took, 1), requests=len(seen), failed=len(failed), slowest_s=round(slowest, 1))
    for one in failed + sorted(seen, key=lambda one: one.began - one.ended)[:3]:
        print(f"  {one.began - began:.1f} s: {one}"[:400])
    assert all(one.right for one in load.outcomes), f"wrong tokens: {[str(o) for o in load.outcomes if not o.right]}"
    assert slowest < LIMIT_S
    for one in failed:
        assert may_fail(began, done)(one) or may_break(began, done)(one), f"it should have been answered: {one}"
        assert one.answer.error or may_break(began, done)(one), f"no clear error: {one}"


def killed(pid: int) -> Callable[[], None]:
    return lambda: os.kill(pid, signal.SIGKILL)


def replaced(cluster: RealCluster, *names: str) -> Callable[[], bool]:
    """Whether these engines run as new processes and all is ready; no other may have been touched."""
    before = {name: row.pid for name, row in cluster.rows().items()}

    def look() -> bool:
        rows = cluster.ready()
        if rows is None or any(rows[name].pid == before[name] for name in names):
            return False
        assert all(rows[name].pid == pid for name, pid in before.items() if name not in names), "another was touched"
        return True

    return look


def test_what_one_decode_engine_was_given_the_other_finds(
    cluster: RealCluster, baseline: dict[str, list[int]], report: Report
) -> None:
    check_tokens_and_reuse(cluster, baseline, report, "reuse, tiers")


def test_the_spec_is_changed(cluster: RealCluster, load: Load, report: Report) -> None:
    """Both decode engines are started anew with another option, one after the other, and nothing else is."""
    names = ["d-0", "d-1"]
    wanted = json.loads(cluster.status().spec)
    for entry in wanted["engines"]:
        if entry["name"] == "d":
            entry["options"] = {**entry.get("options", {}), "max_num_seqs": 6}
    replicas, done = router_replicas(), replaced(cluster, *names)
    cluster.lines.clear()

    def change() -> None:
        launch.up(spec_from(json.dumps(wanted)), cluster.lines.append)

    survive(load, report, "a changed spec", change, done)
    assert router_replicas() == replicas
    for row in (cluster.rows()[name] for name in names):
        command = command_of(row.pid)
        assert command[command.index("--max-num-seqs") + 1] == "6"
    lines = [(line.name, line.state) for line in cluster.lines if line.kind == "engine" and line.state != "ended"]
    touched = {
        name: [i for i, (one, state) in enumerate(lines) if one == name and state != "outdated"] for name in names
    }
    first, second = sorted(names, key=lambda name: touched[name][0])
    assert touched[first][-1] < touched[second][0], f"both were away at once: {lines}"


def test_a_node_is_drained(cluster: RealCluster, load: Load, report: Report) -> None:
    """No request fails, and what only this node had is still a hit."""
    node = cluster.rows()["d-1"].node
    kept = prompt(200, seed=77)
    tokens = cluster.complete(kept, 4, "d-1")
    done = replaced(cluster, "d-1")

    def drain() -> None:
        launch.drain(node[:12], cluster.lines.append, timeout=900)

    try:
        survive(load, report, "drain of a node", drain, done)
        assert cluster.rows()["d-1"].node != node
        assert node not in {row.node for row in cluster.status().stores}
        load.stop()
        external = cluster.external("d-0")
        assert cluster.complete(kept, 4, "d-0") == tokens
        assert cluster.external("d-0") - external == (len(kept) - 1) // BLOCK * BLOCK
    finally:
        launch.undrain(node[:12])


def test_the_directory_is_killed(cluster: RealCluster, load: Load, report: Report) -> None:
    from raykv.actors import directory_handle

    def status() -> Any:
        with contextlib.suppress(Exception):
            found = directory_handle.find_directory()
            return found.call("status", timeout=10) if found is not None else None

    before = status()
    assert before is not None and before.keys > 0

    def filled() -> bool:
        now = status()
        return now is not None and now.life != before.life and now.nodes == before.nodes and now.keys > 0

    survive(load, report, "Directory", killed(before.pid), filled)


def test_the_controller_is_killed(cluster: RealCluster, load: Load, report: Report) -> None:
    pid = cluster.controller.info().pid
    untouched = replaced(cluster)

    def back() -> bool:
        with contextlib.suppress(Exception):
            return cluster.controller.info().pid != pid and untouched()
        return False

    survive(load, report, "Controller", killed(pid), back)


def test_a_store_is_killed(cluster: RealCluster, load: Load, report: Report) -> None:
    """It is back when its engine loads from it again."""
    row = cluster.rows()["d-0"]
    pid = cluster.store(row.node).call("info", timeout=60)["pid"]

    def loaded() -> float:
        return cluster.metric("d-0", "vllm:raykv_tier_tokens_loaded_total")

    at_new: list[float] = []

    def back() -> bool:
        with contextlib.suppress(Exception):
            if cluster.store(row.node).call("info", timeout=10)["pid"] == pid:
                return False
            at_new[:] = at_new or [loaded()]
            return loaded() > at_new[0]
        return False

    untouched = replaced(cluster)
    survive(load, report, "NodeStore", killed(pid), back)
    until(untouched, "the store is not ready")


def test_the_routers_replica_is_killed(cluster: RealCluster, load: Load, report: Report) -> None:
    """Streams that it had begun end with one error; all else is asked again of its successor."""
    [pid] = router_replicas()

    def back() -> bool:
        new = set(router_replicas()) - {pid}
        return bool(new) and any(one.well and one.began > killed_at[0] for one in list(load.outcomes))

    killed_at: list[float] = []

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)
        killed_at.append(time.monotonic())

    survive(
        load, report, "router's replica", kill, back, lambda *times: lambda one: one.stream and in_hand(*times)(one)
    )


def test_the_prefill_engine_is_killed(cluster: RealCluster, load: Load, report: Report) -> None:
    """Decode engines compute prompts themselves meanwhile."""
    survive(load, report, "prefill engine", killed(cluster.rows()["p-0"].pid), replaced(cluster, "p-0"))


def test_a_decode_engine_is_killed(cluster: RealCluster, load: Load, report: Report) -> None:
    """A stream that had begun there ends with an error; all others are answered by the other engine."""
    many = 500
    asked = {name: PROMPTS[name] for name in ("short", "page", "aligned")}
    expected = {name: cluster.complete(tokens, many) for name, tokens in asked.items()}
    so_far: dict[str, list[int]] = {name: [] for name in asked}
    streams: dict[str, Future[Answer]] = {}
    victim: list[str] = []
    with ThreadPoolExecutor(len(asked)) as pool:

        def kill() -> None:
            for name, tokens in asked.items():
                streams[name] = pool.submit(ask, cluster.router, cluster.model, tokens, many, True, so_far[name])
            until(lambda: all(so_far.values()), "the streams did not begin")
            # Who has most requests has a stream: the load is two at most.
            victim.append(max(("d-0", "d-1"), key=lambda name: cluster.metric(name, "vllm:num_requests_running")))
            os.kill(before[victim[0]].pid, signal.SIGKILL)

        before = cluster.rows()
        looks = {name: replaced(cluster, name) for name in ("d-0", "d-1")}
        survive(load, report, "decode engine", kill, lambda: looks[victim[0]](), in_hand)
    answers = {name: stream.result() for name, stream in streams.items()}
    for name, answer in answers.items():
        assert answer.tokens == expected[name][: len(answer.tokens)] and not answer.broken, answer
        assert bool(answer.error) == (len(answer.tokens) < many)
    errors = [answer.error for answer in answers.values() if answer.error]
    report.add("decode engine, streams", begun=len(streams), ended_by_an_error=len(errors))
    assert errors and all(f"engine {victim[0]}" in error for error in errors), answers


def test_the_head_is_away(sim: SimCluster, cluster: RealCluster, load: Load, report: Report) -> None:
    untouched = replaced(cluster)
    load.answered_since(time.monotonic(), 2)
    sim.lose_head()
    lost = time.monotonic()
    load.answered_since(lost, 4)
    while time.monotonic() < lost + HEAD_AWAY_S:
        time.sleep(1)  # the outage itself
    assert cluster.ready() is None, "nobody noticed"
    failed = [str(one) for one in load.outcomes if not one.well]
    assert not failed, failed
    report.add("head away", away_s=HEAD_AWAY_S, requests=len(load.outcomes), failed=len(failed))
    survive(load, report, "head back", sim.restart_head, untouched)


def test_a_node_dies(sim: SimCluster, cluster: RealCluster, load: Load, report: Report) -> None:
    """Its engine is started on another node; a new node is used for the stores' sake and engines to come."""
    victim = next(node for node in sim.nodes if node.node_id == cluster.rows()["d-1"].node)
    lost = [row for row in cluster.rows().values() if row.node == victim.node_id]
    others = [row.name for row in lost]
    processes = [pid for pid in pids() if session_of(pid) in {row.pid for row in lost}]
    assert len(processes) >= 3 * len(lost)  # a server, an EngineCore and a worker each
    survive(load, report, "whole node", lambda: sim.kill(victim), replaced(cluster, *others), in_hand)
    left = [pid for pid in processes if session_of(pid) is not None]
    assert not left, f"these have outlived their node: {left}"
    # A machine that is lost takes its memory along; here it was this machine's.
    memory = list(process.SHM.glob(f"raykv-*-{victim.node_id[:NODE_CHARS]}.*"))
    assert memory
    for path in memory:
        path.unlink()
    sim.add(own_disk=OWN_DISKS, **NODE)
    until(lambda: len(cluster.status().nodes) == 4, "the new node is not seen")  # with the head's
    load.answered_since(time.monotonic(), 4)
