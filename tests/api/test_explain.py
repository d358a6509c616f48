"""Explanations: each reason by a made case, and the sum over all sources."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.admin_messages import Absence
from raykv.api import Cluster, NotFoundError
from raykv.engine_messages import Missed, Story, TokenRange, Why
from raykv.store_messages import Medium
from raykv.types import EngineId, RequestId
from tests.api.cases import LEFT, RIGHT, caller, desk, shown, store
from tests.support.fake_operators import FakeWorld, hashes_of

PROMPT = tuple(range(70))  # four full blocks and 6 tokens
HASHES = hashes_of(PROMPT)
FROM_STORE = [Why.NEVER_STORED, Why.EVICTED, Why.EXPIRED, Why.CLEARED, Why.CORRUPT, Why.OTHER_FINGERPRINT,
              Why.OVER_QUOTA, Why.NO_ROOM]  # fmt: skip
FROM_ENGINE = [Why.NOT_ASKED, Why.TIMED_OUT, Why.CHILD_OFF, Why.COST, Why.FAILED, Why.OTHER_CHILD]


def a_story(*ranges: TokenRange, missed: tuple[Missed, ...] = (), **more: Any) -> Story:
    first = ranges or (TokenRange(0, 70, "computed"),)
    options = {"lookup_s": 0.002, "load_s": 0.01, "recompute_s": 0.05, "ended": 2.0, "hashes": b"".join(HASHES)}
    return Story(RequestId("cmpl-7-0"), EngineId("engine-a"), 1.0, 70, first, missed, **{**options, **more})


def told(world: FakeWorld, story: Story) -> None:
    desk(world).kept[story.request] = story


@pytest.mark.parametrize("why", FROM_ENGINE)
def test_the_engine_says_why(kv: Cluster, world: FakeWorld, why: Why) -> None:
    told(world, a_story(missed=(Missed(0, 64, "nixl", why, "after 5 s"),)))
    made = kv.explain("cmpl-7-0")
    assert made.reason == f"nixl: {why} (after 5 s)"
    assert [(piece.first, piece.last) for piece in made.pieces] == [(0, 64), (64, 70)]
    assert made.pieces[-1].reasons[0].why == Why.ALWAYS_COMPUTED
    assert "why" not in caller(world, LEFT).calls


@pytest.mark.parametrize("why", FROM_STORE)
def test_the_store_says_why(kv: Cluster, world: FakeWorld, why: Why) -> None:
    for one in HASHES:
        store(world).gone["f0" * 16, one] = Absence(str(why), time.time() - 5410, "the seed: 1 here, 2 there")
    told(world, a_story(missed=(Missed(0, 70, "tiers", Why.NOT_FOUND),)))
    made = kv.explain("cmpl-7")
    assert made.reason == f"default@a1a1a1a1a1a1: {why} (1 h 30 m ago: the seed: 1 here, 2 there)"
    assert made.pieces[0].seconds == pytest.approx(0.064)  # at 1000 tokens/s
    assert str(why) in shown(made) and json.dumps(made.to_dict())


def test_a_reason_for_each_run_of_blocks(kv: Cluster, world: FakeWorld) -> None:
    store(world).gone["f0" * 16, HASHES[1]] = Absence(Why.EVICTED, time.time() - 60, "the host tier was full")
    store(world, RIGHT).put(HASHES[1:3], Medium.HOST)
    missed = (Missed(16, 64, "tiers", Why.NOT_FOUND), Missed(0, 64, "nixl", Why.OTHER_CHILD))
    told(world, a_story(TokenRange(0, 16, "host", "tiers"), TokenRange(16, 70, "computed"), missed=missed))
    made = kv.explain("cmpl-7-0")
    assert made.by_source == {"host": 16, "computed": 54} and made.prompt_tokens == 70
    spans = [(piece.first, piece.last, [reason.why for reason in piece.reasons]) for piece in made.pieces]
    assert spans == [
        (0, 16, []),
        (16, 32, ["evicted", "held there", "another child took it"]),
        (32, 48, ["never stored", "held there", "another child took it"]),
        (48, 64, ["never stored", "another child took it"]),
        (64, 70, ["always computed"]),
    ]
    assert made.said.startswith("Of 70 prompt tokens, 16 from host; 54 computed. The loads took 10 ms")
    assert made.pieces[0].seconds == 0.01


def test_what_came_after_the_request_asked(kv: Cluster, world: FakeWorld) -> None:
    store(world).put(HASHES, Medium.HOST)
    told(world, a_story(missed=(Missed(0, 64, "tiers", Why.NOT_FOUND),)))
    assert "it came after this request had asked" in kv.explain("cmpl-7-0").reason


def test_what_lies_behind_a_gap(kv: Cluster, world: FakeWorld) -> None:
    store(world).put(HASHES[1:], Medium.HOST)
    told(world, a_story(missed=(Missed(0, 64, "tiers", Why.NOT_FOUND),)))
    whys = [piece.reasons[0] for piece in kv.explain("cmpl-7-0").pieces]
    assert [one.why for one in whys] == ["never stored", "not found", "always computed"]
    assert "only a whole prefix" in whys[1].detail


def test_a_hosted_child_can_only_say_that_it_has_no_more(kv: Cluster, world: FakeWorld) -> None:
    told(world, a_story(missed=(Missed(0, 64, "nixl", Why.NOT_FOUND),)))
    assert kv.explain("cmpl-7-0").reason == "nixl: not found"


def test_a_store_that_is_silent_is_named(kv: Cluster, world: FakeWorld) -> None:
    caller(world, LEFT).silent = True
    told(world, a_story(missed=(Missed(0, 64, "tiers", Why.NOT_FOUND),)))
    made = kv.explain("cmpl-7-0")
    assert made.silent == ("default@a1a1a1a1a1a1",) and made.reason == "tiers: not found"


def test_a_short_prompt(kv: Cluster, world: FakeWorld) -> None:
    told(world, dataclasses.replace(a_story(TokenRange(0, 5, "computed")), prompt_tokens=5, hashes=b""))
    made = kv.explain("cmpl-7-0")
    assert [reason.why for piece in made.pieces for reason in piece.reasons] == ["always computed"] and not made.reason


def test_prefill_and_decode_of_one_request(kv: Cluster, world: FakeWorld) -> None:
    told(world, a_story())
    later = dataclasses.replace(a_story(TokenRange(0, 70, "nixl", "nixl")), engine=EngineId("engine-b"), arrived=5.0)
    desk(world, "engine-b").kept["cmpl-7-0"] = later
    made = kv.explain("cmpl-7-0")
    assert (made.engine, [one.engine for one in made.others]) == ("engine-b", ["engine-a"])
    assert kv.explain("cmpl-7-0", engine="engine-a").others == ()


def test_an_unknown_request(kv: Cluster, world: FakeWorld) -> None:
    told(world, a_story())
    with pytest.raises(NotFoundError, match=r'no request "cmpl-8". Did you mean "cmpl-7-0"'):
        kv.explain("cmpl-8")
    assert list(kv.requests()) == ["cmpl-7-0"]
    for number in range(100):
        desk(world).kept[f"chat-{number}"] = a_story()
    with pytest.raises(NotFoundError, match=r"101 requests are kept; the last ones: chat-99") as error:
        kv.explain("cmpl-8")
    assert len(str(error.value)) < 300
    caller(world, "raykv-desk-engine-b").silent = True
    assert kv.explain("cmpl-7-0").engine == "engine-a"


CUTS = st.lists(st.integers(1, 69), unique=True, max_size=5).map(sorted)
SPANS = st.tuples(
    st.integers(0, 70), st.integers(0, 70), st.sampled_from(list(Why)), st.sampled_from(["nixl", "tiers"])
)


@given(CUTS, st.lists(st.sampled_from(["gpu", "host", "nixl", "computed", "not run"]), min_size=6, max_size=6),
       st.lists(SPANS, max_size=6), st.integers(0, 4))  # fmt: skip
def test_any_story_is_covered_without_gaps(
    cuts: list[int], sources: list[str], spans: list[tuple[int, int, Why, str]], held: int
) -> None:
    edges = [0, *cuts, 70]
    ranges = [TokenRange(a, b, source) for a, b, source in zip(edges, edges[1:], sources, strict=False)]
    missed = tuple(Missed(min(a, b), max(a, b), child, why) for a, b, why, child in spans)
    world = FakeWorld()
    store(world).put(HASHES[:held], Medium.HOST)
    told(world, a_story(*ranges, missed=missed))
    made = Cluster(world, 1.0).explain("cmpl-7-0")
    assert sum(made.by_source.values()) == 70
    assert [piece.first for piece in made.pieces] == [0, *(piece.last for piece in made.pieces[:-1])]
    assert made.pieces[-1].last == 70
    assert all(piece.reasons for piece in made.pieces if piece.source == "computed")
    assert shown(made)
