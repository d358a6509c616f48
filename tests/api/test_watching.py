"""Events between two looks, the stream of them, and rates."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import pytest

from raykv.api import Cluster, rates
from raykv.api.watching import changes
from raykv.errors import ClusterError, ConfigError
from raykv.store_messages import Medium
from raykv.types import StoreLife
from tests.api.cases import HASHES, LEFT, RIGHT, TOKENS, caller, desk, store
from tests.support.fake_operators import NODES, FakeWorld


def kill_child(world: FakeWorld) -> None:
    of = desk(world)
    of.children[0] = dataclasses.replace(of.children[0], state="down")


def restart_engine(world: FakeWorld) -> None:
    of = desk(world)
    of.base = dataclasses.replace(of.base, pid=4711, started=2000.0)


def lose_node(world: FakeWorld) -> None:
    world.facts[1] = dataclasses.replace(world.facts[1], state="dead")


CASES: list[tuple[Callable[[FakeWorld, Cluster], object], list[tuple[str, str, str]]]] = [
    (lambda w, kv: kill_child(w), [("child", "down", "Child nixl of engine engine-a is down (was up).")]),
    (lambda w, kv: kv.restart_child("nixl"),
     [("child", "restarted", "Child nixl of engine engine-a was restarted (incarnation 2).")]),
    (lambda w, kv: kv.remove_child("nixl"), [("child", "went", "Child nixl of engine engine-a is gone.")]),
    (lambda w, kv: kv.reorder_children(["files", "tiers", "nixl"]),
     [("engine", "reordered", "Engine engine-a asks its children in another order: files, tiers, nixl.")]),
    (lambda w, kv: restart_engine(w), [("engine", "restarted", "Engine engine-a on left was restarted.")]),
    (lambda w, kv: w.desk_callers.pop("raykv-desk-engine-b"),
     [("engine", "went", "Engine engine-b on right is gone.")]),
    (lambda w, kv: setattr(desk(w), "seen_s", 1800),
     [("engine", "silent", "Engine engine-a: no word from it for 30 m")]),
    (lambda w, kv: w.store_callers.pop(RIGHT), [("store", "went", "Store default@b2b2b2b2b2b2 is gone.")]),
    (lambda w, kv: setattr(caller(w, RIGHT), "silent", True), [("store", "silent", "did not answer")]),
    (lambda w, kv: setattr(store(w), "life", StoreLife("another")),
     [("store", "restarted", "Store default@a1a1a1a1a1a1 was restarted (pid 7).")]),
    (lambda w, kv: setattr(store(w), "drained", "1 left"), [("store", "draining", "is drained: 1 left")]),
    (lambda w, kv: store(w).off.update({Medium.DISK: "it is full"}),
     [("tier", "off", "Tier disk of default@a1a1a1a1a1a1 is off: it is full.")]),
    (lambda w, kv: kv.resize_tier("disk", "2MiB", store="@left"),
     [("tier", "resized", "has another size"), ("operation", "ended", "Resize tier at default@a1a1a1a1a1a1")]),
    (lambda w, kv: kv.remove_tier("disk", store="@left"),
     [("tier", "went", "was taken out"), ("operation", "ended", "Remove tier at default@a1a1a1a1a1a1")]),
    (lambda w, kv: kv.verify(store="@left", wait_s=0), [("operation", "began", "Verify at default@a1")]),
    (lambda w, kv: kv.pin(TOKENS, "10m"), [("pin", "came", "2 blocks for 10 m.")]),
    (lambda w, kv: lose_node(w), [("node", "dead", "Node b2b2b2b2b2b2 (right) is dead.")]),
    (lambda w, kv: None, []),
]  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), CASES)
def test_what_has_changed(
    kv: Cluster,
    world: FakeWorld,
    change: Callable[[FakeWorld, Cluster], object],
    expected: list[tuple[str, str, str]],
) -> None:
    store(world).put(HASHES[:2], Medium.HOST)
    before = kv.snapshot()
    change(world, kv)
    events = list(changes(before, kv.snapshot()))
    assert [(event.kind, event.what) for event in events] == [(kind, what) for kind, what, _ in expected]
    for event, (_, _, said) in zip(events, expected, strict=True):
        assert said in event.said and event.to_dict()["said"] == event.said
    assert all(event.said for event in changes(kv.snapshot(), before))  # and the way back


def test_the_stream(kv: Cluster, world: FakeWorld) -> None:
    stop = threading.Event()
    events = kv.watch(0.001, 30.0, stop=stop)
    looks = iter(
        [
            lambda: None,
            lambda: kill_child(world),
            lambda: kv.pause_child("files"),
            lambda: stop.set(),
        ]
    )
    world.problem = lambda: next(looks, lambda: None)()
    seen = [(event.kind, event.what, event.name) for event in events]
    assert ("child", "down", "nixl") in seen
    assert ("order", "done", seen[-1][2]) == seen[-1] or ("child", "paused", "files") in seen


def test_a_head_that_is_away_for_a_while(kv: Cluster, world: FakeWorld) -> None:
    stop = threading.Event()
    looks = iter(["", "away", "away", "", "stop"])

    def look() -> None:
        what = next(looks, "stop")
        if what == "away":
            raise ClusterError("Ray's head is away.")
        if what == "stop":
            stop.set()

    world.problem = look
    assert [(event.kind, event.what) for event in kv.watch(0.001, stop=stop)] == [
        ("cluster", "silent"),
        ("cluster", "back"),
    ]


def test_it_ends_by_itself(kv: Cluster) -> None:
    assert list(kv.watch(0.01, 0.02)) == []
    with pytest.raises(ConfigError, match="every_s is 0"):
        kv.watch(0)


def test_rates(kv: Cluster, world: FakeWorld) -> None:
    before = dataclasses.replace(kv.snapshot(), at=100.0)
    of = desk(world)
    of.base = dataclasses.replace(of.base, tokens={"gpu": 16, "host": 164, "computed": 70})
    store(world).put(HASHES, Medium.HOST)
    store(world).figures["saved_blocks"] = 30
    store(world, RIGHT).life = StoreLife("another")
    store(world, RIGHT).figures["saved_blocks"] = 5
    speed = rates(before, dataclasses.replace(kv.snapshot(), at=110.0))
    assert speed.tokens["engine-a"] == {"gpu": 0.0, "host": 10.0, "computed": 5.0}
    assert speed.stores[LEFT].saved == 3.0 and speed.stores[LEFT].tiers["host"].growth == pytest.approx(0.3)
    assert speed.stores[RIGHT].saved == 0.5  # a new life counts from zero
    restart_engine(world)
    assert rates(before, dataclasses.replace(kv.snapshot(), at=110.0)).tokens["engine-a"]["host"] == 16.4
    assert NODES
