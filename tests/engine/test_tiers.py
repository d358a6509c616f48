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

from tests.support.configs import file_child, multi, tier_child
from tests.support.engine import Engine, Result
from tests.support.prompts import MAX_TOKENS, PROMPTS
from tests.support.ray_cluster import RayCluster
from tests.support.waiting import eventually

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

        eventually(hits, "hit after the store's death", patience_s=90)
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
        eventually(
            lambda: len(second.call_core("tests.support.probes:store_status", tiers.store)["engines"]) == 1,
            "end of the dead engine in the store",
        )
        second.forget(30)
        assert second.generate(PROMPTS["long"], MAX_TOKENS).token_ids == baseline["long"]
        second.forget(30)
        assert second.generate(PROMPTS["branch2"], MAX_TOKENS).token_ids == baseline["branch2"]
        second.wait_free_blocks(free, timeout_s=30)
        second.call_core("tests.support.probes:store_settle", tiers.store)


# -- beside other children: scenarios 5, 6 and 8 ----------------------------------------------------------------

REMOTE = {"do_remote_prefill": True, "remote_engine_id": "nobody", "remote_block_ids": [1]}
PATIENCE_S = 4.0


@dataclass
class Crowded(Tiers):
    """Children in this order: `slow` (FileChild), the tier, `pd` (PullChild), `late` (FileChild); `first` loads."""

    folder: Path = Path()

    def set(self, child: str, *names: str) -> None:
        """Exactly these control files of the child exist."""
        control = self.folder / child / "control"
        for path in control.iterdir():
            path.unlink(missing_ok=True)
        for name in names:
            (control / name).touch()

    def has(self, child: str, name: str) -> bool:
        return (self.folder / child / "control" / name).exists()

    def metric(self, name: str) -> int:
        return int(sum(n for key, n in self.engine.stats()["metrics"].items() if key.split("{")[0] == f"vllm:{name}"))

    def both_hold(self, name: str, blocks: int) -> list[int]:
        """`slow` holds all of the prompt, the tier its first blocks only, vLLM nothing. Returns the prompt."""
        self.set("slow")
        self.ask(name)
        self.clear("host")
        assert self.engine.generate(PROMPTS[name][: blocks * BLOCK + 1], 1).token_ids
        self.settle()
        self.engine.forget(30)
        return PROMPTS[name]


@pytest.fixture(scope="module")
def crowded(tiny_model: Path, ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowded]:
    store, folder = f"c{os.getpid()}", tmp_path_factory.mktemp("crowded")
    slow = file_child(folder / "slow", run="inline", name="slow", lookup_timeout_s=PATIENCE_S)
    pd = {
        **file_child(folder / "pd", run="inline", name="pd"),
        "kv_connector": "PullChild",
        "kv_connector_module_path": "tests.support.pull_child",
    }
    late = file_child(folder / "late", run="inline", name="late", save="none")
    tier = tier_child(store, host="16MiB")
    env = {**ray_cluster.env, "PYTHONPATH": os.getcwd()}
    with Engine(tiny_model, multi([slow, tier, pd, late]), env=env) as engine:
        found = Crowded(engine, tier, env, store, folder=folder)
        found.all_free = engine.free_blocks()
        yield found


def test_scenario_5_a_cold_request(crowded: Crowded, baseline: dict[str, list[int]]) -> None:
    """No child has anything: the tier keeps every whole block, and gives them all back."""
    crowded.set("slow", "miss")
    crowded.clear("host")
    cold = crowded.ask("long")
    assert cold.token_ids == baseline["long"] and cold.num_external_tokens == 0
    crowded.settle()
    (host,) = crowded.status()["tiers"]
    assert host["used"] == (len(PROMPTS["long"]) + MAX_TOKENS - 1) // BLOCK
    warm = crowded.ask("long")
    assert warm.token_ids == baseline["long"] and warm.num_external_tokens == full_blocks(len(PROMPTS["long"]))


def test_scenario_6_the_loser_must_not_write(crowded: Crowded, baseline: dict[str, list[int]]) -> None:
    """The tier has it, and the request says that another engine has it too: the P/D child only lets that one go."""
    crowded.set("slow", "miss")
    for name in ("aligned", "page"):
        crowded.ask(name)
        crowded.settle()
        crowded.engine.forget(30)
        crowded.set("pd")
        result = crowded.engine.generate(PROMPTS[name], MAX_TOKENS, kv_transfer_params=REMOTE)
        assert result.token_ids == baseline[name]
        assert result.num_external_tokens == full_blocks(len(PROMPTS[name]))
        assert crowded.has("pd", "released") and not crowded.has("pd", "pulled")


def test_scenario_8_a_look_up_that_is_not_ready_is_waited_for(crowded: Crowded, baseline: dict[str, list[int]]) -> None:
    prompt = crowded.both_hold("page", 2)
    crowded.set("slow", "not_ready")
    asked, loads = crowded.metric("raykv_tier_look_ups"), crowded.metric("raykv_tier_loads")
    pending = crowded.engine.submit(prompt, MAX_TOKENS)
    eventually(lambda: crowded.has("slow", "asked"), "look-up in the slow child")
    crowded.set("slow")
    result = pending.result()
    assert result.token_ids == baseline["page"] and result.num_external_tokens == full_blocks(len(prompt))
    assert crowded.metric("raykv_tier_look_ups") == asked + 1, "the tier is asked once, not once a poll"
    assert crowded.metric("raykv_tier_loads") == loads


def test_scenario_8_with_a_deadline(crowded: Crowded, baseline: dict[str, list[int]]) -> None:
    """It is never answered: what the tier has is loaded, and a queue of such requests moves."""
    prompt = crowded.both_hold("page", 2)
    crowded.set("slow", "not_ready")
    names = [name for name in PROMPTS if name.startswith("crowd")]
    others = {name: crowded.engine.submit(PROMPTS[name], MAX_TOKENS) for name in names}
    result = crowded.engine.submit(prompt, MAX_TOKENS).result()
    assert result.token_ids == baseline["page"] and result.num_external_tokens == 2 * BLOCK
    assert {name: one.result().token_ids for name, one in others.items()} == {name: baseline[name] for name in names}
    crowded.set("slow")


def test_scenario_8_who_comes_first_does_not_wait(crowded: Crowded, baseline: dict[str, list[int]]) -> None:
    """A child behind the tier that never answers holds nobody up."""
    prompt = crowded.both_hold("page", 2)
    crowded.set("slow", "miss")
    crowded.set("late", "not_ready")
    result = crowded.engine.generate(prompt, MAX_TOKENS)
    assert result.token_ids == baseline["page"] and result.num_external_tokens == 2 * BLOCK
    crowded.set("late")
