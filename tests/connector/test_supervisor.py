"""How a child's scheduler half comes back: the supervisor with a watch that sees what the test says."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.config import parse
from raykv.connector import supervisor as module
from raykv.connector.metadata import dump
from raykv.connector.scheduler_child import ChildState, SchedulerChild
from raykv.connector.supervisor import LOOK_AT_LIVING_EVERY_S, REBUILD_PAUSE_S, Supervisor
from raykv.errors import ClusterError, HostTimeout, RayKVError
from raykv.messages import HostStatus
from raykv.types import Incarnation, Rank, RequestId, StepId

pytestmark = pytest.mark.vllm

PATIENCE = 30.0
NOW = 1000.0


class Watch:
    """What can be seen: by child and rank the hosts."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], list[HostStatus]] = {}
        self.retired: list[tuple[str, int, int]] = []
        self.error: dict[str, RayKVError] = {}  # by child; "" for the cluster
        self.looks: list[str] = []
        self.looked = threading.Event()

    def connect(self) -> None:
        self.looked.set()
        if "" in self.error:
            raise self.error[""]

    def statuses(self, child: str, rank: Rank) -> list[HostStatus]:
        self.looks.append(child)
        if child in self.error:
            raise self.error[child]
        return self.seen.get((child, rank), [])

    def retire(self, child: str, rank: Rank, incarnation: Incarnation) -> None:
        self.retired.append((child, rank, incarnation))

    def host(
        self, rank: int, incarnation: int, *, registered: bool = True, handshake: bool = True, child: str = "a"
    ) -> None:
        """One more host of this rank."""
        data = dump(f"{child} {rank} {incarnation}") if handshake else None
        status = HostStatus(1, child, Rank(rank), Incarnation(incarnation), registered, data, 0)
        self.seen.setdefault((child, rank), []).append(status)


class Connector:
    """A scheduler half of which only the end matters."""

    def __init__(self, error: Exception | None = None) -> None:
        self.shutdowns = 0
        self.error = error

    def shutdown(self) -> None:
        self.shutdowns += 1
        if self.error is not None:
            raise self.error


class Rig:
    """Two hosted children, a and b, on two ranks."""

    def __init__(self, *, run: str = "actor", error: Exception | None = None) -> None:
        raw = [
            {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"raykv": {"name": name, "run": run}}}
            for name in "ab"
        ]
        config = parse({"kv_role": "kv_both", "kv_connector_extra_config": {"connectors": raw}})
        self.watch = Watch()
        self.old = [Connector(error), Connector(error)]
        self.children = [
            SchedulerChild(child, old, 2)  # type: ignore[arg-type]
            for child, old in zip(config.children, self.old, strict=True)
        ]
        self.a = self.children[0]
        self.rebuilt: list[tuple[str, int, dict[Rank, Any]]] = []
        self.fails: Exception | None = None
        self.supervisor = Supervisor(self.children, 2, self.watch, self._rebuild)

    def _rebuild(self, child: SchedulerChild, incarnation: Incarnation, handshakes: Mapping[Rank, Any]) -> Any:
        self.rebuilt.append((child.name, incarnation, dict(handshakes)))
        if self.fails is not None:
            raise self.fails
        return Connector()

    def hosts(self, *incarnations: int) -> None:
        """By rank: the one host that lives now."""
        self.watch.seen = {}
        for rank, incarnation in enumerate(incarnations):
            self.watch.host(rank, incarnation)

    def look(self, now: float = NOW) -> None:
        self.supervisor.look(self.a, now)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_child_whose_hosts_live_is_left_alone_and_looked_at_rarely(rig: Rig) -> None:
    rig.hosts(0, 0)
    rig.look(NOW)
    rig.look(NOW + LOOK_AT_LIVING_EVERY_S / 2)
    assert rig.watch.looks == ["a", "a"]  # once for each rank
    rig.look(NOW + LOOK_AT_LIVING_EVERY_S)
    assert len(rig.watch.looks) == 4
    assert (rig.a.state, rig.watch.retired, rig.rebuilt) == (ChildState.UP, [], [])


