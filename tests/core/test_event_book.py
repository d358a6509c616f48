"""The book of the event stream: batches of stores in, what readers are to hear out."""

from __future__ import annotations

import dataclasses

import pytest

from raykv.core.event_book import CHUNK, EventBook, Message
from raykv.event_messages import Now
from tests.support.event_model import DISK, HOST, ModelStore, block_hash, model


class Reader:
    """Believes what it hears, by (node, model, medium, group, hash)."""

    def __init__(self) -> None:
        self.book = EventBook()
        self.has: set[tuple[str, str, str, int, bytes]] = set()
        self.heard = 0

    def hear(self, messages: list[Message]) -> None:
        self.heard += sum(len(event.hashes) for one in messages for event in one.events)
        for message in messages:
            for event in message.events:
                where = (message.node, message.model.name, event.medium, event.group)
                copies = {(*where, one) for one in event.hashes}
                assert not copies & self.has if event.stored else copies <= self.has, "told what it knew"
                self.has = self.has | copies if event.stored else self.has - copies

    def tell(self, store: ModelStore, most: int = 1000) -> bool:
        again, messages = self.book.tell(store.batch(most), 0.0)
        self.hear(messages)
        self.book.check_integrity()
        return again


@pytest.fixture
def reader() -> Reader:
    return Reader()


def there(reader: Reader, medium: str = "CPU", group: int = 0) -> set[bytes]:
    return {one for *_, where, at, one in reader.has if (where, at) == (medium, group)}


def test_a_block_that_moves_from_medium_to_medium(reader: Reader) -> None:
    store = ModelStore("a")
    store.held = {(0, 0, 1): HOST, (0, 1, 1): HOST}
    reader.tell(store)
    assert there(reader) == there(reader, group=1) == {block_hash(1)} and not there(reader, "STORAGE")
    store.held[0, 0, 1] = HOST | DISK
    reader.tell(store)
    store.held[0, 0, 1] = DISK
    reader.tell(store)
    assert not there(reader) and there(reader, "STORAGE") == {block_hash(1)}


def test_a_disk_and_a_shared_folder_are_one_medium(reader: Reader) -> None:
    store = ModelStore("a")
    for media in (2, 6, 4):
        store.held[0, 0, 1] = media
        reader.tell(store)
        assert there(reader, "STORAGE") == {block_hash(1)}
    assert reader.heard == 1


def test_a_block_is_there_when_all_ranks_have_it(reader: Reader) -> None:
    store = ModelStore("a", (model("m", 0, 1),))
    store.held = {(0, 0, 1): HOST, (0, 0, 2): HOST, (1, 0, 1): HOST | DISK}
    reader.tell(store)
    assert there(reader) == {block_hash(1)} and not there(reader, "STORAGE")
    store.held[1, 0, 2] = HOST
    del store.held[0, 0, 1]
    reader.tell(store)
    assert there(reader) == {block_hash(2)}


def test_ranks_that_take_turns_within_one_batch_end_as_the_last_one_says(reader: Reader) -> None:
    """Rank 0 gets the block and rank 1 loses it: it was never there, whatever the order of what is told."""
    store = ModelStore("a", (model("m", 0, 1),))
    store.held = {(1, 0, 1): HOST}
    reader.tell(store)
    store.held = {(0, 0, 1): HOST}
    reader.tell(store)
    assert not reader.has and reader.heard == 0


def test_nothing_is_told_of_a_model_without_a_name_until_it_has_one(reader: Reader) -> None:
    store = ModelStore("a", ())
    store.held = {(0, 0, number): HOST for number in range(3)}
    reader.tell(store)
    assert not reader.has and reader.book.blocks == (3, 3)
    reader.hear(reader.book.name([model("m")]))
    assert len(reader.has) == 3 and reader.book.blocks == (3, 0)
    reader.hear(reader.book.name([model("other")]))
    assert {name for _, name, *_ in reader.has} == {"m"}, "a name stays"


