"""The Directory as the plain class it is: who is forgotten when, and what look-ups see beside a writer."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raykv.actors import directory as module
from raykv.actors.directory import Directory
from raykv.core.block_marks import pack_keys
from raykv.core.prefix import block_key
from raykv.directory_messages import Holder, Locate, Publish
from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES
from raykv.types import StoreLife
from tests.support.waiting import eventually

pytestmark = pytest.mark.process

FP = bytes(FINGERPRINT_NBYTES)
HASHES = [random.Random(number).randbytes(HASH_NBYTES) for number in range(3000)]
LIFE = StoreLife("life")


def batch(node: str, number: int, *added: int, removed: tuple[int, ...] = (), stream: int = 0) -> Publish:
    keys = [[block_key(FP, 0, HASHES[i]) for i in one] for one in (added, removed)]
    return Publish(node, "store", LIFE, stream, number, pack_keys(keys[0]), pack_keys(keys[1]))


def wanted(count: int, but_not: str = "") -> Locate:
    return Locate((FP,), (0,), b"".join(HASHES[:count]), but_not)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Directory]]:
    monkeypatch.setattr(module, "LOOK_AROUND_S", 0.01)
    made: list[Directory] = []

    def one(*args: Any, **options: Any) -> Directory:
        made.append(Directory(*args, **options))
        return made[-1]

    yield one
    for directory in made:
        directory.check_integrity()
        directory.close()


def test_what_is_published_is_located(make: Callable[..., Directory]) -> None:
    directory = make()
    assert not directory.publish(batch("a", 0, 0, 1, 2)).again
    assert directory.locate(wanted(5)).holders == (Holder("a", "store", 3),)
    assert directory.locate(wanted(5, but_not="a")).holders == ()
    assert directory.publish(batch("b", 7, 0)).again
    status = directory.status()
    assert (status.keys, status.nodes, status.published, status.refused, status.added) == (3, 1, 1, 1, 3)
    assert (status.located, status.located_blocks, status.hits) == (2, 10, 1)
    assert status.index_nbytes > 3 * 32
    assert [(one.node, one.life, one.blocks, one.whole) for one in status.holders] == [("a", LIFE, 3, True)]
    assert directory.info()["directory"] == status.life


def test_a_store_that_leaves_is_forgotten_and_swept(make: Callable[..., Directory]) -> None:
    directory = make()
    directory.publish(batch("a", 0, *range(100)))
    directory.publish(batch("b", 0, 0))
    assert directory.leave("a", "store", LIFE)
    assert directory.locate(wanted(5)).holders == (Holder("b", "store", 1),)
    eventually(lambda: directory.status().keys == 1)


def test_a_new_stream_is_swept_of_the_old(make: Callable[..., Directory]) -> None:
    directory = make()
    directory.publish(batch("a", 0, *range(100)))
    directory.publish(batch("a", 0, 0, stream=1))
    eventually(lambda: directory.status().keys == 1)


def test_a_dead_node_of_the_cluster_is_forgotten(make: Callable[..., Directory]) -> None:
    alive = {"a": True, "b": True}
    failing = threading.Event()

    def nodes() -> list[dict[str, Any]]:
        if failing.is_set():
            failing.clear()
            raise OSError("the head is away")
        return [{"node_id": node, "alive": lives} for node, lives in alive.items()]

    directory = make(nodes)
    for node in ("a", "b", "unlisted"):
        directory.publish(batch(node, 0, 0))
    failing.set()
    eventually(lambda: not failing.is_set())
    alive["a"] = False
    eventually(lambda: directory.status().forgotten == 1)
    assert {one.node for one in directory.locate(wanted(1)).holders} == {"b", "unlisted"}
    assert directory.forget_node("b") == 1
    assert {one.node for one in directory.locate(wanted(1)).holders} == {"unlisted"}
    assert not directory.publish(batch("b", 0, 0, stream=1)).again, "one that lives is taken again"


def test_a_silent_store_is_forgotten_and_may_come_back(make: Callable[..., Directory]) -> None:
    directory = make(silent_s=0.2)
    directory.publish(batch("a", 0, 0))
    eventually(lambda: directory.status().forgotten == 1)
    assert directory.publish(batch("a", 1)).again
    assert not directory.publish(batch("a", 0, 0, stream=1)).again
    assert directory.locate(wanted(1)).holders == (Holder("a", "store", 1),)


def test_look_ups_beside_a_writer_see_only_what_was_said(make: Callable[..., Directory]) -> None:
    """`steady` never changes; another store publishes, removes and begins anew all the time."""
    directory = make()
    directory.publish(batch("steady", 0, *range(1000)))
    stop = threading.Event()
    broken: list[BaseException] = []

    def write() -> None:
        stream = 0
        try:
            while not stop.is_set():
                directory.publish(batch("busy", 0, *range(0, 3000), stream=stream))
                directory.publish(batch("busy", 1, removed=tuple(range(500, 3000)), stream=stream))
                stream += 1
        except BaseException as error:
            broken.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            found = {one.node: one.blocks for one in directory.locate(wanted(1000)).holders}
            assert found.pop("steady") == 1000
            assert set(found) <= {"busy"}
    finally:
        stop.set()
        writer.join()
    assert not broken


def test_a_bad_question_is_refused(make: Callable[..., Directory]) -> None:
    directory = make()
    with pytest.raises(ValueError, match="hashes"):
        directory.locate(Locate((FP,), (0,), b"x", ""))
