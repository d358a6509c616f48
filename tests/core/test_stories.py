"""Stories: ranges that cover the prompt, whatever happens to the request; a reason for each token that was computed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.core.stories import Stories, StoryRing, matching
from raykv.core.story import Asked, Took, as_json, check_story
from raykv.engine_messages import Missed, Story, TokenRange, Why
from raykv.errors import IntegrityError, RayKVError
from raykv.types import EngineId, RequestId

E, R = EngineId("e"), RequestId("r")
BLOCK = 16


@dataclass
class Source:
    """vLLM's request."""

    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)


def key(one: bytes, salt: bytes) -> bytes:
    return one + salt


class Tale:
    """One request of 100 tokens."""

    def __init__(self, tokens: int = 100, last: int = 10, skips: str = "", explain: bool = False) -> None:
        self.stories = Stories(E, BLOCK, last, key=key)
        self.source = Source(block_hashes=[bytes([i]) for i in range(9)])
        self.tokens = tokens
        self.stories.arrived(R, self.source, tokens, skips=skips, explain=explain)

    def load(self, computed: int, *took: Took, asked: tuple[Asked, ...] = (), is_async: bool = True) -> None:
        self.stories.matched(R, computed, self.tokens, 0)
        self.stories.planned(R, took, asked, is_async)

    def end(self, output: int = 3) -> Story:
        self.source.num_output_tokens = output
        self.stories.ended(R)
        self.stories.check_integrity()
        (story,) = self.stories.take()
        check_story(story)
        return story


def sources(story: Story) -> list[tuple[int, int, str]]:
    return [(one.first, one.last, one.source) for one in story.ranges]


def reasons(story: Story) -> set[tuple[int, int, str, Why]]:
    return {(one.first, one.last, one.child, one.why) for one in story.missed}


# -- ranges ---------------------------------------------------------------------------------------------------


def test_what_vllm_has_what_was_loaded_and_the_rest() -> None:
    tale = Tale()
    tale.load(16, Took(16, 48, "tier", "host"), Took(48, 64, "tier", "disk"), Took(64, 80, "files", "files"))
    tale.stories.loaded(R)
    story = tale.end()
    assert sources(story) == [
        (0, 16, "gpu"), (16, 48, "host"), (48, 64, "disk"), (64, 80, "files"), (80, 100, "computed")
    ]  # fmt: skip
    assert [one.child for one in story.ranges] == ["", "tier", "tier", "files", ""]
    assert tale.stories.tokens == {"gpu": 16, "host": 32, "disk": 16, "files": 16, "computed": 20}
    assert story.ended >= story.arrived > 1e9 and story.engine == "e"


def test_the_last_token_is_always_computed() -> None:
    tale = Tale()
    tale.load(0, Took(0, 100, "nixl", "nixl"))
    tale.stories.loaded(R)
    assert sources(tale.end()) == [(0, 99, "nixl"), (99, 100, "computed")]


def test_a_second_allocation_begins_no_pass() -> None:
    tale = Tale()
    tale.load(16, Took(16, 48, "tier", "host"))
    tale.stories.loaded(R)
    assert not tale.stories.is_new_pass(R)
    tale.stories.planned(R, (), (), False)
    assert sources(tale.end())[1] == (16, 48, "host")


def test_what_counts_after_a_preemption_is_the_last_pass() -> None:
    tale = Tale()
    tale.load(16, Took(16, 48, "tier", "host"))
    tale.stories.loaded(R)
    tale.stories.matched(R, 64, 120, 2)
    assert sources(tale.stories.of_running("r"))[1] == (16, 48, "host"), "no blocks were allocated yet"  # type: ignore[arg-type]
    tale.stories.planned(R, [Took(64, 119, "tier", "disk")], (), True)
    tale.stories.loaded(R)
    story = tale.end()
    assert sources(story) == [(0, 64, "gpu"), (64, 100, "disk")] and story.preemptions == 2


@pytest.mark.parametrize(
    ("computed", "output", "ranges"),
    [
        (0, 0, [(0, 100, "not run")]),
        (40, 0, [(0, 40, "computed"), (40, 100, "not run")]),
        (140, 0, [(0, 100, "computed")]),
        (0, 5, [(0, 100, "computed")]),  # preempted and aborted
    ],
)
def test_an_aborted_request_has_computed_what_vllm_says(
    computed: int, output: int, ranges: list[tuple[int, int, str]]
) -> None:
    tale = Tale()
    tale.source.num_computed_tokens = computed
    assert sources(tale.end(output)) == ranges


