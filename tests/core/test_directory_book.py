"""What the Directory believes, against the definition of a prefix and against what stores said."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.core import directory_book, prefix_runs
from raykv.core.block_marks import of_hashes, pack_keys, salt, unpack_marks
from raykv.core.directory_book import NAMED, DirectoryBook
from raykv.core.mark_table import SHARDS, MarkTable, indices
from raykv.core.prefix import block_key
from raykv.directory_messages import Holder, Locate, Publish
from raykv.errors import IntegrityError
from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES
from raykv.types import StoreLife

FPS = tuple(bytes((rank,)) * FINGERPRINT_NBYTES for rank in range(2))
FP = FPS[:1]
HASHES = [random.Random(number).randbytes(HASH_NBYTES) for number in range(40)]


def joined(numbers: Iterable[int]) -> bytes:
    return b"".join(HASHES[number] for number in numbers)


def packed(numbers: Iterable[int], rank: int = 0, group: int = 0) -> bytes:
    return pack_keys(block_key(FPS[rank], group, HASHES[number]) for number in numbers)


class Book:
    """A DirectoryBook that is told what stores say, and checked each time."""

    def __init__(self) -> None:
        self.book = DirectoryBook()
        self.numbers: dict[tuple[str, str, int], int] = {}
        self.now = 0.0

    def say(
        self,
        node: str,
        added: Iterable[int] = (),
        removed: Iterable[int] = (),
        *,
        life: str = "l",
        stream: int = 0,
        number: int | None = None,
        raw: bytes = b"",
        whole: bool = True,
    ) -> bool:
        """Whether the Directory asks for a new stream."""
        key = (node, life, stream)
        if number is None:
            number = self.numbers.get(key, 0)
            self.numbers[key] = number + 1
        batch = Publish(
            node, f"store-{node}", StoreLife(life), stream, number, raw + packed(added), packed(removed), whole
        )
        again = self.book.publish(batch, self.now)
        self.book.check_integrity()
        return again

    def ask(self, numbers: Iterable[int], but_not: str = "", **options: tuple[int, ...]) -> dict[str, int]:
        """Blocks by node."""
        found = self.book.locate(Locate(FP, options.get("windows", (0,)), joined(numbers), but_not))
        assert [one.blocks for one in found] == sorted((one.blocks for one in found), reverse=True)
        return {one.node: one.blocks for one in found}

    def sweep(self) -> None:
        while self.book.sweep(SHARDS // 8):
            self.book.check_integrity()
        self.book.check_integrity()


@pytest.fixture(scope="module", autouse=True)
def short_strides() -> Iterator[None]:
    """So that the prefixes here have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_runs, "STRIDE", 3)
        yield


@pytest.fixture
def book() -> Book:
    return Book()


# -- marks ---------------------------------------------------------------------------------------------------


def test_a_key_and_a_hash_have_one_mark() -> None:
    starts = of_hashes(joined(range(3)))
    for rank, group in ((0, 0), (1, 0), (0, 1)):
        marks = unpack_marks(packed(range(3), rank, group))
        assert marks == tuple(start ^ salt(FPS[rank] + bytes((group,))) for start in starts)
        assert all(0 <= mark < 1 << 60 for mark in marks)
    assert len({*unpack_marks(packed([0])), *unpack_marks(packed([0], 1)), *unpack_marks(packed([0], 0, 1))}) == 3


def test_bytes_that_are_no_marks_or_hashes_are_refused(book: Book) -> None:
    with pytest.raises(ValueError, match="marks of 8"):
        unpack_marks(b"123456789")
    with pytest.raises(ValueError, match="hashes of 32"):
        book.book.locate(Locate(FP, (0,), b"short", ""))
    with pytest.raises(ValueError, match="marks"):
        book.say("a", raw=b"x")
    assert book.book.holders(0.0) == (), "a batch that can't be read begins nothing"


@given(
    st.lists(
        st.tuples(st.sampled_from(("add", "remove", "sweep")), st.integers(0, 5), st.sets(st.integers(0, 30))),
        max_size=30,
    )
)
def test_the_table_is_a_map_of_sets(steps: list[tuple[str, int, set[int]]]) -> None:
    table = MarkTable()
    model: dict[int, set[int]] = {}
    for what, index, marks in steps:
        bit = 1 << index
        if what == "add":
            new = sum(index not in model.setdefault(mark, set()) for mark in marks)
            assert table.add(marks, bit) == new
            for mark in marks:
                model[mark].add(index)
        elif what == "remove":
            assert table.remove(marks, bit) == sum(index in model.get(mark, ()) for mark in marks)
            for mark in marks:
                model.get(mark, set()).discard(index)
        else:
            for number in range(SHARDS):
                table.sweep(number, bit)
            for holders in model.values():
                holders.discard(index)
        model = {mark: holders for mark, holders in model.items() if holders}
        found = {mark: set(indices(holders)) for shard in table.shards for mark, holders in shard.items()}
        assert found == model and len(table) == len(model)
        assert table.counts() == {i: n for i in range(6) if (n := sum(i in one for one in model.values()))}


