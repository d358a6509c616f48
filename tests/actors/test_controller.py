"""The Controller over a world in memory: what it does, what it remembers, and what it must not touch."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from raykv.actors.controller import Controller
from raykv.actors.controller_reports import SILENT_S
from raykv.actors.controller_targets import LINGER_S, SETTLE_S
from raykv.actors.controller_world import FoundEngine, NodeRecord, Record, StoreBusy, WorldError
from raykv.actors.node_facts import NodeFacts
from raykv.cluster_messages import EngineOrder, EngineReport, EngineState
from raykv.core.reconcile import Instance, StoreAt
from raykv.errors import ClusterError, ConfigError
from raykv.store_messages import StoreSpec
from tests.support.waiting import eventually

GIB = 1 << 30


@dataclass
class MemoryWorld:
    """Implements World. Engines get ready when `ready` says so; calls are recorded."""

    node_ids: list[str] = field(default_factory=lambda: ["n1", "n2"])
    found: dict[Instance, FoundEngine] = field(default_factory=dict)
    there: set[StoreAt] = field(default_factory=set)
    taken: dict[Instance, Mapping[str, float]] = field(default_factory=dict)
    record: bytes | None = None
    trouble: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    start_state: EngineState | None = EngineState.READY
    store_error: str = ""
    used_stores: set[StoreAt] = field(default_factory=set)
    hold: threading.Event = field(default_factory=threading.Event)
    memory: int = 64 * GIB

    def __post_init__(self) -> None:
        self.hold.set()

    def problem(self) -> str:
        return self.trouble

    def nodes(self) -> list[NodeRecord]:
        records = []
        for node in self.node_ids:
            free = 4.0 - sum(r.get("CPU", 0) for i, r in self.taken.items() if i.node == node)
            records.append(NodeRecord(node, f"host-{node}", "127.0.0.1", {}, {"CPU": 4.0}, {"CPU": free}))
        return records

    def probe(self, nodes: Collection[str], folders: Sequence[str], model: str | None) -> Mapping[str, NodeFacts]:
        return {node: NodeFacts(self.memory, dict.fromkeys(folders, GIB), None, "") for node in nodes}

    def engines(self, nodes: Collection[str]) -> Mapping[Instance, FoundEngine]:
        return {instance: engine for instance, engine in self.found.items() if instance.node in nodes}

    def stores(self, nodes: Collection[str]) -> frozenset[StoreAt]:
        return frozenset(at for at in self.there if at[1] in nodes)

    def start_engine(self, instance: Instance, order: EngineOrder, resources: Mapping[str, float]) -> None:
        self.calls.append(("start", instance))
        assert instance not in self.found
        report = None
        if self.start_state is not None:
            report = EngineReport(
                order.name, order.role, self.start_state, "http://x:1", instance.node, 1, 1, order.digest
            )
        self.found[instance] = FoundEngine(str(instance), order.digest, report)
        self.taken[instance] = resources

    def stop_engine(self, instance: Instance, empty: bool) -> None:
        self.calls.append(("empty" if empty else "stop", instance))
        assert self.hold.wait(30)
        self.found.pop(instance, None)
        self.taken.pop(instance, None)

    def start_store(self, spec: StoreSpec, node: str) -> None:
        if self.store_error:
            raise WorldError(self.store_error)
        self.calls.append(("store", (spec.name, node)))
        self.there.add((spec.name, node))

    def drain_store(self, at: StoreAt, leaves: bool) -> None:
        if at in self.used_stores and not leaves:
            raise StoreBusy("it is used")
        self.calls.append(("drain", at))
        self.there.discard(at)

    def end_store(self, at: StoreAt) -> None:
        self.calls.append(("end", at))
        self.there.discard(at)

    def load(self) -> Record:
        return Record.from_bytes(self.record)

    def save(self, record: Record) -> None:
        self.record = record.to_bytes()

    def set_state(self, instance: Instance, state: EngineState | None, error: str = "") -> None:
        engine = self.found[instance]
        report = engine.report
        if state is None:
            self.found[instance] = replace(engine, report=None)
        else:
            assert report is not None
            self.found[instance] = replace(
                engine, report=replace(report, state=state, error=error, log_tail=("last",) if error else ())
            )


class Bench:
    """A Controller that is ticked by hand, with a clock that is set by hand."""

    def __init__(self, world: MemoryWorld) -> None:
        self.world, self.now = world, 0.0
        self.controller = Controller(world, clock=lambda: self.now, start=False)

    def tick(self, seconds: float = 1.0) -> None:
        """One look, and wait for what it began."""
        self.now += seconds
        self.controller.tick()
        deadline = time.monotonic() + 30
        while self.world.hold.is_set() and (self.controller._busy or self.controller._probing):
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def ticks(self, number: int = 8, seconds: float = 1.0) -> None:
        for _ in range(number):
            self.tick(seconds)

    def states(self) -> dict[str, str]:
        return {row.name: row.state for row in self.controller.status().engines}


def raw(*engines: dict[str, Any], **more: Any) -> str:
    return json.dumps({"model": "m", "engines": list(engines) or [{"name": "e"}], **more})


STORE = {"tiers": [{"medium": "host", "capacity": GIB}]}


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(MemoryWorld())
    yield made
    made.world.hold.set()
    made.controller.close()


def test_up_then_nothing_more_then_down(bench: Bench) -> None:
    bench.controller.apply(raw({"name": "e", "replicas": 2}, **STORE))
    bench.ticks()
    assert bench.states() == {"e-0": "ready", "e-1": "ready"}
    assert bench.controller.status().ready
    assert {info.node for info in bench.controller.engines() if info.ready} == {"n1", "n2"}
    bench.world.calls.clear()
    bench.ticks()
    assert bench.world.calls == []
    bench.controller.down()
    bench.ticks()
    status = bench.controller.status()
    assert (status.spec, status.engines, status.stores) == ("", (), ())
    assert bench.world.load() == Record()


def test_a_new_life_adopts_what_runs_and_knows_what_is_wanted(bench: Bench) -> None:
    bench.controller.apply(raw({"name": "e", "replicas": 2}, **STORE))
    bench.ticks()
    bench.world.calls.clear()
    bench.world.found.pop(Instance("e-1", "n2"))
    bench.world.taken.pop(Instance("e-1", "n2"))
    later = Bench(bench.world)
    later.ticks()
    assert bench.world.calls == [("start", Instance("e-1", "n2"))]
    assert later.controller.status().ready


def test_a_new_life_lists_no_engines_before_it_has_heard_of_all(bench: Bench) -> None:
    """An empty list, or half of one, would have the router refuse requests."""
    bench.controller.apply(raw({"name": "e", "replicas": 2}))
    bench.ticks()
    bench.world.set_state(Instance("e-1", "n2"), None)
    later = Bench(bench.world)
    with pytest.raises(ClusterError, match="has not heard"):
        later.controller.engines()
    later.ticks()
    with pytest.raises(ClusterError, match="has not heard"):
        later.controller.engines()
    later.tick(SILENT_S)  # it hangs: the others are not kept from their work for ever
    assert [info.name for info in later.controller.engines()] == ["e-0"]


def test_an_engine_whose_actor_is_slow_to_answer_stays_in_the_list(bench: Bench) -> None:
    bench.controller.apply(raw({"name": "e", "replicas": 2}))
    bench.ticks()
    before = bench.controller.engines()
    bench.world.set_state(Instance("e-1", "n2"), None)
    bench.ticks()
    assert bench.states()["e-1"] == "no answer"
    assert bench.controller.engines() == before


def test_the_status_of_a_new_life_waits_for_its_first_look() -> None:
    world = MemoryWorld()
    bench = Bench(world)
    bench.controller.apply(raw())
    bench.ticks()
    seen, go = threading.Event(), threading.Event()
    nodes = world.nodes

    def slow() -> list[NodeRecord]:
        seen.set()
        assert go.wait(30)
        return nodes()

    world.nodes = slow  # type: ignore[method-assign]
    later = Controller(world)
    try:
        later.wake()
        assert seen.wait(30)
        with ThreadPoolExecutor(1) as pool:
            status = pool.submit(later.status)
            with pytest.raises(TimeoutError):
                status.result(0.2)
            go.set()
            assert [row.name for row in status.result(30).engines] == ["e-0"]
    finally:
        go.set()
        later.close()
        bench.controller.close()


def test_a_spec_that_can_not_be_changes_nothing(bench: Bench) -> None:
    bench.controller.apply(raw())
    bench.ticks()
    before = bench.world.record
    for wrong, match in (
        (raw({"name": "e", "replicas": 100}), "finds no node"),
        (raw(tiers=[{"medium": "host", "capacity": 100 * GIB}]), "100.0 GiB"),
        (raw({"name": "e", "rolle": "x"}), "Did you mean"),
    ):
        with pytest.raises(ConfigError, match=match):
            bench.controller.apply(wrong)
    bench.ticks()
    assert bench.world.record == before
    assert bench.states() == {"e-0": "ready"}


def test_one_that_fails_is_started_again_and_its_reason_is_kept(bench: Bench) -> None:
    bench.controller.apply(raw())
    bench.ticks()
    instance = Instance("e-0", "n1")
    bench.world.start_state = EngineState.STARTING
    bench.world.set_state(instance, EngineState.FAILED, "Its process ended by signal SIGKILL.")
    bench.ticks()
    [row] = bench.controller.status().engines
    assert (row.state, row.restarts, row.log_tail) == ("starting", 1, ("last",))
    assert row.error == "Its process ended by signal SIGKILL."
    assert bench.world.calls[-2:] == [("stop", instance), ("start", instance)]
    assert not bench.controller.engines()[0].ready


def test_one_that_is_silent_for_long_is_ended_and_not_before(bench: Bench) -> None:
    bench.controller.apply(raw())
    bench.ticks()
    instance = Instance("e-0", "n1")
    bench.world.set_state(instance, None)
    bench.world.calls.clear()
    bench.tick(SILENT_S - 2)
    bench.tick(1)
    assert bench.states() == {"e-0": "no answer"}
    assert bench.world.calls == []
    bench.tick(SILENT_S)
    assert bench.world.calls == [("stop", instance)]


def test_what_is_being_stopped_is_not_ready_and_not_stopped_twice(bench: Bench) -> None:
    bench.controller.apply(raw())
    bench.ticks()
    bench.world.hold.clear()
    bench.controller.apply(raw({"name": "other"}))
    bench.tick()
    bench.tick()
    stops = [call for call in bench.world.calls if call[1] == Instance("e-0", "n1") and call[0] == "empty"]
    assert len(stops) == 1
    assert bench.states()["e-0"] == "leaving"
    assert [info.ready for info in bench.controller.engines() if info.name.startswith("e-0")] == [False]
    bench.world.hold.set()
    bench.ticks()
    assert bench.states() == {"other-0": "ready"}
    assert bench.controller._reconciler.backoff.failures("e-0") == 0


def test_a_changed_spec_goes_from_one_engine_of_a_role_to_the_next(bench: Bench) -> None:
    def change(length: int) -> None:
        pair = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode", "replicas": 2}]
        bench.controller.apply(raw(*pair, vllm={"max_model_len": length}))

    change(64)
    bench.ticks()
    bench.world.start_state = EngineState.STARTING
    bench.world.calls.clear()
    change(128)
    bench.ticks()
    assert bench.states() == {"d-0": "starting", "d-1": "outdated", "p-0": "starting"}
    assert [info.name for info in bench.controller.engines() if info.ready] == ["d-1"]
    bench.world.set_state(Instance("d-0", "n2"), EngineState.READY)
    bench.ticks()
    assert bench.states() == {"d-0": "ready", "d-1": "starting", "p-0": "starting"}
    stopped = [instance.replica for call, instance in bench.world.calls if call == "empty"]
    assert stopped == ["d-0", "p-0", "d-1"]


def test_engines_whose_ports_move_to_each_other_are_changed_at_once(bench: Bench) -> None:
    bench.controller.apply(raw({"name": "e", "replicas": 2, "port": 8000}))
    bench.ticks()
    for instance, engine in bench.world.found.items():
        assert engine.report is not None
        url = f"http://127.0.0.1:{8000 + int(instance.replica[-1])}"
        bench.world.found[instance] = replace(engine, report=replace(engine.report, url=url))
    bench.world.start_state = EngineState.STARTING
    bench.controller.apply(raw({"name": "e", "replicas": 2, "port": 8001}))
    bench.ticks()
    assert bench.states() == {"e-0": "starting", "e-1": "starting"}


def test_a_drained_node_is_emptied_when_others_have_taken_over(bench: Bench) -> None:
    bench.controller.apply(raw({"name": "e", "replicas": 2}, **STORE))
    bench.ticks()
    bench.world.start_state = EngineState.STARTING
    bench.world.calls.clear()
    assert bench.controller.drain("host-n2") == "n2"
    bench.ticks()
    names = {info.name: info.ready for info in bench.controller.engines()}
    assert names == {"e-0": True, "e-1": False, "e-1@n2": True}
    assert bench.world.calls == [("start", Instance("e-1", "n1"))]
    bench.world.set_state(Instance("e-1", "n1"), EngineState.READY)
    bench.ticks()
    assert bench.world.calls[1:] == [("empty", Instance("e-1", "n2")), ("drain", ("default", "n2"))]
    assert {row.node: row.state for row in bench.controller.status().nodes} == {"n1": "alive", "n2": "drained"}
    # It is removed, and comes back as a new node: that one is used again.
    bench.world.node_ids.remove("n2")
    bench.ticks()
    assert bench.world.load().draining == frozenset()


def test_a_drained_node_is_left_also_when_no_other_can_take_over(bench: Bench) -> None:
    bench.world.node_ids = ["n1"]
    bench.controller.apply(raw())
    bench.ticks()
    bench.controller.drain("n1")
    bench.tick(1)
    bench.tick(SETTLE_S / 2)
    assert bench.states() == {"e-0": "ready"}
    bench.tick(SETTLE_S)
    bench.tick()
    assert bench.states() == {"e-0": "waiting"}
    bench.world.node_ids.append("n2")
    bench.ticks()
    assert bench.states() == {"e-0": "ready"}


def test_a_lost_node_is_replaced_and_a_new_one_is_used(bench: Bench) -> None:
    bench.world.node_ids = ["n1", "n2", "n3"]
    bench.controller.apply(raw({"name": "e", "replicas": 3, "resources": {"num_cpus": 4}}))
    bench.ticks()
    bench.world.node_ids.remove("n2")
    bench.world.taken = {i: r for i, r in bench.world.taken.items() if i.node != "n2"}
    bench.world.calls.clear()
    bench.ticks()
    assert bench.world.calls == []
    [row] = [row for row in bench.controller.status().engines if row.state == "waiting"]
    assert "0 of its 4 CPU are free" in row.error
    bench.world.node_ids.append("n4")
    bench.ticks()
    assert bench.world.calls == [("start", Instance(row.name, "n4"))]
    assert row.restarts == 0


def test_without_a_head_nothing_is_done_and_nothing_is_lost(bench: Bench) -> None:
    bench.controller.apply(raw())
    bench.ticks()
    bench.world.trouble = "Ray's head is away"
    bench.world.calls.clear()
    bench.ticks()
    status = bench.controller.status()
    assert status.problem == "Ray's head is away"
    assert [row.state for row in status.engines] == ["ready"]
    assert not status.ready
    assert bench.controller.engines()[0].ready  # it serves as before
    assert bench.world.calls == []
    bench.world.trouble = ""
    bench.ticks()
    assert bench.controller.status().ready


def test_stores_of_others_are_not_touched(bench: Bench) -> None:
    bench.world.there = {("theirs", "n1")}
    bench.controller.apply(raw(**STORE))
    bench.ticks()
    bench.controller.down()
    bench.ticks()
    assert bench.world.there == {("theirs", "n1")}


def test_a_store_that_somebody_uses_is_not_drained(bench: Bench) -> None:
    bench.controller.apply(raw(**STORE))
    bench.ticks()
    bench.world.used_stores = {("default", "n1")}
    bench.controller.apply(raw())
    bench.ticks(100)
    assert ("default", "n1") in bench.world.there
    bench.world.used_stores.clear()
    bench.ticks(100)
    assert bench.world.there == set()


def test_a_changed_spec_is_started_where_the_old_one_was(bench: Bench) -> None:
    """On another node it would wait for what runs there, which waits for its own requests."""
    full = {"name": "e", "replicas": 2, "resources": {"num_cpus": 4}}
    bench.controller.apply(raw(full))
    bench.ticks()
    before = {row.name: row.node for row in bench.controller.status().engines}
    bench.world.calls.clear()
    bench.controller.apply(raw(full, vllm={"seed": 1}))
    bench.ticks()
    assert {row.name: row.node for row in bench.controller.status().engines} == before
    for instance in (Instance(name, node) for name, node in before.items()):
        mine = [call for call, what in bench.world.calls if what == instance]
        assert mine == ["empty", "start"]


def test_a_store_outlasts_its_engine_for_a_while(bench: Bench) -> None:
    bench.controller.apply(raw({"name": "e", "replicas": 2}, **STORE))
    bench.ticks()
    bench.controller.apply(raw({"name": "e", "replicas": 1}, **STORE))
    bench.ticks()
    assert bench.world.there == {("default", "n1"), ("default", "n2")}
    bench.ticks(3, LINGER_S)
    assert bench.world.there == {("default", "n1")}


def test_a_store_that_can_not_start_is_said(bench: Bench) -> None:
    bench.world.store_error = "The disk is full."
    bench.controller.apply(raw(**STORE))
    bench.ticks(3)
    [store] = bench.controller.status().stores
    assert (store.state, store.error) == ("failed", "The disk is full.")
    assert bench.states() == {"e-0": "launching"}
    assert not [call for call in bench.world.calls if call[0] == "start"]


def test_an_unknown_node_and_an_ambiguous_one(bench: Bench) -> None:
    with pytest.raises(ClusterError, match="'x' is not a node of this cluster"):
        bench.controller.drain("x")
    with pytest.raises(ClusterError, match="means several nodes"):
        bench.controller.drain("n")


def test_a_record_of_another_version_is_refused() -> None:
    assert Record.from_bytes(Record("s", frozenset("a"), frozenset("b")).to_bytes()) == Record(
        "s", frozenset("a"), frozenset("b")
    )
    with pytest.raises(WorldError, match="version 9"):
        Record.from_bytes(b'{"version": 9}')
    with pytest.raises(WorldError, match="can't be read"):
        Record.from_bytes(b"\x80")


@pytest.mark.process
def test_its_own_thread_looks_when_it_is_woken() -> None:
    world = MemoryWorld()
    controller = Controller(world)
    try:
        controller.apply(raw())
        eventually(lambda: controller.status().ready)
        world.trouble = "away"
        eventually(lambda: controller.status().problem == "away")
    finally:
        controller.close()
