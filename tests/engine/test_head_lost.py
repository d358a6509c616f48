"""Ray's head is killed under load and comes back. The short run stays below Ray's 60 s; the soak runs for 90 s."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from raykv.actors import local_cluster
from tests.engine.conftest import Offload
from tests.support.prompts import MAX_TOKENS, PROMPTS
from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.timeout(900)]


def requests_for(offload: Offload, seconds: float, baseline: dict[str, list[int]]) -> int:
    """Requests one after the other, each checked; returns how many."""
    rng = random.Random(0)
    names = sorted(PROMPTS)
    deadline = time.monotonic() + seconds
    count = 0
    while time.monotonic() < deadline:
        name = rng.choice(names)
        assert offload.engine.generate(PROMPTS[name], MAX_TOKENS).token_ids == baseline[name]
        count += 1
        if count % 5 == 0:
            offload.engine.forget()
    return count


def lose_the_head(offload: Offload, cluster: RayCluster, baseline: dict[str, list[int]], seconds: float) -> int:
    """Without the head: requests go on, also when a child dies; with it again, that child comes back."""
    head = next(process for process in cluster.record.processes if process.role == "gcs_server")
    os.kill(head.pid, signal.SIGKILL)
    count = requests_for(offload, seconds / 2, baseline)
    old = offload.children.kill("ExampleConnector")
    count += requests_for(offload, seconds / 2, baseline)
    assert offload.children.metric("child_up", "ExampleConnector") == 0
    cluster.record, restarted = local_cluster.restart_head()
    assert "gcs_server" in restarted
    offload.children.wait_back("ExampleConnector", old)
    return count + requests_for(offload, 5, baseline)


def test_for_a_short_time(offload: Offload, ray_cluster: RayCluster, baseline: dict[str, list[int]]) -> None:
    assert lose_the_head(offload, ray_cluster, baseline, seconds=16) > 0


@pytest.mark.soak
def test_for_ninety_seconds(offload: Offload, ray_cluster: RayCluster, baseline: dict[str, list[int]]) -> None:
    assert lose_the_head(offload, ray_cluster, baseline, seconds=90) > 0
