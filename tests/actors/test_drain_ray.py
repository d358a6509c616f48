"""A node's store is emptied and ended as the Controller does it, on a real Ray: its blocks are hits at another node."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from raykv.actors import cluster, directory_handle, store_handle
from raykv.actors.controller_world import Record
from raykv.actors.nodes import RayWorld
from raykv.store_messages import LoadJob, Medium, Settle, StoreSpec, StoreStatus, TierSpec
from raykv.types import EngineId, JobId
from tests.support.kv_rank import E, KVRank, load_job, look_up, save_job
from tests.support.sim_cluster import SimCluster

pytestmark = pytest.mark.ray

SLOT = 16384
PATIENCE = 90.0
FAR = EngineId("far")
NAMESPACE = "raykv"


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    sim = SimCluster([{"num_cpus": 2}, {"num_cpus": 2}])
    try:
        cluster.connect(sim.address)
        ids = [node.node_id for node in sim.nodes]
        yield ids
        for node in ids:
            store_handle.shutdown_stores(node_id=node)
        directory_handle.shutdown_directory()
    finally:
        sim.stop()


def test_a_drained_nodes_blocks_are_hits_at_another_also_when_its_store_is_killed(nodes: list[str]) -> None:
    spec = StoreSpec(f"drain{os.getpid()}", (TierSpec(Medium.HOST, 32 * SLOT),), peer=True)
    world, at = RayWorld(NAMESPACE), (spec.name, nodes[0])
    far, near = KVRank(FAR), KVRank(E)
    try:
        a, b = (store_handle.open_store(spec, node) for node in nodes)
        attached = [one.call("attach", rank.attach, timeout=PATIENCE) for one, rank in ((a, far), (b, near))]
        before = far.blocks([0, 1, 2, 3])
        _, (saved,) = a.call(
            "save", attached[0].store, FAR, far.attach.rank, [save_job(0, "p", [0, 1, 2, 3])], timeout=PATIENCE
        )
        assert saved.ok
        a.call("settle", FAR, Settle(commits=(JobId(0),)), timeout=PATIENCE)

        world.drain_store(at, leaves=True)  # and its node is to stay, after all
        status: StoreStatus = a.call("status", timeout=PATIENCE)
        assert (status.drain, status.tiers[0].used) == ("", 4)
        assert at in world.stores(nodes)

        world.save(Record(draining=frozenset({nodes[0]})))
        os.kill(attached[0].pid, signal.SIGKILL)
        started = time.monotonic()
        world.drain_store(at, leaves=True)
        print(f"killed, drained and ended in {time.monotonic() - started:.1f} s")
        assert world.stores(nodes) == {(spec.name, nodes[1])}

        (found,) = b.call("look_ups", E, [look_up("p", 6)], timeout=PATIENCE)
        assert found.media == (Medium.HOST,) * 4
        near.wipe(range(24))
        job: LoadJob = load_job(1, found.lease, [9, 8, 7, 6])
        _, (loaded,) = b.call("load", attached[1].store, E, near.attach.rank, [job], timeout=PATIENCE)
        assert (loaded.ok, loaded.error) == (True, "") and near.blocks([9, 8, 7, 6]) == before
    finally:
        far.close()
        near.close()
