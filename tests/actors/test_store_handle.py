"""A store over a real Ray: opened by name, killed, restarted, found again with its blocks, shut down."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from raykv.actors import cluster, observer, store_files, store_handle
from raykv.actors.processes import Pidfd
from raykv.actors.store_link import StoreAsker, StoreWorkerLink
from raykv.errors import StoreError
from raykv.store_messages import JobDone, LookedUp, Medium, Settle, StoreSpec, TierSpec
from raykv.types import JobId, StoreLife
from tests.support.kv_rank import E, KVRank, load_job, look_up, save_job
from tests.support.ray_cluster import RayCluster
from tests.support.waiting import eventually

pytestmark = pytest.mark.ray

SLOT = 16384
PATIENCE = 90.0


@pytest.fixture(scope="module", autouse=True)
def joined(ray_cluster: RayCluster) -> Iterator[cluster.ClusterInfo]:
    yield cluster.connect(ray_cluster.address)
    cluster.disconnect()


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[StoreSpec]:
    tiers = (TierSpec(Medium.HOST, 16 * SLOT), TierSpec(Medium.DISK, 32 * SLOT, str(tmp_path)))
    spec = StoreSpec(f"test{os.getpid()}", tiers)
    yield spec
    store_handle.shutdown_stores()
    store_files.host_path("raykv", spec.name).unlink(missing_ok=True)  # where its store was killed at last


def done(link: StoreWorkerLink) -> JobDone:
    found: list[JobDone] = []
    eventually(lambda: found.extend(link.take_done()) or found)
    (one,) = found
    return one


def answer_of(asker: StoreAsker, life: StoreLife | None) -> LookedUp:
    """What that life says of prompt p; an asker that was idle hears of a death by its next question."""
    found: list[LookedUp] = []

    def asked() -> bool:
        asker.ask(look_up("p", 4))
        eventually(lambda: found.extend(asker.take_answers()) or found)
        return found[-1].store == life

    eventually(asked)
    return found[-1]


def test_a_killed_store_is_restarted_and_serves_what_it_had(spec: StoreSpec) -> None:
    rank = KVRank()
    link = StoreWorkerLink(lambda: store_handle.open_store(spec), rank.attach, PATIENCE, PATIENCE)
    asker = StoreAsker(lambda: store_handle.open_store(spec), E, PATIENCE)
    try:
        first = link.start(PATIENCE)
        assert first.slot_nbytes == SLOT and first.pid != os.getpid()
        before = rank.blocks([0, 1, 2])
        link.save([save_job(0, "p", [0, 1, 2])])
        assert done(link).ok
        eventually(lambda: asker.up)
        asker.settle(Settle(commits=(JobId(0),)))
        handle = store_handle.open_store(spec)
        eventually(lambda: handle.call("status", timeout=PATIENCE).tiers[0].used == 3)
        assert [row.state for row in observer.look(None).hosts if row.name == handle.name] == ["store"]

        process = Pidfd.open(first.pid, first.started)
        assert process is not None
        process.signal(signal.SIGKILL)
        eventually(lambda: link.life not in (None, first.store))
        assert link.pid != first.pid
        found = answer_of(asker, link.life)
        assert found.num_blocks == 3
        link.load([load_job(1, found.lease, [10, 11, 12])])
        loaded = done(link)
        assert loaded.ok and loaded.media == {Medium.HOST: 3}
        assert rank.blocks([10, 11, 12]) == before
    finally:
        asker.close()
        link.close()
        rank.close()


def test_a_stopped_store_costs_its_jobs_and_comes_back(spec: StoreSpec) -> None:
    """Ray never notices a stopped process; the link's time limit does."""
    rank = KVRank()
    link = StoreWorkerLink(lambda: store_handle.open_store(spec), rank.attach, 2.0, 2.0)
    try:
        first = link.start(PATIENCE)
        os.kill(first.pid, signal.SIGSTOP)
        link.save([save_job(0, "p", [0])])
        lost = done(link)
        assert not lost.ok and Pidfd.open(first.pid, first.started) is None
        eventually(lambda: link.life not in (None, first.store))
        link.save([save_job(1, "p", [0])])
        assert done(link).ok
    finally:
        link.close()
        rank.close()


def test_one_store_by_name_and_no_other_description_of_it(spec: StoreSpec) -> None:
    one, two = store_handle.open_store(spec), store_handle.open_store(spec)
    assert one.call("info", timeout=PATIENCE)["pid"] == two.call("info", timeout=PATIENCE)["pid"]
    with pytest.raises(StoreError, match="another `store` name"):
        store_handle.open_store(replace(spec, tiers=spec.tiers[:1]))
    with pytest.raises(StoreError, match="checksum"):
        store_handle.open_store(replace(spec, checksum=False))
    assert store_handle.stores() == [one.name]
    info = one.call("info", timeout=PATIENCE)
    process = Pidfd.open(info["pid"], info["started"])
    assert store_handle.shutdown_stores() == [one.name]
    assert process is None or process.wait(PATIENCE)
    eventually(lambda: store_handle.stores() == [])
