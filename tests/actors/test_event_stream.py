"""The event stream over real sockets, as a reader outside sees it: vLLM's own structs decode it."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from raykv.actors import event_sockets
from raykv.actors.event_feed import EventFeed
from raykv.actors.event_reader import EventReader, EventsSilent
from raykv.actors.event_stream import EventStream
from raykv.actors.event_wire import END
from raykv.core.eviction import LRU
from raykv.core.prefix import block_key
from raykv.core.slot_table import SlotTable
from raykv.core.store_book import StoreBook
from raykv.errors import HostDied
from raykv.event_messages import EventsOptions
from raykv.store_messages import Cascade, Medium
from raykv.types import EngineId, JobId, Rank, StoreLife
from tests.support.event_model import DISK, HOST, Believer, ModelStore, block_hash, fingerprint, model

pytestmark = [pytest.mark.process, pytest.mark.vllm]

PATIENCE = 30.0
Streams = Callable[..., EventStream]


@pytest.fixture
def streams() -> Iterator[Streams]:
    begun: list[EventStream] = []

    def make(port: int = 0, **options: Any) -> EventStream:
        stream = EventStream(EventsOptions(port=port, **options), sign_of_life_s=0.1)
        begun.append(stream)
        return stream

    yield make
    for stream in begun:
        stream.check_integrity()
        stream.close()


def reader_of(stream: EventStream) -> EventReader:
    assert stream.sockets.listening.wait(PATIENCE), stream.status().problem
    return EventReader(*stream.sockets.addresses)


class Outside(Believer):
    """A reader who knows vLLM's structs and nothing of RayKV."""

    def __init__(self, reader: EventReader) -> None:
        super().__init__()
        from vllm.distributed.kv_events import KVEventBatch

        self.reader = reader
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self.events: list[Any] = []

    def until(self, copies: set[Any]) -> None:
        """Read until exactly these are believed."""
        deadline = time.monotonic() + PATIENCE
        while self.copies != copies or not self.batches:
            told = self.reader.next(PATIENCE)
            batch = self._decode(told.payload)
            assert batch.ts > 1e9 and batch.data_parallel_rank is None
            self.events += batch.events
            self.read(told.topic, msgspec.to_builtins(batch))
            assert time.monotonic() < deadline, self.copies


def test_who_comes_late_has_all_and_then_follows(streams: Streams) -> None:
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

    stream, store = streams(), ModelStore("a")
    store.held = {(0, 0, number): HOST for number in range(2500)}
    assert not stream.publish(store.batch(5000)).again
    with reader_of(stream) as reader:
        outside = Outside(reader)
        outside.until(store.copies())
        assert isinstance(outside.events[0], AllBlocksCleared)
        for number in range(100):
            del store.held[0, 0, number]
            store.held[0, 0, number + 100] = HOST | DISK
        stream.publish(store.batch())
        outside.until(store.copies())
        stored = [one for one in outside.events if isinstance(one, BlockStored)]
        removed = [one for one in outside.events if isinstance(one, BlockRemoved)]
        assert {one.medium for one in stored} == {"CPU", "STORAGE"} and {one.medium for one in removed} == {"CPU"}
        assert all(one.block_size == 16 and one.token_ids == [] and one.group_idx == 0 for one in stored)
        assert {one.ownership for one in stored + removed} == {"store-a"}
        assert reader.replays == 1
    status = stream.status()
    assert (status.stores, status.unnamed, status.snapshots, status.problem) == (1, 0, 1, "")


def test_a_reader_that_was_cut_off_asks_for_what_it_missed(streams: Streams) -> None:
    stream, store = streams(), ModelStore("a")
    store.held[0, 0, 99] = HOST
    stream.publish(store.batch())
    with reader_of(stream) as reader:
        outside = Outside(reader)
        outside.until(store.copies())  # the first replay is over
        reader._sub.disconnect(stream.sockets.addresses[0])
        for number in range(5):
            store.held[0, 0, number] = HOST
            stream.publish(store.batch())
        reader._sub.connect(stream.sockets.addresses[0])
        outside.until(store.copies())  # by a sign of life it sees that something is missing
        assert reader.replays == 2
    assert stream.status().snapshots == 1, "what it missed was still kept"


def test_many_readers_at_once_get_a_snapshot_each_while_blocks_come_and_go(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_sockets, "READERS", 3)  # the others are told to come again
    monkeypatch.setattr(event_sockets, "AT_ONCE", 1)
    monkeypatch.setattr(event_sockets, "REPLAY_QUEUED", 1)
    stream, store = streams(), ModelStore("a")
    store.held = {(0, 0, number): HOST for number in range(5000)}
    stream.publish(store.batch(5000))
    errors: list[BaseException] = []
    ready, final = threading.Event(), set(list(store.copies())[:0])

    def follow() -> None:
        try:
            with reader_of(stream) as reader:
                outside = Outside(reader)
                ready.wait(PATIENCE)
                outside.until(final)
        except BaseException as error:
            errors.append(error)

    readers = [threading.Thread(target=follow) for _ in range(8)]
    for thread in readers:
        thread.start()
    for number in range(50):
        for place in range(0, 5000, 50):
            store.held.pop((0, 0, number + place), None)
            store.held[0, 0, 10_000 + (number + place) % 3000] = DISK
        stream.publish(store.batch())
    final |= store.copies()
    ready.set()
    for thread in readers:
        thread.join(2 * PATIENCE)
    assert not errors and not any(thread.is_alive() for thread in readers)
    assert stream.status().snapshots >= 8


