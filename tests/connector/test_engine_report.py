"""An engine's figures on both ways out: handed to Ray by its desk's thread, and in vLLM's own statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

from raykv.connector.engine_report import EngineReport
from raykv.observe.names import CHILD_COUNTERS, CHILD_TIMES, seconds_name
from raykv.observe.samples import Sample
from tests.support.engine_views import engine_view, story
from tests.support.fake_config import child
from tests.support.fake_worker import Bench

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    before = set(REGISTRY._collector_to_names)
    yield
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def scrape(*labels: str) -> dict[tuple[str, ...], float]:
    """By metric and the values of these labels: the samples that have them."""
    return {
        (sample.name, *(sample.labels[label] for label in labels)): sample.value
        for family in text_string_to_metric_families(generate_latest().decode())
        for sample in family.samples
        if all(label in sample.labels for label in labels) and not sample.name.endswith("_created")
    }


def test_it_reports_every_few_seconds_and_complains_once(caplog: pytest.LogCaptureFixture) -> None:
    told: list[list[Sample]] = []

    def report(samples: Iterable[Sample]) -> None:
        told.append(list(samples))
        if len(told) == 2:
            raise RuntimeError("Ray is away")

    engine = EngineReport(report, every_s=5.0)
    engine.story(story(lookup_s=0.1))
    for now in (100.0, 101.0, 104.9, 105.0, 110.0):
        engine.view(engine_view(), now)
    assert len(told) == 3
    assert sum("Ray is away" in record.message for record in caplog.records) == 1
    assert ("raykv_missed_tokens_total", 48) in {(sample.metric, sample.value) for sample in told[0]}


def test_vllm_has_tokens_by_source_misses_by_reason_and_times(hosted: bool) -> None:
    with Bench([child("x", hosted, hit=32)]) as bench:
        prom = KVConnectorProm(bench.config, ["model_name", "engine"], {0: ["m", "0"]})
        log = KVConnectorLogging(bench.config.kv_transfer_config)
        missed = {("x", "evicted"): 0}
        bench.half.also_tell(missed)
        for number in range(3):
            bench.add(50, seed=number)
            bench.run()
            missed["x", "evicted"] += 18
        bench.add(50, seed=9)  # the steps of the next request bring what was counted since
        bench.run()
        for data in bench.stats:
            data = msgspec.msgpack.decode(msgspec.msgpack.encode(data))
            prom.observe(data)
            log.observe(data)
        sources = scrape("source")
        tokens = {
            source: value for (name, source), value in sources.items() if name == "vllm:raykv_prompt_tokens_total"
        }
        assert tokens["x"] >= 3 * 32 and tokens["computed"] >= 3 * 18
        assert sum(tokens.values()) in (3 * 50, 4 * 50), "whole requests only"
        assert scrape("raykv_child", "why")["vllm:raykv_missed_tokens_total", "x", "evicted"] >= 36
        metrics = scrape("raykv_child")
        assert metrics["vllm:raykv_load_seconds_total", "x"] > 0
        assert metrics["vllm:raykv_child_incarnation", "x"] == 0
        lines: list[str] = []
        log.log(lambda text, *args: lines.append(text % args))
        assert "prompt_tokens.x=" in lines[0]


def test_a_child_that_came_while_the_engine_ran_has_its_own_metrics() -> None:
    """vLLM's front end knows the children of the config only; the statistics bring the class of another one."""
    with Bench([child("x", cls="FakeChildWithProm", stats=True)]) as bench:
        prom = KVConnectorProm(bench.config, ["model_name", "engine"], {0: ["m", "0"]})
        bench.add(50)
        bench.run()
        for data in bench.stats:
            later: dict[str, Any] = {f"late {name}" if name else name: entry for name, entry in data.items()}
            prom.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(later)))
        metrics = scrape("raykv_child")
        assert metrics["vllm:fake_polls_total", "late x"] > 0
        assert metrics["vllm:raykv_child_up", "late x"] == 1
        assert metrics["vllm:fake_polls_total", "x"] == 0, "the one of the config was not heard of"


def test_a_child_that_was_down_says_for_how_long() -> None:
    with Bench([child("A", hit=32), child("B")]) as bench:
        bench.add(50)
        bench.step(2)
        bench.host("A").die()
        bench.until(lambda: not bench.half.children[0].up, "A to be seen as down")
        bench.until(lambda: bench.half.children[0].up or bench.half.children[0].has_offer, "A to come back")
        for number in range(2):
            bench.add(50, seed=number + 1)
            bench.run()
        counters = [entry["counters"] for data in bench.stats for name, entry in data.items() if name == "A"]
        assert sum(counter.get("recoveries", 0) for counter in counters) == 1
        assert any("down_ms" in counter for counter in counters)


def test_all_that_children_count_is_registered() -> None:
    with Bench([child("x")]) as bench:
        KVConnectorProm(bench.config, ["model_name", "engine"], {0: ["m", "0"]})
        names = {family.name for family in REGISTRY.collect()}
        wanted = {f"vllm:raykv_{name}" for name in CHILD_COUNTERS}
        wanted |= {f"vllm:raykv_{seconds_name(name)}" for name in CHILD_TIMES}
        assert wanted <= names