# -- look-ups ------------------------------------------------------------------------------------------------


def test_the_longest_first_and_only_whole_prefixes(book: Book) -> None:
    book.say("a", [0, 1, 2])
    book.say("b", [0, 1, 2, 3, 4])
    book.say("c", [1, 2, 3])
    assert list(book.ask(range(6)).items()) == [("b", 5), ("a", 3)]
    assert book.ask(range(6), but_not="b") == {"a": 3}
    assert book.ask(range(2)) == {"a": 2, "b": 2}
    assert book.ask([9]) == book.ask([]) == {}
    assert book.book.locate(Locate(FP, (0,), joined(range(3)), ""))[0].store in ("store-a", "store-b")


def test_every_rank_and_group_is_needed(book: Book) -> None:
    book.say("a", [0, 1, 2], raw=packed([0, 1], rank=1))
    wanted = Locate(FPS, (0,), joined(range(3)), "")
    assert book.book.locate(wanted) == (Holder("a", "store-a", 2),)
    assert book.book.locate(Locate(FPS, (0, 0), joined(range(3)), "")) == ()
    assert book.book.locate(Locate((), (0,), joined(range(3)), "")) == ()
    assert book.book.locate(Locate(FP, (), joined(range(3)), "")) == ()


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.integers(1, 2),
    st.lists(st.sets(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 9)), max_size=60), max_size=4),
    st.integers(0, 10),
)
def test_the_prefix_is_as_it_is_defined(
    windows: list[int], ranks: int, missing: list[set[tuple[int, int, int]]], asked: int
) -> None:
    """By brute force: the most blocks n of which each rank and group has the last `window`, or all."""
    book = DirectoryBook()
    expected = {}
    for node, gaps in enumerate(missing):
        held = {(r, g, i) for r in range(2) for g in range(3) for i in range(10)} - gaps
        keys = [block_key(FPS[rank], group, HASHES[i]) for rank, group, i in held]
        assert not book.publish(Publish(f"n{node}", "s", StoreLife("l"), 0, 0, pack_keys(keys)), 0.0)

        def whole(n: int, held: set[tuple[int, int, int]] = held) -> bool:
            return all(
                (rank, group, i) in held
                for rank in range(ranks)
                for group, window in enumerate(windows)
                for i in range(max(0, n - window) if window else 0, n)
            )

        longest = max(n for n in range(asked + 1) if whole(n))
        if longest:
            expected[f"n{node}"] = longest
    found = book.locate(Locate(FPS[:ranks], tuple(windows), joined(range(asked)), ""))
    assert {one.node: one.blocks for one in found} == expected
    assert [one.blocks for one in found] == sorted(expected.values(), reverse=True)


def test_holders_of_as_much_take_turns(book: Book) -> None:
    names = [f"n{number}" for number in range(3 * NAMED)]
    for name in names:
        book.say(name, [0, 1])
    firsts = set()
    for _ in names:
        found = book.book.locate(Locate(FP, (0,), joined(range(2)), ""))
        assert len({one.node for one in found}) == len(found) == NAMED
        firsts.add(found[0].node)
    assert firsts == set(names)