def test_a_host_that_is_gone_takes_its_child_down(rig: Rig) -> None:
    rig.a.known = {RequestId("r")}
    rig.watch.host(0, 0)
    rig.look()
    assert (rig.a.state, rig.a.known) == (ChildState.DOWN, set())
    assert rig.watch.retired == [("a", 0, 0)], "all ranks of a child live and die together"
    assert rig.rebuilt == [] and not rig.a.has_offer


def test_a_child_comes_back_when_every_rank_has_a_new_host(rig: Rig) -> None:
    rig.a.mark_down()
    rig.a.planned = StepId(7)
    rig.hosts(1, 1)
    rig.look()
    assert rig.old[0].shutdowns == 1
    assert rig.rebuilt == [("a", 1, {0: "a 0 1", 1: "a 1 1"})]
    assert rig.a.state is ChildState.DOWN, "EngineCore's thread takes it, at a moment of its own"
    rig.look()
    assert len(rig.rebuilt) == 1, "an offer is made once"
    assert rig.a.accept() == (0, 0)
    assert (rig.a.state, rig.a.incarnations, rig.a.completed) == (ChildState.UP, (1, 1), 7)
    rig.look(NOW + 10)
    assert (rig.a.state, len(rig.rebuilt)) == (ChildState.UP, 1)


def test_dead_and_back_between_two_looks(rig: Rig) -> None:
    rig.hosts(1, 1)
    rig.look()
    assert rig.a.accept() == (0, 0)
    assert rig.old[0].shutdowns == 1


@pytest.mark.parametrize(("seen", "retired"), [((1, 0), (1, 0)), ((3, 1), (1, 1)), ((0, 0), None), ((2, 5), (0, 2))])
def test_a_rank_that_is_behind_has_to_start_again(
    rig: Rig, seen: tuple[int, int], retired: tuple[int, int] | None
) -> None:
    rig.a.mark_down()
    rig.hosts(*seen)
    rig.look()
    expected = [("a", *retired)] if retired else [("a", 0, 0), ("a", 1, 0)]
    assert (rig.watch.retired, rig.rebuilt, rig.a.has_offer) == (expected, [], False)


def test_a_host_that_has_not_registered_does_not_count(rig: Rig) -> None:
    rig.a.mark_down()
    rig.watch.host(0, 1)
    rig.watch.host(1, 1, registered=False)
    rig.look()
    assert (rig.watch.retired, rig.rebuilt) == ([], [])


def test_the_newest_of_a_ranks_hosts_counts(rig: Rig) -> None:
    rig.a.mark_down()
    for rank in (0, 1):
        rig.watch.host(rank, 2)
        rig.watch.host(rank, 1)
    rig.look()
    assert [incarnation for _, incarnation, _ in rig.rebuilt] == [2]


def test_a_child_without_handshake_metadata(rig: Rig) -> None:
    rig.a.mark_down()
    for rank in (0, 1):
        rig.watch.host(rank, 1, handshake=False)
    rig.look()
    assert rig.rebuilt == [("a", 1, {})]


def test_a_rebuild_that_fails_is_tried_again_after_a_pause(rig: Rig) -> None:
    rig.a.mark_down()
    rig.hosts(1, 1)
    rig.fails = RuntimeError("the port is taken")
    rig.look(NOW)
    rig.look(NOW + REBUILD_PAUSE_S / 2)
    assert len(rig.rebuilt) == 1 and not rig.a.has_offer
    rig.fails = None
    rig.look(NOW + REBUILD_PAUSE_S)
    assert len(rig.rebuilt) == 2 and rig.a.has_offer
    assert rig.old[0].shutdowns == 1


