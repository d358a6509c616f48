"""Any call with any arguments: done, or one sentence; the state stays whole, and what was refused changed nothing."""

from __future__ import annotations

import inspect
import json
import os
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from raykv.api import Cluster, NotDoneError, store_ops
from raykv.errors import RayKVError
from raykv.store_messages import Medium
from tests.api.cases import CHILD, HASHES, LEFT, RIGHT, TOKENS, state, store
from tests.support.fake_operators import FakeDesk, FakeStore, FakeWorld

pytestmark = pytest.mark.process

CALLS = int(os.environ.get("RAYKV_FUZZ_CALLS", "20"))
"""Operations in one example."""
NAMES = st.sampled_from(["default", "default@a1a1", "@left", "@", "@nowhere", LEFT, "", "big", "engine-a", "engine-b",
                         "engine", "left", "right", "tiny", "nixl", "tiers", "files", "x"])  # fmt: skip
MEDIA = st.sampled_from(["host", "disk", "fs", "peer", "hots", ""])
SIZES = st.sampled_from(["1MiB", "2MiB", 4096, 0, -1, "-5GiB", "many", None, 1 << 70, 1.5, True])
TIMES = st.sampled_from([0, -1, 5, "10m", "x", float("nan"), None, "99d", True])
PROMPTS = st.one_of(
    st.just(TOKENS),
    st.lists(st.integers(-1, 60), max_size=40),
    st.sampled_from([None, b"", 7, [{}], [None], {}, ["x"]]),
)
JUNK = st.one_of(
    st.none(), st.integers(), st.text(max_size=5), st.booleans(), st.lists(st.text(max_size=2), max_size=3)
)
GOOD: dict[str, list[Any]] = {
    "engine": [None, "engine-a", "engine-a", "left"],
    "store": [None, None, "@left", "default", "real"],
    "child": ["nixl", "tiers", "files", "ExampleConnector"],
    "before": ["", "nixl"],
    "node": ["left", "left", "right", None],
    "model": [None, "tiny"],
    "tier": ["host", "disk", "disk", "fs"],
    "capacity": ["1MiB", "2MiB", 1 << 19],
    "limit": ["1MiB", 0, None, 1 << 17],
    "time_limit": ["10m", 5],
    "wait_s": [0, 0.05, 1],
    "tenant": ["alice"],
    "config": [CHILD],
    "number": [None, None, None, "n1", "n2"],
    "after": [None, "host"],
    "path": ["/folder", None],
    "prompt": [TOKENS],
    "note": [""],
    "request": ["cmpl"],
    "name": [None, "engine-a", "default@a1a1", "left"],
}
"""What such an argument is most of the time, so that operations meet each other and not only their checks."""
BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "prompt": PROMPTS,
    "prefix": st.one_of(st.none(), PROMPTS),
    "time_limit": TIMES,
    "tier": MEDIA,
    "after": st.one_of(st.none(), MEDIA),
    "capacity": SIZES,
    "limit": SIZES,
    "path": st.sampled_from([None, "/folder", "relative", "", "/x\0y"]),
    "wait_s": st.sampled_from([0.02, 0, 0.05, -1, float("inf"), None, "x"]),
    "tenant": st.sampled_from(["", "alice", "tag:" + "ab" * 8, "tag:12", None]),
    "names": st.permutations(["nixl", "tiers", "files"]).map(lambda names: names[:]),
    "config": st.sampled_from([CHILD, json.dumps(CHILD), "{", {}, [], {"kv_connector": 7}, None]),
    "number": st.sampled_from([None, "n1", "n2", "", 7, "x" * 101]),
    "everything": st.booleans(),
    "note": st.sampled_from(["", "why", "x" * 300]),
    "cache_salt": st.sampled_from(["", "alice"]),
    "lora": st.just(""),
    "tell": st.just(None),
}
OPERATIONS = [
    name
    for name, method in inspect.getmembers(Cluster, inspect.isfunction)
    if not name.startswith("_") and name not in ("close", "watch", "snapshot")
]


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(OPERATIONS))
    options = {}
    for parameter in list(inspect.signature(getattr(Cluster, name)).parameters.values())[1:]:
        if parameter.default is not parameter.empty and draw(st.booleans()):
            continue
        kind = draw(st.integers(0, 19))
        good = st.sampled_from(GOOD[parameter.name]) if parameter.name in GOOD and kind > 3 else None
        other = BY_NAME.get(parameter.name, NAMES) if kind else JUNK
        options[parameter.name] = draw(other if good is None else good)
    return name, options


@settings(max_examples=40, phases=(Phase.generate,))  # a failure names the call; to shrink it takes minutes
@given(st.lists(calls(), min_size=CALLS, max_size=CALLS), st.integers(0, 3))
def test_any_calls(made: list[tuple[str, dict[str, Any]]], hurt: int) -> None:
    store_ops.POLL_S = 0.001
    world = FakeWorld()
    kv = Cluster(world, 1.0)
    store(world).put(HASHES, Medium.HOST, Medium.DISK)
    if hurt == 1:
        world.add_store(FakeStore("big", {Medium.HOST: 8}), world.facts[0].id)
        world.add_desk(FakeDesk("other", 1, "big"))
    elif hurt == 2:
        world.store_callers[RIGHT].silent = True  # type: ignore[attr-defined]
    elif hurt == 3:
        store(world, RIGHT).off[Medium.DISK] = "it is full"
    for name, options in made:
        before = [state(world, each) for each in (LEFT, RIGHT)]
        try:
            result = getattr(kv, name)(**options)
        except RayKVError as error:
            assert str(error) and "\n" not in str(error)
            if not isinstance(error, NotDoneError):
                assert [state(world, each) for each in (LEFT, RIGHT)] == before, f"{name} was refused, and changed some"
        else:
            json.dumps(result.to_dict() if hasattr(result, "to_dict") else result)
        world.check_integrity()


def test_the_operations_are_what_is_fuzzed() -> None:
    assert {"pin", "clear", "add_tier", "add_child", "explain", "drain_node"} <= set(OPERATIONS)
