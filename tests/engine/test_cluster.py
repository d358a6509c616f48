"""`raykv up` with real engines on a simulated cluster: prefill here, decode there, through the router."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raykv.launch import up as launch
from raykv.launch.spec_file import spec_from
from tests.support.process import free_ports
from tests.support.prompts import MAX_TOKENS, PROMPTS
from tests.support.sim_cluster import SimCluster

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.timeout(900)]

VLLM = [sys.executable, "-m", "tests.support.quiet_vllm", "serve"]
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 4096,
    "max_num_batched_tokens": 4096,
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# One in `make test`: each starts two engines, and a third one after the kill.
TRANSPORTS = ("tiers", *(pytest.param(name, marks=pytest.mark.soak) for name in ("nixl", "fs")))


def tiers(transport: str, folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"medium": "host", "capacity": "256MiB"}]
    if transport == "tiers":
        found.append({"medium": "peer"})
    elif transport == "fs":
        found.append({"medium": "fs", "path": str(folder), "capacity": "1GiB"})
    return found


def spec(model: Path, transport: str, folder: Path) -> Any:
    engine = {"resources": {"num_cpus": 1}, "transport": transport}
    return spec_from(
        json.dumps(
            {
                "model": str(model),
                "command": VLLM,
                "vllm": OPTIONS,
                "environment": ENVIRONMENT,
                "engines": [
                    {"name": "p", "role": "prefill", "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0"}, **engine},
                    {"name": "d", "role": "decode", "environment": {"VLLM_CPU_OMP_THREADS_BIND": "1"}, **engine},
                ],
                "stores": [
                    {
                        "name": "default",
                        "tiers": tiers(transport, folder),
                        "cascade": "write",
                        "lookup_timeout_s": 10,
                        "timeout_s": 60,
                        "load_timeout_s": 60,
                    }
                ],
                "router": {"port": free_ports(1)[0], "min_prompt_chars": 0, "prefill_timeout_s": 120},
                "startup_timeout_s": 300,
            }
        )
    )


class Cluster:
    """What runs, asked through its router."""

    def __init__(self, wanted: Any) -> None:
        self.lines: list[launch.Progress] = []
        up = launch.up(wanted, self.lines.append)
        assert up.router is not None
        self.router = up.router
        self.first = {row.name: row for row in up.status.engines}

    def rows(self) -> dict[str, Any]:
        from raykv.actors import controller_handle

        found = controller_handle.find()
        assert found is not None
        return {row.name: row for row in found.status(60.0).engines}

    def complete(self, name: str) -> list[int]:
        body = {
            "model": self.model,
            "prompt": PROMPTS[name],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            self.router + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return list(json.load(answer)["choices"][0]["token_ids"])

    @property
    def model(self) -> str:
        with urllib.request.urlopen(self.router + "/v1/models", timeout=60) as answer:
            return str(json.load(answer)["data"][0]["id"])

    def metric(self, engine: str, name: str, **labels: str) -> float:
        """The sum over a metric's series of one engine."""
        with urllib.request.urlopen(self.rows()[engine].url + "/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith(name) and all(f'{key}="{value}"' in line for key, value in labels.items())
        )


def until(what: Callable[[], Any], why: str, timeout_s: float = 300.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := what()):
        assert time.monotonic() < deadline, why
        time.sleep(0.3)
    return value


@pytest.fixture(scope="module")
def sim() -> Iterator[SimCluster]:
    cluster = SimCluster([{"num_cpus": 1, "object_store_memory": 80 << 20}] * 2)
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(params=TRANSPORTS)
def running(
    request: pytest.FixtureRequest, sim: SimCluster, tiny_model: Path, tmp_path: Path
) -> Iterator[tuple[str, Cluster]]:
    wanted = spec(tiny_model, request.param, tmp_path)
    lines: list[launch.Progress] = []
    try:
        yield request.param, Cluster(wanted)
    finally:
        launch.down(lines.append)


def test_prefill_here_decode_there(running: tuple[str, Cluster], baseline: dict[str, list[int]]) -> None:
    transport, cluster = running
    assert {row.node for row in cluster.first.values()} == {row.node for row in cluster.rows().values()}
    assert len({row.node for row in cluster.first.values()}) == 2, "each on a node of its own"
    for name in ("page", "long", "branch", "aligned"):
        assert cluster.complete(name) == baseline[name], (transport, name)
    external = cluster.metric("d-0", "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    assert external > len(PROMPTS["page"]) / 2, "nothing came from the prefill engine"
    # The prefill engine dies: the decode engine computes alone, and another one takes its place.
    os.kill(cluster.first["p-0"].pid, signal.SIGKILL)
    for name in ("crowd0", "crowd1"):
        assert cluster.complete(name) == baseline[name]
    until(lambda: (row := cluster.rows()["p-0"]).state == "ready" and row.pid != cluster.first["p-0"].pid, "no new one")
    assert cluster.rows()["d-0"].pid == cluster.first["d-0"].pid
    assert cluster.complete("crowd2") == baseline["crowd2"]
