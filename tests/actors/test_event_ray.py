"""The event stream as an actor of a real Ray, with a real store beside it: opened late, restarted, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from raykv.actors import cluster, directory_handle, event_handle, ports, store_handle
from raykv.actors.event_reader import EventReader, EventsSilent
from raykv.actors.store_link import StoreAsker, StoreWorkerLink
from raykv.errors import ClusterError
from raykv.event_messages import EventsOptions
from raykv.store_messages import JobDone, Medium, Settle, StoreSpec, TierSpec
from raykv.types import JobId
from tests.support.kv_rank import E, KVRank, save_job
from tests.support.sim_cluster import SimCluster
from tests.support.waiting import eventually

pytestmark = pytest.mark.ray

SLOT = 16384
PATIENCE = 90.0
SPEC = StoreSpec("default", (TierSpec(Medium.HOST, 16 * SLOT),), SLOT)


@pytest.fixture
def node() -> Iterator[str]:
    sim = SimCluster([{"num_cpus": 2}])
    try:
        cluster.connect(sim.address)
        yield sim.nodes[0].node_id
        store_handle.shutdown_stores(node_id=sim.nodes[0].node_id)
        event_handle.shutdown_events()
        directory_handle.shutdown_directory()
    finally:
        sim.stop()


def read(reader: EventReader, believed: dict[tuple[str, Any], str]) -> int:
    """Read what there is for a moment; how many blocks are believed."""
    with contextlib.suppress(EventsSilent):
        while True:
            told = reader.next(0.2)
            for event in msgspec.msgpack.decode(told.payload)[1]:
                if event["type"] == "AllBlocksCleared":
                    believed.clear()
                for one in event.get("block_hashes", ()):
                    if event["type"] == "BlockStored":
                        believed[told.topic, one] = event["medium"]
                    else:
                        believed.pop((told.topic, one), None)
            if not msgspec.msgpack.decode(told.payload)[1]:
                break
    return len(believed)


def test_a_stream_that_is_opened_late_killed_and_ended(node: str) -> None:
    with pytest.raises(ClusterError, match="another `port`"), socket.create_server(("127.0.0.1", 0)) as taken:
        event_handle.open_events(EventsOptions(port=taken.getsockname()[1]))
    assert event_handle.find_events() is None, "what could not listen is ended"

    rank = KVRank(E)
    link = StoreWorkerLink(lambda: store_handle.open_store(SPEC, node), rank.attach, PATIENCE, PATIENCE)
    asker = StoreAsker(lambda: store_handle.open_store(SPEC, node), E, PATIENCE)
    try:
        link.start(PATIENCE)
        eventually(lambda: asker.up)
        link.save([save_job(1, "p", range(5))])
        done: list[JobDone] = eventually(link.take_done)
        assert done[0].ok, done
        asker.settle(Settle(commits=(JobId(1),)))

        port = ports.free_ports_in_a_row("127.0.0.1", 2)
        status = event_handle.open_events(EventsOptions(port=port))
        assert status.address == f"tcp://127.0.0.1:{port}"
        assert event_handle.open_events(EventsOptions(port=port)).life == status.life
        with EventReader(status.address, status.replay_address) as reader:
            believed: dict[tuple[str, Any], str] = {}
            eventually(lambda: read(reader, believed) == 5)
            assert set(believed.values()) == {"CPU"}
            assert all(topic.startswith(f"kv@{node}@fingerprint-") for topic, _ in believed)
            os.kill(status.pid, signal.SIGKILL)
            last = reader.last
            eventually(lambda: read(reader, believed) == 5 and reader.last > last + (1 << 20))
            assert event_handle.status().life != status.life  # type: ignore[union-attr]
            store_handle.find_store(store_handle.store_name("default", node)).call("clear", timeout=10)
            eventually(lambda: read(reader, believed) == 0)
    finally:
        asker.close()
        link.close()
        rank.close()
    assert event_handle.shutdown_events() and not event_handle.shutdown_events()
    assert ports.is_free("127.0.0.1", port)