def test_as_vllms_own_publisher_it_is_asked_with_a_plain_request(streams: Streams) -> None:
    """REQ as well as DEALER; what is no number is passed over."""
    stream = streams()
    assert stream.sockets.listening.wait(PATIENCE)
    with zmq.Context() as context, context.socket(zmq.REQ) as request, context.socket(zmq.DEALER) as dealer:
        for one in (request, dealer):
            one.setsockopt(zmq.LINGER, 0)
            one.connect(stream.sockets.addresses[1])
        dealer.send_multipart((b"", b"nonsense, and long"))
        dealer.send_multipart((b"just one frame",))
        request.send((0).to_bytes(8, "big"))
        assert request.poll(PATIENCE * 1000)
        topic, number, payload = request.recv_multipart()
        assert topic == b"kv@@" and int.from_bytes(number, "big") <= stream.source.last
        assert msgspec.msgpack.decode(payload)[1] == [{"type": "AllBlocksCleared"}]
        dealer.send_multipart((b"", (stream.source.last + 1).to_bytes(8, "big")))
        assert dealer.poll(PATIENCE * 1000)
        answer = dealer.recv_multipart()
        while answer[2] != END:  # a sign of life may have been written meanwhile
            answer = dealer.recv_multipart()
        assert answer == [b"", b"", END, b""]


def test_a_port_that_is_taken_is_said_and_tried_again(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_sockets, "BIND_AGAIN_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        stream = streams(port)
        deadline = time.monotonic() + PATIENCE
        while str(port) not in stream.status().problem:
            assert time.monotonic() < deadline, stream.status()
    assert stream.sockets.listening.wait(PATIENCE)
    assert stream.status().problem == "" and stream.status().address == f"tcp://127.0.0.1:{port}"


def test_it_listens_on_loopback_only(streams: Streams) -> None:
    stream = streams()
    assert stream.sockets.listening.wait(PATIENCE)
    assert all(address.startswith("tcp://127.0.0.1:") for address in stream.sockets.addresses)
    assert stream.info()["options"] == ["127.0.0.1", 0, True]


def test_nothing_comes_from_where_nobody_publishes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        with EventReader(address, address) as reader, pytest.raises(EventsSilent):
            reader.next(0.2)


# -- from a store's book ----------------------------------------------------------------------------------------


class Caller:
    """What a feed calls; arguments and results are pickled as Ray would."""

    def __init__(self, stream: EventStream) -> None:
        self.stream: EventStream | None = stream

    def __call__(self) -> Caller | None:
        return self if self.stream is not None else None

    def submit(self, method: str, *args: Any, done: Any) -> None:
        raise AssertionError("a feed waits for its answers")

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        if self.stream is None:
            raise HostDied("the stream is gone")
        return pickle.loads(pickle.dumps(getattr(self.stream, method)(*pickle.loads(pickle.dumps(args)))))


class Fed:
    """A store's book of two tiers and its feed, stepped by hand."""

    def __init__(self, caller: Caller) -> None:
        tables = [SlotTable(count, LRU(count)) for count in (64, 256)]
        self.book = StoreBook(tables, [Medium.HOST, Medium.DISK], Cascade.EVICT, lease_s=60.0)
        self.models = [model("m", 0, 1)]
        self.feed = EventFeed(
            self.book.content.media, threading.Lock(), caller, "n", "store-n", StoreLife("1"), lambda: self.models
        )
        self.jobs = 0

    def save(self, numbers: range, ranks: int = 2) -> None:
        for rank in range(ranks):
            keys = [block_key(fingerprint(rank), 0, block_hash(number)) for number in numbers]
            self.jobs += 1
            plan = self.book.begin_save(EngineId("e"), Rank(rank), JobId(self.jobs), keys)
            self.book.end_write(plan, True)
            self.book.commit(plan.engine, plan.job)

    def settle(self) -> None:
        for _ in range(50):
            self.feed.step(1000.0)
            if not self.book.content.media.waiting and not self.feed._more:
                break
        self.feed.step(1e9)  # and a sign of life

    def copies(self) -> set[Any]:
        store = ModelStore("n", tuple(self.models))
        for tier, table in enumerate(self.book._tiers.tables):
            for slot in (slot for slot in range(table.slots) if table.ready_from(slot) == slot):
                key = table.key(slot)
                place = (key[0], 0, next(n for n in range(400) if block_hash(n) == key[17:]))
                store.held[place] = store.held.get(place, 0) | (HOST, DISK)[tier]
        return store.copies()


def test_what_a_store_holds_reaches_a_reader_over_restarts_of_the_stream(streams: Streams) -> None:
    stream = streams()
    caller = Caller(stream)
    store = Fed(caller)
    store.save(range(20))
    store.save(range(20, 25), ranks=1)  # of rank 1 they are not there
    store.settle()
    with reader_of(stream) as reader:
        outside = Outside(reader)
        outside.until(store.copies())
        assert len(outside.copies) == 20
        store.save(range(30, 48))
        for more in range(8):  # all but full: what is coldest goes to the disk, and what came after it stays
            for move in store.book.next_demotions(8).moves:
                store.book.end_move(move, True)
            store.save(range(60 + 4 * more, 64 + 4 * more))
        store.settle()
        outside.until(store.copies())
        assert {medium for _, medium, *_ in outside.copies} == {"CPU", "STORAGE"}
        caller.stream = None
        store.book.clear(0)
        store.feed.step(1000.0)
        assert store.book.content.media.waiting == 0, "nothing is noted while nobody listens"
    caller.stream = again = streams()
    store.settle()
    with reader_of(again) as reader:
        outside = Outside(reader)
        outside.until(store.copies())
        store.feed.close()
        outside.until(set())
