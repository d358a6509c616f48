"""Two stores on two nodes of a real Ray, a real Directory, real NIXL: what one node saved, the other one loads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from raykv.actors import cluster, directory_handle, store_handle
from raykv.actors.store_link import StoreAsker, StoreWorkerLink
from raykv.store_messages import JobDone, LookedUp, Medium, Settle, StoreSpec, TierSpec
from raykv.types import EngineId, JobId
from tests.support.kv_rank import E, KVRank, load_job, look_up, save_job
from tests.support.sim_cluster import SimCluster
from tests.support.waiting import eventually

pytestmark = pytest.mark.ray

SLOT = 16384
PATIENCE = 90.0
FAR = EngineId("far")


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Two nodes of a cluster, by id; their stores are ended with them."""
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


def done(link: StoreWorkerLink) -> JobDone:
    found: list[JobDone] = []
    eventually(lambda: found.extend(link.take_done()) or found)
    (one,) = found
    return one


def answer(asker: StoreAsker, blocks: int) -> LookedUp:
    found: list[LookedUp] = []
    asker.ask(look_up("p", blocks))
    eventually(lambda: found.extend(asker.take_answers()) or found)
    return found[0]


def test_blocks_of_one_node_are_loaded_at_another(nodes: list[str]) -> None:
    spec = StoreSpec(f"peers{os.getpid()}", (TierSpec(Medium.HOST, 32 * SLOT),), peer=True)
    far, near = KVRank(FAR), KVRank(E)
    opened = [lambda node=node: store_handle.open_store(spec, node) for node in nodes]
    links = [StoreWorkerLink(opened[i], rank.attach, PATIENCE, PATIENCE) for i, rank in enumerate((far, near))]
    askers = [StoreAsker(opened[i], engine, PATIENCE, reach_s=PATIENCE) for i, engine in enumerate((FAR, E))]
    try:
        lives = [link.start(PATIENCE).store for link in links]
        assert lives[0] != lives[1]
        before = far.blocks([0, 1, 2, 3])
        links[0].save([save_job(0, "p", [0, 1, 2, 3])])
        assert done(links[0]).ok
        eventually(lambda: all(asker.up for asker in askers))
        askers[0].settle(Settle(commits=(JobId(0),)))
        found: list[LookedUp] = []
        eventually(lambda: found.append(answer(askers[1], 6)) or found[-1].num_blocks == 4)
        assert found[-1].media == (Medium.PEER,) * 4 and found[-1].store == lives[1]
        assert found[-1].peer == nodes[0][:12]
        near.wipe(range(24))
        links[1].load([load_job(1, found[-1].lease, [9, 8, 7, 6])])
        loaded = done(links[1])
        assert (loaded.ok, loaded.error, loaded.media) == (True, "", {Medium.PEER: 4})
        assert near.blocks([9, 8, 7, 6]) == before
        started = time.monotonic()
        assert answer(askers[1], 4).media == (Medium.HOST,) * 4
        print(f"a look-up of what is here took {1e3 * (time.monotonic() - started):.1f} ms")
    finally:
        for one in (*askers, *links):
            one.close()
        far.close()
        near.close()