def test_a_name_that_says_more_replaces_one_that_says_less(reader: Reader) -> None:
    store = ModelStore("a", (model("fingerprint-00", block_size=0),))
    store.held = {(0, 0, 1): HOST}
    reader.tell(store)
    reader.hear(reader.book.name([model("m")]))
    assert {name for _, name, *_ in reader.has} == {"m"} and len(reader.has) == 1
    reader.book.check_integrity()


def test_a_stream_that_begins_anew_tells_only_what_differs(reader: Reader) -> None:
    store = ModelStore("a")
    store.held = {(0, 0, number): HOST for number in range(10)}
    reader.tell(store)
    heard = reader.heard
    del store.held[0, 0, 3]
    store.held[0, 0, 20] = HOST
    store.fresh = True
    assert not reader.tell(store, most=4)
    assert reader.heard == heard, "what is not told yet may still be there"
    while store.told != store.held:
        assert not reader.tell(store, most=4)
    assert reader.heard == heard + 2
    assert there(reader) == {block_hash(number) for number in (0, 1, 2, 4, 5, 6, 7, 8, 9, 20)}


def test_a_store_is_gone_with_its_node_its_silence_or_its_word(reader: Reader) -> None:
    for how in ("leave", "node", "silent"):
        store, other = ModelStore("a", life=how), ModelStore("b", life=how)
        store.held = other.held = {(0, 0, 1): HOST, (0, 0, 2): DISK}
        reader.tell(other)
        reader.tell(store)
        assert len(reader.has) == 4 and reader.book.stores == 2
        if how == "leave":
            assert reader.book.leave("a", store.name, "another life") == []  # type: ignore[arg-type]
            reader.hear(reader.book.leave("a", store.name, store.life))
        elif how == "node":
            reader.hear(reader.book.forget_nodes(["a", "c"]))
        else:
            reader.book._stores["b", other.name].heard = 9.0
            reader.hear(reader.book.forget_silent(5.0))
        assert {node for node, *_ in reader.has} == {"b"} and reader.book.stores == 1
        assert reader.tell(store), "it is asked to begin anew"
        reader.hear(reader.book.forget_nodes(["b"]))


def test_batches_are_taken_in_order_and_late_ones_of_a_dead_life_never(reader: Reader) -> None:
    store = ModelStore("a")
    store.held = {(0, 0, 1): HOST}
    first = store.batch()
    store.held = {(0, 0, 2): HOST}
    second, third = store.batch(), store.batch()
    assert reader.book.tell(second, 0.0) == (True, []), "not the first one of a stream"
    reader.hear(reader.book.tell(first, 0.0)[1])
    assert reader.book.tell(third, 0.0) == (True, [])
    assert reader.book.tell(first, 0.0) == (False, []), "twice is once"
    reader.hear(reader.book.tell(second, 0.0)[1])
    assert there(reader) == {block_hash(2)}
    next_life = ModelStore("a", life="2")
    reader.tell(next_life)
    assert not reader.has
    assert reader.book.tell(first, 0.0) == (True, [])
    assert reader.book.tell(third, 0.0) == (True, [])
    reader.book.check_integrity()


@pytest.mark.parametrize("bad", [Now(b"short", 1, b""), Now(bytes(17), 1, b"x" * 33)])
def test_a_batch_that_can_not_be_read_changes_nothing(reader: Reader, bad: Now) -> None:
    store = ModelStore("a")
    with pytest.raises(ValueError, match="store-a"):
        reader.book.tell(dataclasses.replace(store.batch(), now=(bad,)), 0.0)
    assert reader.book.stores == 0


def test_large_changes_are_told_in_messages_of_a_bounded_size(reader: Reader) -> None:
    store = ModelStore("a")
    store.held = {(0, 0, number): HOST for number in range(2 * CHUNK + 5)}
    _, messages = reader.book.tell(store.batch(10_000), 0.0)
    assert [len(one.events[0].hashes) for one in messages] == [CHUNK, CHUNK, 5]
    snapshot = reader.book.snapshot()
    assert snapshot.total == 3 and sum(len(one.events[0].hashes) for one in snapshot.messages) == 2 * CHUNK + 5
