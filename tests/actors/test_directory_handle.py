"""The Directory over a real Ray: started once, found by name, killed, and filled again by what stores hold."""

from __future__ import annotations

import os
import queue
import random
import signal
import threading
from collections.abc import Iterator

import pytest

from raykv.actors import cluster, directory_handle, host_base
from raykv.actors.directory_handle import DirectoryHandle
from raykv.actors.locator import NOBODY, Locator
from raykv.actors.processes import Pidfd
from raykv.actors.publisher import Publisher
from raykv.core.content_log import ContentLog
from raykv.core.eviction import LRU
from raykv.core.prefix import block_key
from raykv.core.slot_table import SlotTable
from raykv.core.tiers import Tiers
from raykv.directory_messages import Holder, Locate, Located, Publish
from raykv.errors import ClusterError, HostRaised, VersionMismatchError
from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES, Medium
from raykv.types import StoreLife
from tests.support.ray_cluster import RayCluster
from tests.support.waiting import eventually

pytestmark = pytest.mark.ray

PATIENCE = 90.0
FP = bytes(FINGERPRINT_NBYTES)
HASHES = b"".join(random.Random(number).randbytes(HASH_NBYTES) for number in range(1000))
WANTED = Locate((FP,), (0,), HASHES, "")


@pytest.fixture(scope="module", autouse=True)
def joined(ray_cluster: RayCluster) -> Iterator[cluster.ClusterInfo]:
    yield cluster.connect(ray_cluster.address)
    cluster.disconnect()


@pytest.fixture
def handle() -> Iterator[DirectoryHandle]:
    yield directory_handle.open_directory()
    directory_handle.shutdown_directory()


class Store:
    """A store's index and its publisher. Holds the first `count` blocks."""

    def __init__(self, node: str, count: int) -> None:
        table = SlotTable(count, LRU(count))
        for slot in range(count):
            table.recovered(slot, block_key(FP, 0, HASHES[slot * HASH_NBYTES : (slot + 1) * HASH_NBYTES]))
        log = ContentLog(Tiers([table], [Medium.HOST]))
        lock = threading.Lock()
        self.publisher = Publisher(log, lock, directory_handle.finder(), node, f"store-{node}", StoreLife(node))
        self.publisher.start()


def ask(locator: Locator) -> Located:
    answers: queue.SimpleQueue[Located] = queue.SimpleQueue()
    locator.locate(WANTED, PATIENCE, answers.put)
    return answers.get(timeout=2 * PATIENCE)


def test_a_killed_directory_is_restarted_and_filled_again(handle: DirectoryHandle) -> None:
    stores = [Store("a", 10), Store("b", 1000)]
    locator = Locator(directory_handle.finder())
    expected = Located((Holder("b", "store-b", 1000), Holder("a", "store-a", 10)))
    try:
        eventually(lambda: ask(locator) == expected)
        first = handle.call("info", timeout=PATIENCE)
        process = Pidfd.open(first["pid"], first["started"])
        assert process is not None and first["pid"] != os.getpid()
        process.signal(signal.SIGKILL)
        assert process.wait(PATIENCE)
        eventually(lambda: ask(locator) == expected)
        second = directory_handle.open_directory().call("status", timeout=PATIENCE)
        assert second.life != first["directory"] and second.keys == 1000
        stores[1].publisher.close()
        eventually(lambda: ask(locator) == Located(expected.holders[1:]))
        assert handle.call("check_integrity", timeout=PATIENCE) is None
    finally:
        for store in stores:
            store.publisher.close()
        locator.close()


def test_one_directory_by_name_on_the_head(handle: DirectoryHandle, joined: cluster.ClusterInfo) -> None:
    found = directory_handle.find_directory()
    assert found is not None
    info = found.call("info", timeout=PATIENCE)
    assert info["pid"] == directory_handle.open_directory().call("info", timeout=PATIENCE)["pid"]
    assert info["node_id"] == joined.node_id, "the only node is the head"
    process = Pidfd.open(info["pid"], info["started"])
    assert process is not None
    assert directory_handle.shutdown_directory() and process.wait(PATIENCE)
    eventually(lambda: directory_handle.find_directory() is None)
    assert not directory_handle.shutdown_directory()
    locator = Locator(directory_handle.finder())
    assert ask(locator) == NOBODY
    locator.close()


def test_its_errors_come_back(handle: DirectoryHandle) -> None:
    with pytest.raises(HostRaised, match="hashes of 32"):
        handle.call("locate", Locate((FP,), (0,), b"x", ""), timeout=PATIENCE)
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()
    handle.submit("publish", Publish("a", "s", StoreLife("l"), 0, 0, b"x"), done=lambda _, error: answers.put(error))
    assert isinstance(answers.get(timeout=PATIENCE), HostRaised)


def test_another_version_is_refused(handle: DirectoryHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = host_base.versions()
    monkeypatch.setattr(host_base, "versions", lambda: {**mine, "raykv": "0.0.0"})
    with pytest.raises(VersionMismatchError, match=r"0\.0\.0"):
        directory_handle.find_directory()
    with pytest.raises(ClusterError, match=r"0\.0\.0"):
        directory_handle.open_directory()


def test_it_reads_the_cluster_s_nodes(handle: DirectoryHandle, joined: cluster.ClusterInfo) -> None:
    """In the actor itself; what it does with dead ones is in test_directory."""
    assert [node["node_id"] for node in directory_handle.nodes() if node["alive"]] == [joined.node_id]
    assert handle.call("look_at_nodes", timeout=PATIENCE) == 0
    assert not handle.call("publish", Publish(joined.node_id, "s", StoreLife("l"), 0, 0), timeout=PATIENCE).again
    assert handle.call("look_at_nodes", timeout=PATIENCE) == 0
    assert [one.node for one in handle.call("status", timeout=PATIENCE).holders] == [joined.node_id]


def test_without_a_cluster_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "head_reachable", lambda: False)
    for call in (directory_handle.find_directory, directory_handle.open_directory, directory_handle.nodes):
        with pytest.raises(ClusterError, match="restart-head"):
            call()
