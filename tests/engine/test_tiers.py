"""TierConnector on real engines: host and disk tiers of one store, shared by engines and outliving them and itself."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import wait_until
from tests.support.configs import multi, tier_child
from tests.support.engine import Engine, Result
from tests.support.prompts import MAX_TOKENS, PROMPTS
from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.timeout(900)]

BLOCK = 32


def full_blocks(tokens: int) -> int:
    """Tokens of a prompt that a store can give back: whole blocks, and at least one token is computed."""
    return (tokens - 1) // BLOCK * BLOCK


@dataclass
class Tiers:
    """An engine whose MultiConnector has one TierConnector, and the store behind it."""

    engine: Engine
    config: dict[str, Any]
    env: dict[str, str]
    store: str
    all_free: int = 0

    def ask(self, name: str) -> Result:
        """A request of whose prompt vLLM itself has nothing."""
        self.engine.forget(30)
        return self.engine.generate(PROMPTS[name], MAX_TOKENS)

    def loaded(self, medium: str) -> int:
        metrics = self.engine.stats()["metrics"]
        name = "vllm:raykv_tier_tokens_loaded"
        return int(sum(n for key, n in metrics.items() if key.startswith(name + "{") and f"medium={medium}" in key))

    def status(self) -> dict[str, Any]:
        return self.engine.call_core("tests.support.probes:store_status", self.store)

    def settle(self) -> None:
        """Every save is committed and every move to the disk has ended."""
        self.engine.wait_free_blocks(self.all_free, timeout_s=30)
        self.engine.call_core("tests.support.probes:store_settle", self.store)

    def clear(self, medium: str) -> None:
        self.settle()
        self.engine.call_core("tests.support.probes:store_clear", self.store, medium)

    def kill_store(self) -> int:
        pid = self.status()["pid"]
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_back(self, old: int) -> None:
        """Until the store's next life serves this engine: a look-up, asked for by a request, is answered."""

        def hits() -> bool:
            before = self.loaded("host") + self.loaded("disk")
            self.ask("page")
            return self.loaded("host") + self.loaded("disk") > before

        wait_until(hits, "hit after the store's death", timeout_s=90)
        assert self.status()["pid"] != old


@pytest.fixture(scope="module")
def tiers(tiny_model: Path, ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiers]:
    store = f"t{os.getpid()}"
    child = tier_child(store, host="16MiB", disk="64MiB", path=tmp_path_factory.mktemp("disk"), cascade="write")
    env = {**ray_cluster.env, "PYTHONPATH": os.getcwd()}
    with Engine(tiny_model, multi([child]), env=env) as engine:
        found = Tiers(engine, child, env, store)
        found.all_free = engine.free_blocks()
        yield found


def test_cold_host_disk_and_mixed(tiers: Tiers, baseline: dict[str, list[int]]) -> None:
    """Each token is where the metrics say: from the host, from the disk, from both, computed."""
    assert tiers.ask("long").token_ids == baseline["long"]
    assert tiers.loaded("host") == tiers.loaded("disk") == 0
    tiers.settle()
    whole = full_blocks(len(PROMPTS["long"]))
    assert tiers.ask("long").token_ids == baseline["long"]
    assert (tiers.loaded("host"), tiers.loaded("disk")) == (whole, 0)
    tiers.clear("host")
    assert tiers.ask("long").token_ids == baseline["long"]
    assert (tiers.loaded("host"), tiers.loaded("disk")) == (whole, whole)
    # `branch` has the first 800 tokens of `long`, now on the disk only, and its own end, not seen yet
    tiers.clear("host")
    assert tiers.ask("branch").token_ids == baseline["branch"]
    assert (tiers.loaded("host"), tiers.loaded("disk")) == (whole, whole + 800)
    tiers.settle()
    host, disk = tiers.loaded("host"), tiers.loaded("disk")
    assert tiers.ask("branch").token_ids == baseline["branch"]
    assert tiers.loaded("host") > host
    assert tiers.loaded("host") + tiers.loaded("disk") - host - disk == full_blocks(len(PROMPTS["branch"]))
    tiers.settle()


def test_a_crowd_with_aborts_loses_no_block(tiers: Tiers, baseline: dict[str, list[int]]) -> None:
    names = [name for name in PROMPTS if name.startswith("crowd")]
    dice = random.Random(7)
    for turn in range(3):
        tiers.engine.forget(30)
        pending = {name: tiers.engine.submit(PROMPTS[name], MAX_TOKENS, request_id=f"{name}.{turn}") for name in names}
        aborted = set(dice.sample(names, 2))
        for name in aborted:
            time.sleep(dice.random() * 0.02)
            tiers.engine.abort(f"{name}.{turn}")
        for name, request in pending.items():
            tokens = request.result().token_ids
            assert tokens == baseline[name][: len(tokens)] and (name in aborted or len(tokens) == MAX_TOKENS)
    tiers.settle()


def kill_the_store(tiers: Tiers, baseline: dict[str, list[int]], times: int) -> None:
    """At random moments of a load of requests: all end with the right tokens, and what was kept is served again."""
    assert tiers.ask("page").token_ids == baseline["page"]
    tiers.settle()
    names = [name for name in PROMPTS if name.startswith("crowd")]
    dice = random.Random(times)
    for _ in range(times):
        tiers.engine.forget(60)
        pending = {name: tiers.engine.submit(PROMPTS[name], MAX_TOKENS) for name in dice.sample(names, 5)}
        time.sleep(dice.random() * 0.5)
        old = tiers.kill_store()
        assert {name: request.result().token_ids for name, request in pending.items()} == {
            name: baseline[name] for name in pending
        }
        tiers.wait_back(old)
        tiers.settle()  # checks the integrity of the store, and that every block of the engine is free


def test_the_store_is_killed(tiers: Tiers, baseline: dict[str, list[int]]) -> None:
    kill_the_store(tiers, baseline, 2)


@pytest.mark.soak
def test_the_store_is_killed_20_times(tiers: Tiers, baseline: dict[str, list[int]]) -> None:
    kill_the_store(tiers, baseline, 20)


def test_a_second_engine_and_a_killed_first(tiers: Tiers, tiny_model: Path, baseline: dict[str, list[int]]) -> None:
    """The second hits what the first saved, also when the first is killed in a save. It has a TierConnector alone."""
    assert tiers.ask("aligned").token_ids == baseline["aligned"]
    tiers.settle()
    with Engine(tiny_model, tiers.config, env=tiers.env) as second:
        free = second.free_blocks()
        result = second.generate(PROMPTS["aligned"], MAX_TOKENS)
        assert result.token_ids == baseline["aligned"]
        assert result.num_external_tokens == full_blocks(len(PROMPTS["aligned"]))
        second.wait_free_blocks(free, timeout_s=30)
        tiers.engine.submit(PROMPTS["branch2"], MAX_TOKENS).first_token.wait(60)
        tiers.engine.kill()
        wait_until(
            lambda: len(second.call_core("tests.support.probes:store_status", tiers.store)["engines"]) == 1,
            "end of the dead engine in the store",
        )
        second.forget(30)
        assert second.generate(PROMPTS["long"], MAX_TOKENS).token_ids == baseline["long"]
        second.forget(30)
        assert second.generate(PROMPTS["branch2"], MAX_TOKENS).token_ids == baseline["branch2"]
        second.wait_free_blocks(free, timeout_s=30)
        second.call_core("tests.support.probes:store_settle", tiers.store)