def test_an_abort_during_a_load_has_loaded_nothing() -> None:
    tale = Tale()
    tale.load(16, Took(16, 80, "tier", "host"))
    tale.source.num_computed_tokens = 80  # as vLLM counts from the first moment on
    assert sources(tale.end(0)) == [(0, 16, "gpu"), (16, 100, "not run")]
    assert tale.stories.tokens["host"] == 0


def test_a_failed_load_is_computed() -> None:
    tale = Tale()
    tale.load(16, Took(16, 80, "tier", "host"))
    tale.stories.lost(R, why="checksum")
    story = tale.end()
    assert sources(story) == [(0, 16, "gpu"), (16, 100, "computed")]
    assert Missed(16, 80, "tier", Why.FAILED, "checksum") in story.missed


def test_of_a_failed_load_the_front_is_kept() -> None:
    tale = Tale()
    tale.load(0, Took(0, 32, "a", "host"), Took(32, 64, "b", "b"), Took(64, 96, "c", "c"))
    tale.stories.lost(R, 32, ["b"])
    story = tale.end()
    assert sources(story) == [(0, 32, "host"), (32, 100, "computed")]
    failed = [one for one in story.missed if one.why is Why.FAILED]
    assert [(one.first, one.child, "behind" in one.detail) for one in failed] == [(32, "b", False), (64, "c", True)]


def test_a_part_that_another_child_brings_after_all() -> None:
    tale = Tale()
    tale.load(0, Took(0, 32, "a", "host"), Took(32, 96, "b", "b"))
    tale.stories.retaken(R, 32, [Took(32, 64, "a", "disk"), Took(64, 96, "a", "host")], "it was there")
    tale.stories.loaded(R)
    story = tale.end()
    assert sources(story) == [(0, 32, "host"), (32, 64, "disk"), (64, 96, "host"), (96, 100, "computed")]
    assert (32, 96, "b", Why.FAILED) in reasons(story)


# -- reasons --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "why", [Why.CHILD_OFF, Why.TIMED_OUT, Why.FAILED, Why.NOT_ASKED, Why.NOT_FOUND, Why.OTHER_CHILD]
)
def test_a_child_that_brings_nothing(why: Why) -> None:
    tale = Tale()
    tale.load(32, asked=(Asked("a", 32, why=why, detail="so"),))
    story = tale.end()
    assert reasons(story) == {(32, 96, "a", why), (96, 100, "", Why.ALWAYS_COMPUTED)}
    assert story.missed[0].detail == "so"


def test_a_hit_below_the_cost_line_and_what_lies_behind_it() -> None:
    tale = Tale()
    tale.load(0, asked=(Asked("a", 0, unused=48, why=Why.COST),))
    assert reasons(tale.end()) == {
        (0, 48, "a", Why.COST), (48, 96, "a", Why.NOT_FOUND), (96, 100, "", Why.ALWAYS_COMPUTED)
    }  # fmt: skip


def test_a_hit_that_was_not_needed() -> None:
    tale = Tale()
    tale.load(0, Took(0, 64, "a", "a"), asked=(Asked("a", 0, 64), Asked("b", 0, 80)))
    tale.stories.loaded(R)
    found = reasons(tale.end())
    assert {(0, 64, "b", Why.OTHER_CHILD), (64, 80, "b", Why.OTHER_CHILD), (80, 96, "b", Why.NOT_FOUND)} <= found
    assert (64, 96, "a", Why.NOT_FOUND) in found


def test_fewer_tokens_than_were_found() -> None:
    tale = Tale()
    tale.load(0, Took(0, 32, "a", "a"), asked=(Asked("a", 0, 64),))
    tale.stories.loaded(R)
    assert (32, 64, "a", Why.NOT_ASKED) in reasons(tale.end())


@pytest.mark.parametrize("tokens", [1, 15, 16])
def test_a_prompt_that_is_too_short(tokens: int) -> None:
    tale = Tale(tokens)
    tale.load(0, asked=(Asked("a"),))
    assert reasons(tale.end()) == {(0, tokens, "a", Why.NOT_ASKED), (0, tokens, "", Why.ALWAYS_COMPUTED)}


def test_a_prompt_for_which_nothing_is_read() -> None:
    tale = Tale(skips="says so")
    tale.load(0, asked=(Asked("a", 0, 64),))
    assert (0, 100, "a", Why.NOT_ASKED) in reasons(tale.end())


# -- the rest of it -------------------------------------------------------------------------------------------