def test_a_window_finds_the_holder_among_many(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many are looked at closely, and one with the last blocks is among them."""
    monkeypatch.setattr(prefix_runs, "TRIED", 2)
    for number in range(6):
        book.say(f"n{number}", [0])
    book.say("long", range(10))
    assert next(iter(book.ask(range(10), windows=(3,)).items())) == ("long", 10)


# -- streams -------------------------------------------------------------------------------------------------


def test_changes_follow_in_order(book: Book) -> None:
    assert not book.say("a", [0, 1], whole=False)
    assert [one.whole for one in book.book.holders(0.0)] == [False]
    assert not book.say("a", [2, 3], [0])
    (holder,) = book.book.holders(7.0)
    assert (holder.blocks, holder.whole, holder.silent_s) == (3, True, 7.0)
    assert book.ask([1, 2, 3]) == {"a": 3} and book.ask([0, 1]) == {}
    assert not book.say("a", [1], [1]), "removals come first"
    assert book.ask([1]) == {"a": 1}


def test_a_gap_asks_for_a_new_stream_and_a_repeat_does_not(book: Book) -> None:
    book.say("a", [0], number=0)
    assert book.say("a", [5], number=2)
    assert book.ask([5]) == {}
    assert not book.say("a", [6], number=0), "sent twice, its answer was lost"
    assert book.ask([6]) == {}
    assert not book.say("a", [1], number=1)
    assert not book.say("a", [0, 7], stream=1)
    assert book.ask([0]) == book.ask([7]) == {"a": 1} and book.ask([1]) == {}, "a stream begins with nothing"
    assert book.say("a", [8], stream=0, number=2) and book.ask([8]) == {}, "a batch of the stream before"


def test_who_knows_nothing_asks_for_a_new_stream(book: Book) -> None:
    assert book.say("a", [3], number=4)
    assert book.book.holders(0.0) == () and book.ask([3]) == {}
    assert not book.say("a", [3], stream=1)
    assert book.ask([3]) == {"a": 1}


def test_a_new_life_forgets_the_old_and_its_late_batches(book: Book) -> None:
    book.say("a", [0, 1], life="old", stream=3)
    assert not book.say("a", [1], life="new")
    assert book.ask([0, 1]) == {} and book.ask([1]) == {"a": 1}
    assert book.say("a", [0], life="old", stream=3)
    assert book.say("a", [0], life="old", stream=2, number=0)
    assert book.ask([0]) == {} and not book.say("a", [2], life="new")
    assert book.ask([1, 2]) == {"a": 2}


def test_a_dead_life_that_comes_first_is_replaced_by_the_living(book: Book) -> None:
    """A Directory that has restarted can't know which of two lives is the living one."""
    book.say("a", [1], life="new")
    assert not book.say("a", [0], life="old", stream=5)
    assert book.say("a", [2], life="new")
    assert not book.say("a", [1, 2], life="new", stream=1)
    assert book.ask([1, 2]) == {"a": 2} and book.ask([0]) == {}


def test_only_so_many_lives_are_remembered(book: Book) -> None:
    for number in range(3 * directory_book.LIVES):
        book.say("a", [number], life=f"life {number}")
    assert len(book.book._stores["a", "store-a"].streams) == directory_book.LIVES
    book.sweep()
    assert book.book.keys == 1


# -- the end of a holder -------------------------------------------------------------------------------------


def test_a_node_that_is_gone_is_forgotten_at_once(book: Book) -> None:
    book.say("a", range(20))
    book.say("b", range(10, 30))
    assert book.book.forget_nodes(["a", "unknown"]) == 1
    assert book.book.keys == 30, "the table is not touched"
    assert book.ask(range(3)) == {} and book.ask(range(10, 30)) == {"b": 20}
    assert book.say("a", [31]), "a living one has to begin anew"
    assert not book.say("a", range(5), stream=1)
    assert book.ask(range(20)) == {"a": 5}, "what it held before does not come back"
    book.sweep()
    assert book.book.keys == 25 and book.ask(range(10, 30)) == {"b": 20}


def test_a_bit_is_used_again_only_when_nothing_has_it(book: Book) -> None:
    book.say("a", range(20))
    assert book.book.sweep(SHARDS) is False
    book.book.forget_nodes(["a"])
    book.say("b", [0])
    assert book.ask(range(20)) == {"b": 1}
    assert book.book.sweep(SHARDS // 2) is True
    book.book.forget_nodes(["b"])
    book.say("c", [1])
    assert book.ask(range(20)) == {} and book.ask([1]) == {"c": 1}
    book.sweep()
    assert book.book.keys == 1
    book.say("d", [2])
    assert book.ask(range(20)) == {} and book.ask([2, 3]) == {"d": 1}
    assert max(book.book._records) <= 2


def test_silent_and_leaving_stores_are_forgotten(book: Book) -> None:
    book.say("a", [0])
    book.now = 10.0
    book.say("b", [0])
    assert book.book.forget_silent(before=0.0) == 0
    assert book.book.forget_silent(before=5.0) == 1
    assert book.ask([0]) == {"b": 1}
    assert not book.book.leave("b", "store-b", StoreLife("another life"))
    assert book.book.leave("b", "store-b", StoreLife("l"))
    assert not book.book.leave("b", "store-b", StoreLife("l")) and not book.book.leave("x", "y", StoreLife("z"))
    assert book.ask([0]) == {} and book.book.counts["forgotten"] == 1


def test_stores_that_are_gone_do_not_fill_the_book(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_book, "GONE", 4)
    for number in range(20):
        book.say(f"n{number}", [0])
        book.book.forget_nodes([f"n{number}"])
    assert len(book.book._stores) <= 6


def test_a_wrong_count_is_found(book: Book) -> None:
    book.say("a", [0, 1])
    book.book._table.remove(unpack_marks(packed([0])), 1)
    with pytest.raises(IntegrityError, match="counts"):
        book.book.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.sets(st.integers(0, 20))), max_size=40))
def test_what_is_believed_is_what_was_said(steps: list[tuple[int, int, set[int]]]) -> None:
    book = Book()
    model: dict[str, set[int]] = {}
    streams = dict.fromkeys(("a", "b", "c"), 0)
    for what, node, numbers in steps:
        name = "abc"[node]
        if what in (0, 1):
            added, removed = (numbers, set()) if what == 0 else (set(), numbers)
            if book.say(name, added, removed, stream=streams[name]):
                streams[name] += 1  # as a publisher does
                assert not book.say(name, added, stream=streams[name])
                model[name] = set()
            model.setdefault(name, set())
            model[name] = (model[name] - removed) | added
        elif what == 2:
            book.book.forget_nodes([name])
            model.pop(name, None)
        elif what == 3:
            streams[name] += 1
            assert not book.say(name, numbers, stream=streams[name])
            model[name] = set(numbers)
        else:
            book.book.sweep(100)
            book.book.check_integrity()
        for number in range(21):
            assert book.ask([number]) == {name: 1 for name, held in model.items() if number in held}
