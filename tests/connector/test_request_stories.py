"""Stories on vLLM's real scheduler: where each request's tokens came from; one made case for each reason why not."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from raykv.connector.request_stories import RequestStories, Stories, without_own
from raykv.connector.scheduler_child import ChildState
from raykv.core.story import check_story
from raykv.engine_messages import Story, Why
from raykv.store_messages import HASH_NBYTES, Medium
from tests.support.fake_config import child
from tests.support.fake_ranges import ranged
from tests.support.fake_store_link import split
from tests.support.fake_worker import Bench
from tests.support.tier_bench import TierBench, tier_child

pytestmark = pytest.mark.vllm

EXPLAIN = {"raykv_explain": True}


def stories(bench: Bench) -> dict[str, Story]:
    """Of all requests that have ended since the last call; and that the books are right."""
    bench.stories.check_integrity()
    taken: list[Story] = bench.stories.take()
    for story in taken:
        check_story(story)
    return {story.request: story for story in taken}


def sources(story: Story) -> list[tuple[int, int, str]]:
    return [(one.first, one.last, one.source) for one in story.ranges]


def reasons(story: Story) -> set[tuple[int, int, str, Why]]:
    return {(one.first, one.last, one.child, one.why) for one in story.missed}


def detail(story: Story, why: Why) -> str:
    return next(one.detail for one in story.missed if one.why is why)


# -- where they came from -------------------------------------------------------------------------------------


def test_each_source_of_a_composed_load(overlap: bool) -> None:
    with TierBench([child("files", True, search=True, saves=True)], first=True, raykv={"load_policy": "compose"},
                   async_scheduling=overlap) as bench:  # fmt: skip
        bench.add(160, max_tokens=1)
        bench.forget_locally()
        prompt = bench.results["r0"].prompt
        bench.add(prompt[:40], max_tokens=1)  # so that vLLM's own cache has two or three blocks
        bench.run()
        bench.store.medium = {3: Medium.DISK, 4: Medium.PEER}
        bench.store.blocks = {k: v for k, v in bench.store.blocks.items() if k[2] in set(_hashes(bench, prompt)[:6])}
        name = bench.add([*prompt, 7, 8], max_tokens=1)
        bench.run()
        story = stories(bench)[name]
        assert sources(story) == [
            (0, 32, "gpu"), (32, 48, "host"), (48, 64, "disk"), (64, 80, "peer"), (80, 96, "host"), (96, 160, "files"),
            (160, 162, "computed"),
        ]  # fmt: skip
        assert {one.child for one in story.ranges} == {"", "tier", "files"}
        assert {(one.source, one.node) for one in story.ranges if one.node} == {("peer", "b2b2b2b2b2b2")}
        assert reasons(story) == {(160, 162, "", Why.ALWAYS_COMPUTED)}
        assert story.load_s > 0 and story.lookup_s > 0 and story.ended > story.arrived
        assert story.recompute_s > 0, "the first two requests' prefill was measured"


def _hashes(bench: Bench, tokens: list[int]) -> list[bytes]:
    request = Request("h", tokens, SamplingParams(max_tokens=1), None, block_hasher=bench._hasher)
    return list(request.block_hashes)


def test_the_sum_of_all_requests_is_that_of_their_prompts(ranks: int, overlap: bool) -> None:
    with TierBench([], ranks=ranks, async_scheduling=overlap, num_blocks=24, sequences=6) as bench:
        for seed in range(6):
            bench.add(90, seed=seed % 3, max_tokens=40)
        bench.step(7)
        bench.abort("r5")
        bench.run()
        told = stories(bench)
        assert len(told) == 6 and sum(bench.stories.tokens.values()) == 6 * 90
        assert any(story.preemptions for story in told.values()), "the pool is too small for all of them"
        assert told["r0"].saved_tokens["tier"] >= 80


def test_alone_a_tier_connector_tells_the_same(overlap: bool) -> None:
    with TierBench(None, async_scheduling=overlap) as bench:
        bench.add(160, max_tokens=1)
        bench.forget_locally()
        bench.store.medium = {1: Medium.FS}
        name = bench.add([*bench.results["r0"].prompt[:90], 9], max_tokens=1, params=dict(EXPLAIN))
        bench.run()
        told = stories(bench)
        assert sources(told["r0"]) == [(0, 160, "computed")]
        assert reasons(told["r0"]) == {
            (0, 144, "TierConnector", Why.NOT_FOUND), (144, 160, "", Why.ALWAYS_COMPUTED)
        }  # fmt: skip
        assert told["r0"].saved_tokens == {"TierConnector": 160}
        assert sources(told[name]) == [(0, 16, "host"), (16, 32, "fs"), (32, 80, "host"), (80, 91, "computed")]
        answer = bench.results[name].params
        assert answer is not None and answer["raykv_story"]["ranges"][1]["source"] == "fs"
        assert bench.half.rates.prefill_rate and set(bench.half.rates.load_rates) == {0}


def test_hashes_are_what_the_store_knows_the_blocks_by() -> None:
    with TierBench([]) as bench:
        bench.add(100, max_tokens=1)
        bench.run()
        story = stories(bench)["r0"]
        (job, *_) = bench.store.saved
        assert len(story.hashes) == 6 * HASH_NBYTES
        assert split(story.hashes) == split(job.hashes[0])[:6]
        bench.scheduler.reset_connector_cache()
        bench.add(100, seed=1, max_tokens=1)
        bench.run()
        assert split(stories(bench)["r1"].hashes) == split(bench.store.saved[-1].hashes[0])[:6]


def test_a_tenant_is_a_tag_and_an_adapter_is_remembered() -> None:
    with TierBench([]) as bench:
        lora = LoRARequest("sql", 1, "/adapters/sql")
        sampling = SamplingParams(max_tokens=1)
        request = Request(
            "r0", list(range(3, 40)), sampling, None, cache_salt="secret", lora_request=lora, block_hasher=bench._hasher
        )
        found = RequestStories(bench.config)
        found.begin(request)
        assert found.adapters == {"sql": lora}
        live = found.of_running("r0")
        assert live is not None and len(bytes.fromhex(live.tenant)) == 8 and "secret" not in repr(live)
        assert found.end(request) is None


# -- why not: one case for each reason the engine says --------------------------------------------------------


def test_why_not_asked_the_prompt_is_short() -> None:
    with Bench([child("A", hit=64)]) as bench:
        bench.add(16)
        bench.run()
        assert reasons(stories(bench)["r0"]) == {(0, 16, "A", Why.NOT_ASKED), (0, 16, "", Why.ALWAYS_COMPUTED)}


def test_why_not_asked_the_request_says_so() -> None:
    with Bench([child("A", hit=64)]) as bench:
        sampling = SamplingParams(max_tokens=1, ignore_eos=True, skip_reading_prefix_cache=True)
        request = Request("r0", list(range(3, 103)), sampling, None, block_hasher=bench._hasher)
        bench.results["r0"] = SimpleNamespace(  # type: ignore[assignment]
            prompt=[0] * 100, wanted=1, tokens=[], reason=None, params=None, aborted=True, expected=[]
        )
        bench.scheduler.add_request(request)
        bench.run()
        bench.results["r0"].tokens.clear()
        story = stories(bench)["r0"]
        assert (0, 100, "A", Why.NOT_ASKED) in reasons(story) and "nothing is to be read" in detail(
            story, Why.NOT_ASKED
        )


def test_why_not_asked_the_child_is_only_saved_to() -> None:
    with Bench([child("A", hit=64, raykv={"load": False})]) as bench:
        bench.add(100)
        bench.run()
        story = stories(bench)["r0"]
        assert (0, 96, "A", Why.NOT_ASKED) in reasons(story) and "saved to" in detail(story, Why.NOT_ASKED)


def test_why_timed_out(overlap: bool) -> None:
    slow = {"lookup_timeout_s": 1e-9}
    with Bench([child("A", pending=-1, raykv=slow)], async_scheduling=overlap) as bench:
        bench.add(100)
        bench.run()
        story = stories(bench)["r0"]
        assert (0, 96, "A", Why.TIMED_OUT) in reasons(story) and "1e-09 s" in detail(story, Why.TIMED_OUT)


@pytest.mark.parametrize("alone", [False, True])
def test_why_timed_out_in_a_tier(alone: bool) -> None:
    with TierBench(None if alone else [], tier=tier_child(lookup_timeout_s=1e-9)) as bench:
        bench.store.hold_answers = True
        bench.add(100, max_tokens=1)
        bench.until(lambda: bool(bench.results["r0"].tokens))
        bench.store.hold_answers = False
        bench.run()
        assert (0, 96, "TierConnector" if alone else "tier", Why.TIMED_OUT) in reasons(stories(bench)["r0"])


def test_why_child_off() -> None:
    with Bench([child("A", hit=64), child("B", hit=32)]) as bench:
        bench.half.children[0].state = ChildState.DOWN
        bench.add(100)
        bench.run()
        bench.half.children[0].state = ChildState.UP
        story = stories(bench)["r0"]
        assert (32, 96, "A", Why.CHILD_OFF) in reasons(story) and detail(story, Why.CHILD_OFF) == "it is down"
        assert (32, 96, "B", Why.NOT_FOUND) in reasons(story)


@pytest.mark.parametrize("alone", [False, True])
def test_why_child_off_is_said_of_a_store_that_is_away(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with TierBench(None if alone else []) as bench:
        bench.store.away = True
        bench.store.store = ""
        bench.add(100, max_tokens=1)
        bench.run()
        assert (0, 96, "TierConnector" if alone else "tier", Why.CHILD_OFF) in reasons(stories(bench)["r0"])


def test_why_below_the_cost_line() -> None:
    with Bench([child("A", hit=64), child("B", hit=32)], raykv={"load_cost": True}) as bench:
        bench.half.loads._cost.load_rates[0], bench.half.loads._cost.prefill_rate = 1.0, 1e12
        bench.add(100)
        bench.run()
        found = reasons(stories(bench)["r0"])
        assert {(32, 64, "A", Why.COST), (64, 96, "A", Why.NOT_FOUND), (32, 96, "B", Why.NOT_FOUND)} <= found


@pytest.mark.parametrize("asynchronous", [True, False])
def test_why_load_failed(asynchronous: bool) -> None:
    with Bench([child("A", hit=64, failing="blocks", asynchronous=asynchronous)]) as bench:
        bench.add(100)
        bench.run()
        story = stories(bench)["r0"]
        assert sources(story) == [(0, 100, "computed")]
        assert (0, 64, "A", Why.FAILED) in reasons(story)
        assert bench.stories.tokens == {"computed": 100}


@pytest.mark.parametrize("alone", [False, True])
def test_why_load_failed_in_a_tier(alone: bool) -> None:
    with TierBench(None if alone else []) as bench:
        bench.add(100, max_tokens=1)
        bench.forget_locally()
        bench.store.fail_loads = {0}
        name = bench.add(bench.results["r0"].prompt, max_tokens=1)
        bench.run()
        story = stories(bench)[name]
        assert sources(story) == [(0, 100, "computed")]
        assert (0, 96, "TierConnector" if alone else "tier", Why.FAILED) in reasons(story)
        if alone:
            assert "told to fail" in {one.detail for one in story.missed}


def test_why_another_child_took_it() -> None:
    with Bench([child("A", hit=64), child("B", hit=80)]) as bench:
        bench.add(100)
        bench.run()
        story = stories(bench)["r0"]
        assert sources(story) == [(0, 64, "A"), (64, 100, "computed")]
        assert {
            (0, 64, "B", Why.OTHER_CHILD), (64, 80, "B", Why.OTHER_CHILD), (80, 96, "B", Why.NOT_FOUND),
            (64, 96, "A", Why.NOT_FOUND), (96, 100, "", Why.ALWAYS_COMPUTED),
        } == reasons(story)  # fmt: skip


def by_hand() -> list[dict[str, Any]]:
    """A has 100 tokens, B 512; their loads end when a test says so, and either stands in for the other."""
    return [ranged("A", hit=100, auto=False), ranged("B", hit=512, auto=False)]


def test_a_part_that_another_child_brought_after_all(overlap: bool) -> None:
    with Bench(by_hand(), raykv={"load_policy": "compose"}, async_scheduling=overlap) as bench:
        bench.add(600)
        bench.wait_for_kv("r0")
        bench.child("A").failing = "request"
        bench.child("A").report("recv", "r0")
        bench.child("B").report("recv", "r0")
        bench.until(lambda: ("r0", 96) in bench.child("B").allocated, "B to load the part of A")
        bench.step(4)
        bench.child("B").report("recv", "r0")
        bench.finish("r0")
        story = stories(bench)["r0"]
        assert sources(story) == [(0, 96, "B"), (96, 512, "B"), (512, 600, "computed")]
        assert (0, 96, "A", Why.FAILED) in reasons(story) and "brought it" in detail(story, Why.FAILED)


def test_of_a_load_whose_end_failed_the_front_is_kept(overlap: bool) -> None:
    with Bench(
        [by_hand()[0], child("B", hit=512, auto=False)], raykv={"load_policy": "compose"}, async_scheduling=overlap
    ) as bench:
        bench.add(600)
        bench.wait_for_kv("r0")
        bench.child("B").failing = "request"
        bench.child("A").report("recv", "r0")
        bench.child("B").report("recv", "r0")
        bench.finish("r0")
        story = stories(bench)["r0"]
        assert sources(story) == [(0, 96, "A"), (96, 600, "computed")]
        assert (96, 512, "B", Why.FAILED) in reasons(story) and story.load_s > 0


# -- what a client is told ------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [None, {}, {"raykv_explain": False}, {"raykv_explain": 1}])
def test_who_does_not_ask_is_told_nothing(params: dict[str, Any] | None) -> None:
    with Bench([child("A", hit=64)]) as bench:
        bench.add(100, params=params)
        bench.run()
        assert bench.results["r0"].params is None


@pytest.mark.parametrize("returns", [None, {"x": 1}])
def test_who_asks_is_told_beside_what_the_children_return(returns: dict[str, Any] | None) -> None:
    with Bench([child("A", hit=64, returns=returns)]) as bench:
        bench.add(100, params={**EXPLAIN, "raykv_story": {"of": "another engine"}})
        bench.add(100, seed=1, params={**EXPLAIN, "do_remote_prefill": False})
        bench.run()
        told = bench.results["r0"].params
        assert told is not None and {**told, "raykv_story": 0} == {**(returns or {}), "raykv_story": 0}
        assert [one["source"] for one in told["raykv_story"]["ranges"]] == ["A", "computed"]
        assert told["raykv_story"]["request"] == "r0" and "hashes" not in told["raykv_story"]
        # No child hears of what is RayKV's alone.
        assert bench.child("A").seen_params in (
            [None, {"do_remote_prefill": False}],
            [{"do_remote_prefill": False}],
        )


def test_an_aborted_request_is_told_nothing_and_counted() -> None:
    with Bench([child("A", hit=64, auto=False)]) as bench:
        bench.add(100, params=dict(EXPLAIN))
        bench.wait_for_kv("r0")
        bench.abort("r0")
        bench.step()
        story = stories(bench)["r0"]
        assert sources(story) == [(0, 100, "not run")]
        bench.child("A").auto = True
        bench.run()
        assert bench.results["r0"].params is None


def test_nothing_is_kept_with_stories_0() -> None:
    with Bench([child("A", hit=64)], raykv={"stories": 0}) as bench:
        bench.add(100, params=dict(EXPLAIN))
        bench.run()
        assert stories(bench) == {} and bench.stories.tokens == {"A": 64, "computed": 36}
        assert bench.results["r0"].params is not None


def test_only_its_own_keys_are_taken_out() -> None:
    params = {**EXPLAIN, "raykv_story": {}, "raykv": {"B": 1}, "x": 2}
    assert without_own(params) == {"raykv": {"B": 1}, "x": 2} and len(params) == 4


def test_what_an_lmcache_is_told_to_save_counts_by_request() -> None:
    with Bench([child("A")]) as bench:
        bench.add(100)
        found = bench.stories
        op = SimpleNamespace(start=0, end=64)
        meta = SimpleNamespace(
            requests=[
                SimpleNamespace(request_id="r0", direction="STORE", op=op),
                SimpleNamespace(request_id="r0", direction="STORE", op=SimpleNamespace(start=64, end=96)),
                SimpleNamespace(request_id="r0", direction="RETRIEVE", op=op),
                SimpleNamespace(request_id="gone", direction="STORE", op=op),
                SimpleNamespace(token_ids=[1], is_store=True),
            ]
        )
        found.saves("A", meta)
        found.saves("A", SimpleNamespace())
        bench.run()
        assert stories(bench)["r0"].saved_tokens == {"A": 96}


@pytest.fixture(autouse=True)
def all_are_checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each story of this module covers its prompt at the moment its request ends, too."""
    ended = Stories.ended

    def checked(self: Stories, *args: Any, **more: Any) -> Any:
        found = ended(self, *args, **more)
        self.check_integrity()
        return found

    monkeypatch.setattr(Stories, "ended", checked)
    yield