def test_what_it_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("raykv.core.stories.time.monotonic", lambda: now[0])
    tale = Tale()
    tale.stories.matched(R, 0, 100, 0)
    now[0] = 10.5
    tale.stories.answered(R)
    now[0] = 11.0
    tale.stories.answered(R)
    tale.stories.planned(R, [Took(0, 64, "a", "a")], (), True)
    now[0] = 13.0
    tale.stories.loaded(R)
    tale.stories.saved(R, "a", 32)
    tale.stories.saved(R, "a", 48)
    tale.stories.saved(R, "b", 0)
    tale.source.num_output_tokens = 1
    tale.stories.ended(R, prefill_rate=32.0)
    (story,) = tale.stories.take()
    assert (story.lookup_s, story.load_s, story.recompute_s) == (0.5, 2.0, 2.0)
    assert story.saved_tokens == {"a": 48}


def test_hashes_are_those_of_the_prompts_full_blocks() -> None:
    tale = Tale()
    tale.stories.salted(R, b"s")
    live = tale.stories.of_running("r")
    assert live is not None and live.ended == 0
    assert tale.end().hashes == live.hashes == b"".join(bytes([i]) + b"s" for i in range(6))


def test_only_who_asked_is_told() -> None:
    assert Tale().stories.ended(R) is None
    record = Tale(explain=True).stories.ended(R)
    assert record is not None
    told = as_json(record.story(E))
    assert told["request"] == "r" and "hashes" not in told
    assert told["ranges"] == [{"first": 0, "last": 100, "source": "not run", "child": "", "node": ""}]
    tale = Tale(explain=True)
    tale.load(0, asked=(Asked("a"),))
    record = tale.stories.ended(R)
    assert record is not None
    assert {type(one["why"]) for one in as_json(record.story(E))["missed"]} == {str}


@pytest.mark.parametrize("last", [0, 2])
def test_what_nobody_takes_is_bounded_and_still_counts(last: int) -> None:
    stories = Stories(E, BLOCK, last)
    for i in range(5):
        stories.arrived(RequestId(f"r{i}"), Source(num_output_tokens=1), 10)
        assert stories.running == 1
        stories.ended(RequestId(f"r{i}"))
    assert [one.request for one in stories.take()] == ["r3", "r4"][:last]
    assert stories.tokens == {"computed": 50} and stories.running == 0
    stories.check_integrity()


def test_none_are_kept_once_nobody_will_take_them() -> None:
    tale = Tale()
    tale.stories.keep_none()
    tale.stories.ended(R)
    assert tale.stories.take() == [] and tale.stories.tokens == {"not run": 100}
    tale.stories.check_integrity()


def test_unknown_requests_are_nothing() -> None:
    stories = Stories(E, BLOCK)
    stories.matched(R, 0, 1, 0)
    stories.planned(R, [Took(0, 1, "a", "a")], (), True)
    stories.answered(R)
    stories.loaded(R)
    stories.lost(R)
    stories.retaken(R, 0, [Took(0, 1, "a", "a")], "")
    stories.saved(R, "a", 1)
    stories.salted(R, b"")
    assert stories.ended(R) is None and stories.take() == [] and stories.of_running("r") is None


@pytest.mark.parametrize(
    "ranges",
    [(), (TokenRange(0, 9, "gpu"),), (TokenRange(1, 10, "gpu"),), (TokenRange(0, 10, "a"), TokenRange(10, 10, "b")),
     (TokenRange(0, 6, "a"), TokenRange(5, 10, "b")), (TokenRange(0, 11, "a"),)],
)  # fmt: skip
def test_a_story_with_a_hole_is_found(ranges: tuple[TokenRange, ...]) -> None:
    good = Story(R, E, 0.0, 10, (TokenRange(0, 10, "gpu"),), (Missed(0, 10, "a", Why.FAILED),))
    check_story(good)
    with pytest.raises(IntegrityError, match="story of r"):
        check_story(replace(good, ranges=ranges))
    with pytest.raises(IntegrityError, match="outside"):
        check_story(replace(good, missed=(Missed(0, 11, "a", Why.FAILED),)))


def test_wrong_sums_are_found() -> None:
    tale = Tale()
    tale.end()
    tale.stories.tokens["gpu"] += 1
    with pytest.raises(IntegrityError, match="are not 100 tokens"):
        tale.stories.check_integrity()


# -- the ring -------------------------------------------------------------------------------------------------


def story_of(name: str, hashes: bytes = b"") -> Story:
    return Story(RequestId(name), E, 0.0, 0, (), hashes=hashes)


