"""The reconciler against a model of a cluster in which anything may fail at any time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.cluster_messages import EngineState
from raykv.core.reconcile import (
    Action,
    DrainStore,
    ForgetNode,
    Instance,
    Reconciler,
    Seen,
    SeenEngine,
    StartEngine,
    StartStore,
    StopEngine,
    Target,
    Wanted,
    subject,
)

NODES = ("n1", "n2", "n3")
REPLICAS = ("a-0", "a-1", "b-0")


def wanted(*engines: tuple[str, str | None], digest: str = "d", store: str | None = "s") -> Wanted:
    targets = {replica: Target(node, digest, store) for replica, node in engines}
    return Wanted(targets, frozenset((store, node) for _, node in engines if node and store))


@dataclass
class World:
    """Carries actions out at once, and lets an engine get ready one step after its start."""

    seen: Seen = field(default_factory=lambda: Seen(nodes=frozenset(NODES)))

    def do(self, action: Action, want: Wanted) -> None:
        engines, stores = dict(self.seen.engines), set(self.seen.stores)
        match action:
            case StartEngine(instance):
                assert instance not in engines
                assert instance.node in self.seen.nodes
                engines[instance] = SeenEngine(EngineState.STARTING, want.engines[instance.replica].digest)
            case StopEngine(instance):
                del engines[instance]
            case StartStore(at):
                assert at not in stores
                stores.add(at)
            case DrainStore(at):
                for one, engine in engines.items():
                    target = want.engines.get(one.replica)
                    assert one.node != at[1] or (target and (target.node, target.digest) == (one.node, engine.digest))
                stores.remove(at)
            case ForgetNode(node):
                assert node not in self.seen.nodes
        self.seen = replace(self.seen, engines=engines, stores=frozenset(stores))

    def get_ready(self) -> None:
        engines = {
            instance: replace(engine, state=EngineState.READY)
            if engine.state in (None, EngineState.STARTING)
            else engine
            for instance, engine in self.seen.engines.items()
        }
        self.seen = replace(self.seen, engines=engines)

    def lose(self, node: str) -> None:
        self.seen = Seen(
            {one: engine for one, engine in self.seen.engines.items() if one.node != node},
            frozenset(at for at in self.seen.stores if at[1] != node),
            self.seen.nodes - {node},
        )

    def break_engine(self, instance: Instance, state: EngineState | None) -> None:
        """Its process ends (FAILED), or its actor too (None)."""
        engines = dict(self.seen.engines)
        if state is None:
            engines.pop(instance, None)
        elif instance in engines:
            engines[instance] = replace(engines[instance], state=state)
        self.seen = replace(self.seen, engines=engines)


def run(reconciler: Reconciler, world: World, want: Wanted, now: float, steps: int = 16) -> float:
    """Until nothing is left to do; time goes on by more than the longest pause."""
    for _ in range(steps):
        now += 100
        for action in reconciler.step(want, world.seen, frozenset(), now):
            world.do(action, want)
            what = subject(action)
            if isinstance(action, StartEngine) and isinstance(what, Instance):
                reconciler.adopt(what)
            if isinstance(action, StopEngine) and isinstance(what, Instance):
                reconciler.dismiss(what)
        world.get_ready()
    return now


def assert_as_wanted(world: World, want: Wanted) -> None:
    expected = {Instance(r, t.node): t.digest for r, t in want.engines.items() if t.node in world.seen.nodes}
    assert {one: engine.digest for one, engine in world.seen.engines.items()} == expected
    assert world.seen.stores == frozenset(at for at in want.stores if at[1] in world.seen.nodes)


targets = st.fixed_dictionaries(
    {},
    optional={
        r: st.tuples(st.sampled_from([*NODES, None]), st.sampled_from(["d", "e"]), st.sampled_from(["g", ""]))
        for r in REPLICAS
    },
)
wants = targets.map(
    lambda chosen: Wanted(
        {replica: Target(node, digest, "s", group) for replica, (node, digest, group) in chosen.items()},
        frozenset(("s", node) for node, _, _ in chosen.values() if node),
    )
)
seens = st.builds(
    lambda engines, stores: Seen(engines, frozenset(("s", node) for node in stores), frozenset(NODES)),
    st.dictionaries(
        st.builds(Instance, st.sampled_from(REPLICAS), st.sampled_from(NODES)),
        st.builds(SeenEngine, st.sampled_from([*EngineState, None]), st.sampled_from(["d", "e"])),
    ),
    st.sets(st.sampled_from(NODES)),
)


@given(wants, seens)
def test_it_converges_from_anywhere_and_then_does_nothing(want: Wanted, seen: Seen) -> None:
    world, reconciler = World(seen), Reconciler()
    # An engine that is on its way out, or does not answer its health check, ends or recovers by itself.
    for one, engine in seen.engines.items():
        if engine.state in (EngineState.STOPPING, EngineState.UNHEALTHY):
            world.break_engine(one, EngineState.FAILED)
    now = run(reconciler, world, want, 0.0)
    assert_as_wanted(world, want)
    assert reconciler.step(want, world.seen, frozenset(), now + 1000) == []


@given(wants, seens)
def test_what_is_right_is_never_touched(want: Wanted, seen: Seen) -> None:
    for action in Reconciler().step(want, seen, frozenset(), 0.0):
        if isinstance(action, StopEngine):
            engine, target = seen.engines[action.instance], want.engines.get(action.instance.replica)
            right = target and target.node == action.instance.node and target.digest == engine.digest
            over = engine.state in (EngineState.FAILED, EngineState.STOPPED)
            assert over or not right
            assert over or action.empty  # what serves finishes its requests first
        if isinstance(action, DrainStore):
            assert action.at not in want.stores


@given(wants, seens, st.sets(st.sampled_from(REPLICAS)), st.sets(st.sampled_from(NODES)))
def test_what_is_busy_is_left_alone(want: Wanted, seen: Seen, replicas: set[str], nodes: set[str]) -> None:
    busy = frozenset([Instance(r, n) for r in replicas for n in NODES] + [("s", n) for n in nodes])
    for action in Reconciler().step(want, seen, busy, 0.0):
        assert subject(action) not in busy


@given(wants, st.lists(st.tuples(st.sampled_from(["fail", "vanish", "lose"]), st.integers(0, 5)), max_size=6))
def test_it_converges_after_any_faults(want: Wanted, faults: list[tuple[str, int]]) -> None:
    world, reconciler = World(), Reconciler()
    now = run(reconciler, world, want, 0.0)
    for kind, number in faults:
        instances = sorted(world.seen.engines)
        if kind == "lose" and len(world.seen.nodes) > 1:
            world.lose(sorted(world.seen.nodes)[number % len(world.seen.nodes)])
        elif instances:
            world.break_engine(instances[number % len(instances)], EngineState.FAILED if kind == "fail" else None)
        now = run(reconciler, world, want, now)
        assert_as_wanted(world, want)


def test_an_engine_waits_for_the_store_of_its_node() -> None:
    want = wanted(("a-0", "n1"))
    reconciler = Reconciler()
    assert reconciler.step(want, Seen(nodes=frozenset(NODES)), frozenset(), 0) == [StartStore(("s", "n1"))]
    seen = Seen(stores=frozenset([("s", "n1")]), nodes=frozenset(NODES))
    assert reconciler.step(want, seen, frozenset(), 0) == [StartEngine(Instance("a-0", "n1"))]


@pytest.mark.parametrize("state", [EngineState.FAILED, None])
def test_what_keeps_failing_is_tried_ever_more_rarely(state: EngineState | None) -> None:
    want, world, reconciler = wanted(("a-0", "n1"), store=None), World(), Reconciler()
    starts = []
    for second in range(200):
        for action in reconciler.step(want, world.seen, frozenset(), float(second)):
            world.do(action, want)
            if isinstance(action, StartEngine):
                starts.append(second)
                reconciler.adopt(action.instance)
        world.break_engine(Instance("a-0", "n1"), state)
    pauses = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert pauses == sorted(pauses)
    assert pauses[0] <= 3
    assert pauses[-1] >= 60
    assert reconciler.backoff.failures("a-0") == pytest.approx(len(starts), abs=1)


def test_a_first_failure_after_long_service_is_repaired_at_once() -> None:
    want, world, reconciler = wanted(("a-0", "n1"), store=None), World(), Reconciler()
    now = run(reconciler, world, want, 0.0)
    for _ in range(5):
        world.break_engine(Instance("a-0", "n1"), EngineState.FAILED)
        [stop] = reconciler.step(want, world.seen, frozenset(), now)
        world.do(stop, want)
        assert reconciler.step(want, world.seen, frozenset(), now) == []
        [start] = reconciler.step(want, world.seen, frozenset(), now + 1.0)
        world.do(start, want)
        now = run(reconciler, world, want, now)


def test_an_engine_leaves_a_drained_node_when_its_successor_is_ready() -> None:
    world, reconciler = World(), Reconciler()
    now = run(reconciler, world, wanted(("a-0", "n1"), ("b-0", "n2")), 0.0)
    moved = wanted(("a-0", "n2"), ("b-0", "n2"))
    actions = reconciler.step(moved, world.seen, frozenset(), now)
    assert actions == [StartEngine(Instance("a-0", "n2"))]
    world.do(actions[0], moved)
    assert reconciler.step(moved, world.seen, frozenset(), now) == []  # it starts, the old one serves
    world.get_ready()
    [stop] = reconciler.step(moved, world.seen, frozenset(), now)
    assert stop == StopEngine(Instance("a-0", "n1"), True, "its successor is ready")
    world.do(stop, moved)
    assert reconciler.step(moved, world.seen, frozenset(), now) == [DrainStore(("s", "n1"))]


def grouped(digest: str) -> Wanted:
    return Wanted({name: Target(node, digest, None, "g") for name, node in zip(REPLICAS, NODES, strict=True)})


def test_a_changed_spec_changes_one_of_a_group_at_a_time() -> None:
    world, reconciler = World(), Reconciler()
    now = run(reconciler, world, grouped("d"), 0.0)
    want = grouped("e")
    order = []
    for _ in range(30):
        now += 1
        for action in reconciler.step(want, world.seen, frozenset(), now):
            world.do(action, want)
            if isinstance(action, StopEngine):
                assert action.empty
                order.append(action.instance.replica)
                reconciler.dismiss(action.instance)
            elif isinstance(action, StartEngine):
                reconciler.adopt(action.instance)
        serving = [one for one, engine in world.seen.engines.items() if engine.state is EngineState.READY]
        assert len(serving) >= len(REPLICAS) - 1
        world.get_ready()
    assert order == list(REPLICAS)
    assert_as_wanted(world, want)


def test_one_that_is_to_go_elsewhere_waits_for_its_turn_too() -> None:
    world, reconciler = World(), Reconciler()
    now = run(reconciler, world, grouped("d"), 0.0)
    want = Wanted({name: Target(node, "e", None, "g") for name, node in zip(REPLICAS, NODES[::-1], strict=True)})
    actions = reconciler.step(want, world.seen, frozenset(), now)
    assert {action.instance.replica for action in actions if isinstance(action, StopEngine | StartEngine)} == {"a-0"}
    run(reconciler, world, want, now)
    assert_as_wanted(world, want)


def test_a_changed_spec_that_does_not_work_goes_no_further() -> None:
    world, reconciler = World(), Reconciler()
    now = run(reconciler, world, grouped("d"), 0.0)
    want = grouped("e")
    for _ in range(300):
        now += 1
        for action in reconciler.step(want, world.seen, frozenset(), now):
            world.do(action, want)
            if isinstance(action, StartEngine):
                reconciler.adopt(action.instance)
        for one, engine in world.seen.engines.items():
            if engine.state is EngineState.STARTING:
                world.break_engine(one, EngineState.FAILED)
    kept = {one.replica for one, engine in world.seen.engines.items() if engine.digest == "d"}
    assert kept == set(REPLICAS[1:])
    # The spec before is wanted again: only the one that was changed is touched.
    now = run(reconciler, world, grouped("d"), now)
    assert_as_wanted(world, grouped("d"))


def test_a_lost_node_is_forgotten_once_and_is_no_fault_of_its_engines() -> None:
    world, reconciler = World(), Reconciler()
    now = run(reconciler, world, wanted(("a-0", "n1")), 0.0)
    world.lose("n1")
    moved = wanted(("a-0", "n2"))
    actions = reconciler.step(moved, world.seen, frozenset(), now)
    assert actions == [ForgetNode("n1"), StartStore(("s", "n2"))]
    assert reconciler.backoff.failures("a-0") == 0
    assert ForgetNode("n1") not in reconciler.step(moved, world.seen, frozenset(), now)
