"""`raykv up` with real engines on a simulated cluster: prefill here, decode there, through the router."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.prompts import MAX_TOKENS, PROMPTS
from tests.support.real_cluster import RealCluster, spec, tiers_for, until
from tests.support.sim_cluster import SimCluster

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.timeout(900)]

# One in `make test`: each starts two engines, and a third one after the kill.
TRANSPORTS = ("tiers", *(pytest.param(name, marks=pytest.mark.soak) for name in ("nixl", "fs")))
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def sim() -> Iterator[SimCluster]:
    cluster = SimCluster([NODE] * 2)
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(params=TRANSPORTS)
def running(
    request: pytest.FixtureRequest, sim: SimCluster, tiny_model: Path, tmp_path: Path
) -> Iterator[tuple[str, RealCluster]]:
    found = RealCluster(spec(tiny_model, request.param, tiers_for(request.param, tmp_path)))
    try:
        yield request.param, found
    finally:
        found.down()


def test_prefill_here_decode_there(running: tuple[str, RealCluster], baseline: dict[str, list[int]]) -> None:
    transport, cluster = running
    assert {row.node for row in cluster.first.values()} == {row.node for row in cluster.rows().values()}
    assert len({row.node for row in cluster.first.values()}) == 2, "each on a node of its own"
    for name in ("page", "long", "branch", "aligned"):
        assert cluster.complete(PROMPTS[name], MAX_TOKENS) == baseline[name], (transport, name)
    assert cluster.external("d-0") > len(PROMPTS["page"]) / 2, "nothing came from the prefill engine"
    # The prefill engine dies: the decode engine computes alone, and another one takes its place.
    os.kill(cluster.first["p-0"].pid, signal.SIGKILL)
    for name in ("crowd0", "crowd1"):
        assert cluster.complete(PROMPTS[name], MAX_TOKENS) == baseline[name]
    until(lambda: (row := cluster.rows()["p-0"]).state == "ready" and row.pid != cluster.first["p-0"].pid, "no new one")
    assert cluster.rows()["d-0"].pid == cluster.first["d-0"].pid
    assert cluster.complete(PROMPTS["crowd2"], MAX_TOKENS) == baseline["crowd2"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_two_ranks_each(
    sim: SimCluster, tiny_model: Path, tmp_path: Path, baseline_of_two_ranks: dict[str, list[int]]
) -> None:
    """Scenario 15 with real engines: each rank of the decode engine reads from its own rank of the prefill engine."""
    tiers = tiers_for("nixl", tmp_path)
    wanted = spec(tiny_model, "nixl", tiers, cores=("0|1", "0|1"), tensor_parallel_size=2)
    cluster = RealCluster(wanted)
    try:
        for name in ("page", "aligned"):
            before = cluster.external("d-0")
            assert cluster.complete(PROMPTS[name], MAX_TOKENS) == baseline_of_two_ranks[name], name
            assert cluster.external("d-0") - before == len(PROMPTS[name]), "it did not come from the prefill engine"
    finally:
        cluster.down()
