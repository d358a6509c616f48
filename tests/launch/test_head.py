"""The head is lost under running engines, comes back, and its Controller knows all again."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator

import pytest

from raykv.launch import up as launch
from tests.launch.test_life import FAKE, PATIENCE_S, Running, health, until
from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture
def own_ray() -> Iterator[RayCluster]:
    from raykv.actors import cluster

    made = RayCluster(num_cpus=4)
    try:
        yield made
    finally:
        cluster.disconnect()
        made.stop()


def test_what_is_wanted_survives_the_head_and_the_controller(own_ray: RayCluster) -> None:
    from raykv.actors import controller_handle, local_cluster
    from raykv.launch.spec_file import spec_from

    running = Running()
    wanted = spec_from(json.dumps({"model": "tiny", "command": FAKE, "engines": [{"name": "e", "replicas": 2}]}))
    rows = {row.name: row for row in running.up(wanted).engines}
    handle = controller_handle.find()
    assert handle is not None
    controller = handle.info().pid
    gcs = own_ray.record.process("gcs_server")
    assert gcs is not None
    os.kill(gcs.pid, signal.SIGKILL)
    until(lambda: "head is away" in handle.status(60).problem, "the lost head was not noticed")
    assert all(health(row) == 200 for row in rows.values())
    # An engine that ends now waits for the head.
    os.kill(rows["e-0"].pid, signal.SIGKILL)
    local_cluster.restart_head(60)
    again = running.ready_again(rows, {"e-0"})
    # A Controller of a new life reads what is wanted from the restarted head.
    os.kill(controller, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if running.status().ready and running.controller.info().pid != controller:
                break
        except Exception:
            assert time.monotonic() < deadline, "the Controller did not come back"
        time.sleep(0.2)
    assert {name: row.pid for name, row in running.rows().items()} == {name: row.pid for name, row in again.items()}
    assert launch.down(running.lines.append)
