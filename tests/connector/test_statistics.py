"""Scenario 13: statistics by child, through vLLM's own logging and Prometheus classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

from tests.support.fake_config import child
from tests.support.fake_worker import Bench

pytestmark = pytest.mark.vllm

NAMES = ("x", "y", "plain")


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """Metrics live in a registry of the process; two tests must be able to make the same ones."""
    before = set(REGISTRY._collector_to_names)
    yield
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def scrape() -> dict[tuple[str, str], float]:
    """(metric, child) to value."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(generate_latest().decode()):
        for sample in family.samples:
            if "raykv_child" in sample.labels and not sample.name.endswith("_created"):
                found[sample.name, sample.labels["raykv_child"]] = sample.value
                assert sample.labels["engine"] == "0" and sample.labels["model_name"] == "m"
    return found


def children(hosted: bool) -> list[dict[str, Any]]:
    classes = {"x": "FakeChildWithProm", "y": "FakeChildWithProm", "plain": "FakeChild"}
    return [child(name, hosted, cls=classes[name], stats=True, hit=32 * (name == "y")) for name in NAMES]


def test_two_children_of_one_class_and_one_without_metrics(ranks: int, hosted: bool, overlap: bool) -> None:
    with Bench(children(hosted), ranks=ranks, async_scheduling=overlap) as bench:
        prom = KVConnectorProm(bench.config, ["model_name", "engine"], {0: ["m", "0"]})
        log = KVConnectorLogging(bench.config.kv_transfer_config)
        for i in range(3):
            bench.add(50, seed=i)
            bench.run()
        for name in NAMES:
            bench.child(name).stats = False
        bench.add(50, seed=9)  # its steps bring what was still on the way
        bench.run()
        for data in bench.stats:
            # As they travel from the engine to its front end.
            data = msgspec.msgpack.decode(msgspec.msgpack.encode(data))
            prom.observe(data)
            log.observe(data)
        metrics = scrape()
        for name in ("x", "y"):
            assert metrics["vllm:fake_polls_total", name] == bench.child(name).emitted > 0
        assert ("vllm:fake_polls_total", "plain") not in metrics
        assert metrics["vllm:raykv_tokens_loaded_total", "y"] == 4 * 32
        assert metrics["vllm:raykv_loads_total", "y"] == 4
        assert metrics["vllm:raykv_tokens_loaded_total", "x"] == 0
        assert all(metrics["vllm:raykv_load_failures_total", name] == 0 for name in NAMES), "a first one is a rise"
        assert {name for metric, name in metrics if metric == "vllm:raykv_child_up"} == set(NAMES)
        assert all(metrics["vllm:raykv_child_up", name] == 1 for name in NAMES)
        lines: list[str] = []
        log.log(lambda text, *args: lines.append(text % args))
        assert f"plain.polls={bench.child('plain').emitted}" in lines[0]
        assert "y.tokens_loaded=128" in lines[0]


def test_statistics_that_raise_are_left_out(hosted: bool) -> None:
    with Bench(children(hosted)) as bench:
        if not hosted:
            bench.child("x").stats = False  # what raises in vLLM's worker is vLLM's to handle
        else:
            bench.child("x").raises["get_kv_connector_stats"] = 2
        bench.add(50)
        bench.run()
        assert any("y" in data for data in bench.stats)


def test_the_child_that_is_down_says_so() -> None:
    with Bench([child("A", hit=32), child("B")]) as bench:
        prom = KVConnectorProm(bench.config, ["model_name", "engine"], {0: ["m", "0"]})
        bench.hosts.unstartable.add("A")
        bench.add(50)
        bench.step(2)
        bench.host("A").die()
        bench.until(lambda: not bench.half.children[0].up, "A to be seen as down")
        bench.finish("r0")
        for data in bench.stats:
            prom.observe(data)
        assert scrape()["vllm:raykv_child_up", "A"] == 0
        assert scrape()["vllm:raykv_child_up", "B"] == 1
        assert scrape()["vllm:raykv_restarts_total", "A"] == 1
        bench.hosts.unstartable.clear()