def test_an_old_scheduler_half_that_raises_in_shutdown_does_not_matter() -> None:
    rig = Rig(error=RuntimeError("bad"))
    rig.hosts(1, 1)
    rig.look()
    assert rig.a.has_offer


def test_a_hook_of_the_old_object_is_over_before_it_is_shut_down(rig: Rig) -> None:
    rig.hosts(1, 1)
    in_hook, go_on = threading.Event(), threading.Event()

    def hook(connector: Any) -> int:
        in_hook.set()
        assert go_on.wait(PATIENCE)
        return connector.shutdowns

    results: list[int] = []
    engine = threading.Thread(target=lambda: results.append(rig.a.call("hook", hook, -1)))
    engine.start()
    assert in_hook.wait(PATIENCE)
    looker = threading.Thread(target=rig.look)
    looker.start()
    go_on.set()
    engine.join(PATIENCE)
    looker.join(PATIENCE)
    assert results == [0]
    assert rig.old[0].shutdowns == 1
    assert rig.a.call("hook", hook, -1) == -1, "it is asked nothing until the new one was accepted"


@pytest.mark.parametrize("error", [RayKVError("no head"), HostTimeout("slow")])
def test_what_can_not_be_seen_is_not_taken_for_dead(rig: Rig, error: RayKVError) -> None:
    rig.watch.error["a"] = error
    with pytest.raises(type(error)):
        rig.look()
    assert (rig.a.state, rig.watch.retired) == (ChildState.UP, [])


def test_the_thread_goes_on_without_the_head_and_complains_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, raykv_log: list[str]
) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.001)
    rig.watch.error[""] = ClusterError("no head")
    rig.hosts(1, 1)
    rig.supervisor.start()
    for _ in range(4):
        rig.watch.looked.clear()
        assert rig.watch.looked.wait(PATIENCE)
    assert sum("can't look at its hosts" in line for line in raykv_log) == 1
    assert rig.watch.looks == []
    del rig.watch.error[""]
    for _ in range(4):
        rig.watch.looked.clear()
        assert rig.watch.looked.wait(PATIENCE)
    rig.supervisor.stop(PATIENCE)
    assert rig.a.has_offer
    assert not [thread for thread in threading.enumerate() if thread.name == "raykv-supervisor"]


def test_one_slow_host_does_not_keep_the_others_from_coming_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.001)
    rig.watch.error["a"] = HostTimeout("slow")
    for rank in (0, 1):
        rig.watch.host(rank, 1, child="b")
    rig.supervisor.start()
    for _ in range(4):
        rig.watch.looked.clear()
        assert rig.watch.looked.wait(PATIENCE)
    rig.supervisor.stop(PATIENCE)
    assert [name for name, _, _ in rig.rebuilt] == ["b"]
    assert rig.a.state is ChildState.UP


def test_inline_children_are_none_of_its_business() -> None:
    rig = Rig(run="inline")
    rig.supervisor.start()
    rig.supervisor.stop(PATIENCE)
    assert rig.watch.looks == []


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 6), min_size=2, max_size=2), st.lists(st.integers(0, 2), max_size=12))
def test_ranks_come_together_whatever_happens_meanwhile(start: list[int], deaths: list[int]) -> None:
    """A host that has to go, or dies (`deaths`: by look, the rank; 2: none), comes back one incarnation later."""
    rig = Rig()
    rig.a.mark_down()
    now, lives = NOW, list(start)
    for look in range(len(deaths) + 10):
        if look < len(deaths) and deaths[look] < 2:
            lives[deaths[look]] += 1
        rig.hosts(*lives)
        rig.watch.retired = []
        rig.look(now + look)
        for _, rank, incarnation in rig.watch.retired:
            assert lives[rank] == incarnation
            lives[rank] += 1
        if rig.a.has_offer:
            break
    assert rig.a.accept() == (0, 0)
    assert rig.a.incarnations == tuple(lives) and min(lives) > 0
