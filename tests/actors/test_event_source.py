"""Readers of the event stream who come late and lose messages: after a replay they believe exactly what is held."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.actors import event_wire
from raykv.actors.event_source import EventSource
from raykv.core import event_book
from raykv.core.event_log import EventLog, Numbered
from tests.support.event_model import DISK, HOST, Believer, ModelStore, block_hash, model

pytestmark = pytest.mark.process

ENOUGH = 20_000
STEPS = ("save", "move", "evict", "tell", "tell", "anew", "die", "node", "name", "read", "replay", "part", "lose")


class LossyReader(Believer):
    """Gets messages by hand; some are lost. `replay` is read a part at a time, while more is published."""

    def __init__(self, source: EventSource) -> None:
        super().__init__()
        self.source = source
        self.last = -1
        self.replay: Iterator[Numbered] | None = source.replay(0)
        self.arrived = source.last  # up to which number messages were published since it subscribed
        self.waiting: list[Numbered] = []  # in its socket

    def publish(self, lose: bool = False) -> None:
        """What was written since the last call arrives, or not."""
        while (message := self.source.after(self.arrived)) is not None:
            self.arrived = message.number
            if not lose:
                self.waiting.append(message)

    def go_on(self, most: int = ENOUGH) -> None:
        """Read some messages, as `actors.event_reader` does."""
        for _ in range(most):
            if self.replay is not None:
                message = next(self.replay, None)
                if message is None:
                    self.replay = None
                    continue
                assert message.number > self.last or message.payload[-18:].endswith(b"AllBlocksCleared")
            elif not self.waiting:
                return
            elif self.waiting[0].number > self.last + 1:
                self.replay = self.source.replay(self.last + 1)
                continue
            else:
                message = self.waiting.pop(0)
                if message.number <= self.last:
                    continue
            self.last = message.number
            self.payload(message.topic.decode(), message.payload)
        assert most < ENOUGH, "it never comes to an end"


@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 11)), max_size=80),
    st.integers(1, 12),
    st.integers(1, 3),
    st.booleans(),
)
def test_who_comes_late_and_loses_messages_ends_with_what_is_held(
    steps: list[tuple[str, int]], kept: int, chunk: int, int_hashes: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_book, "CHUNK", chunk)
        run(steps, kept, int_hashes)


def run(steps: list[tuple[str, int]], kept: int, int_hashes: bool) -> None:
    source = EventSource(int_hashes, EventLog(1e9, messages=kept))
    models = (model("org/m@1", 0, 1), model("n", 2))
    stores = {node: ModelStore(node, models) for node in "ab"}
    lives = 1
    reader: LossyReader | None = None

    def tell(store: ModelStore, most: int) -> None:
        store.fresh |= source.publish(store.batch(most))

    for what, number in steps:
        store = stores["ab"[number % 2]]
        place = (number % 3, number % 2, number)
        if what == "save":
            for rank in range(3):
                store.held[rank, *place[1:]] = HOST
        elif what == "move":
            store.held[place] = store.held.get(place, 0) ^ DISK or HOST
        elif what == "evict":
            store.held.pop(place, None)
        elif what == "tell":
            tell(store, 1 + number)
        elif what == "anew":
            store.fresh = True
        elif what == "die":
            lives += 1
            stores[store.node] = again = ModelStore(store.node, models, str(lives))
            again.held = {key: media for key, media in store.held.items() if media & DISK}
        elif what == "node":
            source.forget_nodes([store.node])
        elif what == "name":
            source.sign_of_life(0.0)
        elif reader is None:
            reader = LossyReader(source)
        elif what == "replay":
            reader.replay = source.replay(0 if number % 2 else reader.last + 1)
        elif what == "part":
            reader.go_on(1 + number % 3)
        else:
            reader.publish(lose=what == "lose")
            if what == "read":
                reader.go_on()
        if reader is not None and number % 4 == 0:
            reader.publish(lose=number % 8 == 0)

    reader = reader or LossyReader(source)
    for store in stores.values():
        for _ in range(200):
            tell(store, 3)
            if not store.fresh and store.told == store.held:
                break
        tell(store, 1000)
    source.sign_of_life(0.0)  # else it could not know that the last message was lost
    reader.publish()
    reader.go_on()
    expected = {
        (topic.replace("org/m@1", "org/m%401"), *rest)
        for store in stores.values()
        for topic, *rest in store.copies(int_hashes)
    }
    assert reader.copies == expected
    source.check_integrity()


def test_a_stream_that_was_started_anew_goes_on_above_the_one_before() -> None:
    first = EventSource(log=EventLog(1000.0))
    store = ModelStore("a")
    store.held = {(0, 0, 1): HOST}
    first.publish(store.batch())
    reader = LossyReader(first)
    reader.go_on()
    assert reader.copies == store.copies()
    second = EventSource(log=EventLog(1000.5))
    assert second.last > first.last
    reader.source, reader.arrived = second, second.last
    store.held = {(0, 0, 2): HOST}
    store.fresh = True
    second.publish(store.batch())
    reader.publish()
    reader.go_on()
    assert reader.copies == store.copies()


def test_what_is_kept_is_bounded_by_number_and_bytes() -> None:
    log = EventLog(1.0, messages=3, nbytes=100)
    for size in (10, 10, 10, 10, 80, 200):
        log.add(b"t", b"x" * size)
    assert len(log) == 1 and log.get(log.last) == Numbered(log.last, b"t", b"x" * 200)
    assert log.has_all_from(log.last) and log.has_all_from(log.last + 1) and not log.has_all_from(log.last - 1)
    assert log.get(log.last - 1) is None and log.get(log.last + 1) is None


def test_hashes_as_vllm_publishes_them() -> None:
    long, short = block_hash(1), block_hash(2)[:16].ljust(32, b"\0")
    assert event_wire.external(long, False) == long
    assert event_wire.external(short, False) == short[:16]
    assert event_wire.external(long, True) == int.from_bytes(long, "big") & ((1 << 64) - 1)
    assert event_wire.external(short, True) == int.from_bytes(short[:16], "big") & ((1 << 64) - 1)