def test_the_ring_keeps_the_last_ones() -> None:
    ring = StoryRing(3, max_hash_nbytes=100)
    for i in range(5):
        ring.add(story_of(f"r{i}"))
    assert [one.request for one in ring.latest(10)] == ["r4", "r3", "r2"]
    assert [one.request for one in ring.latest(2)] == ["r4", "r3"] and ring.latest(0) == () == ring.latest(-1)
    assert ring.find("r0") is None
    ring.add(story_of("r2", b"x"))
    assert len(ring) == 3 and ring.latest(1)[0].hashes == b"x"
    ring.add(story_of("big", bytes(100)))
    assert [one.request for one in ring.latest(9)] == ["big"], "hashes count too"


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("cmpl-abc-0-1f2e3d4c", ["cmpl-abc-0-1f2e3d4c"]),
        ("cmpl-abc", ["cmpl-abc-0-1f2e3d4c"]),
        ("abc", ["cmpl-abc-0-1f2e3d4c"]),
        ("abcd", ["chatcmpl-abcd-9f2e3d4c"]),
        ("chatcmpl-abc", ["chatcmpl-abcd-9f2e3d4c"]),
        ("many", ["0_cmpl-many-0-1f2e3d4c", "1_cmpl-many-0-1f2e3d4c"]),
        ("own-id", ["own-id-77777777"]),
        ("own", ["own-id-77777777"]),
        ("xyz", []),
        ("", []),
    ],
)
def test_requests_are_found_by_their_clients_ids(wanted: str, found: list[str]) -> None:
    ids = [
        "cmpl-abc-0-1f2e3d4c", "chatcmpl-abcd-9f2e3d4c", "0_cmpl-many-0-1f2e3d4c", "1_cmpl-many-0-1f2e3d4c",
        "own-id-77777777",
    ]  # fmt: skip
    assert matching(ids, wanted) == found
    ring = StoryRing()
    for one in ids:
        ring.add(story_of(one))
    if len(found) > 1:
        with pytest.raises(RayKVError, match=r"fits 2 requests: .*Name one"):
            ring.find(wanted)
    else:
        assert [ring.find(wanted)] == [story_of(found[0]) if found else None]


# -- random histories -----------------------------------------------------------------------------------------


def random_history(rng: random.Random) -> None:
    """Any order of events that vLLM and the children may bring, sensible or not: the sums hold."""
    stories = Stories(E, BLOCK, 100)
    live: dict[RequestId, Source] = {}
    names = ["gpu", "tier", "files"]
    for step in range(rng.randrange(60)):
        if rng.random() < 0.25 or not live:
            name = RequestId(f"r{step}")
            live[name] = Source(block_hashes=[bytes([i]) for i in range(20)])
            stories.arrived(name, live[name], rng.randrange(1, 200))
        name = rng.choice(list(live))
        source, event = live[name], rng.randrange(8)
        if event in (0, 1):
            computed = rng.randrange(0, 12) * BLOCK
            stories.matched(name, computed, computed + rng.randrange(1, 100), rng.randrange(3))
        elif event in (2, 3):
            at, parts, asked = rng.randrange(0, 10) * BLOCK, [], []
            for child in rng.sample(names, rng.randrange(4)):
                end = at + rng.randrange(1, 80)
                parts.append(Took(at, end, child, rng.choice([child, "host"])))
                asked.append(Asked(child, at, rng.choice([0, end - at]), rng.choice([0, 16]), rng.choice(list(Why))))
                at = end
            stories.planned(name, parts, asked, rng.random() < 0.7)
        elif event == 4:
            stories.loaded(name)
        elif event == 5:
            stories.lost(name, rng.randrange(0, 200), rng.choice([None, ["tier"]]))
        elif event == 6:
            at = rng.randrange(0, 160)
            stories.retaken(name, at, [Took(at, at + rng.randrange(1, 60), "tier", "disk")], "")
        else:
            source.num_computed_tokens = rng.randrange(250)
            source.num_output_tokens = rng.choice([0, 0, 4])
            del live[name]
            stories.ended(name, rng.choice([0.0, 100.0]))
        stories.check_integrity()
    for name in live:
        stories.ended(name)
    stories.check_integrity()
    told = stories.take()
    for story in told:
        check_story(story)
        assert sum(one.last - one.first for one in story.ranges) == story.prompt_tokens
    assert sum(one.prompt_tokens for one in told) == sum(stories.tokens.values())


@given(st.integers(0, 2**32))
def test_sums_hold_under_random_histories(seed: int) -> None:
    random_history(random.Random(seed))
