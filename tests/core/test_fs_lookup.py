"""What is asked of a shared directory decides the prefix, is asked once, and is no more than needed."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from raykv.core.fs_lookup import Known, next_to_ask
from raykv.core.prefix import block_key, longest_prefix
from raykv.core.store_plans import Place, Run

FINGERPRINTS = [b"a" * 16, b"b" * 16]


class Held:
    """An index of these keys, each by itself."""

    def __init__(self, keys: set[bytes]) -> None:
        self._keys = keys

    def find(self, key: bytes) -> Place | None:
        return Place(0, 0) if key in self._keys else None

    def run(self, head: bytes, hashes: bytes, first: int) -> Run | None:
        return Run(0, 0, 1) if head + hashes[32 * first : 32 * (first + 1)] in self._keys else None


def by(book: dict[bytes, Known]) -> Callable[[bytes], Known]:
    return lambda key: book.get(key, Known.UNKNOWN)


@given(st.data())
def test_asking_until_nothing_is_left_finds_the_longest_prefix(data: st.DataObject) -> None:
    hashes = [bytes([i]) * 32 for i in range(data.draw(st.integers(0, 12)))]
    windows = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    fingerprints = FINGERPRINTS[: data.draw(st.integers(1, 2))]
    keys = [block_key(f, g, h) for f in fingerprints for g in range(len(windows)) for h in hashes]
    rarely = st.sampled_from([True] * data.draw(st.integers(1, 12)) + [False])
    there = {key: data.draw(rarely) for key in keys}
    book = {key: Known.HELD for key in keys if there[key] and data.draw(st.booleans())}
    most = data.draw(st.integers(1, 8))
    for _ in range(len(keys) + 1):
        asks = next_to_ask(by(book), fingerprints, windows, b"".join(hashes), most)
        assert len(asks) <= most and len(set(asks)) == len(asks) and not set(asks) & book.keys()
        if not asks:
            break
        book.update((key, Known.HELD if there[key] else Known.ABSENT) for key in asks)
    else:
        raise AssertionError("it never ends")

    held, oracle = (
        Held({key for key, known in book.items() if known is Known.HELD}),
        Held({k for k in keys if there[k]}),
    )
    wanted = fingerprints, windows, b"".join(hashes)
    assert longest_prefix(held, *wanted)[0] == longest_prefix(oracle, *wanted)[0]


def test_a_prefix_that_is_not_there_costs_one_round() -> None:
    hashes = [bytes([i]) * 32 for i in range(100)]
    asks = next_to_ask(by({}), FINGERPRINTS[:1], [0], b"".join(hashes), 8)
    assert asks == [block_key(FINGERPRINTS[0], 0, digest) for digest in hashes[:8]]
    assert next_to_ask(by({asks[0]: Known.ABSENT}), FINGERPRINTS[:1], [0], b"".join(hashes), 8) == []


def test_nothing_is_asked_behind_what_is_absent_or_of_what_is_held() -> None:
    hashes = [bytes([i]) * 32 for i in range(6)]
    keys = [block_key(FINGERPRINTS[0], 0, digest) for digest in hashes]
    book = {keys[0]: Known.HELD, keys[3]: Known.ABSENT}
    assert next_to_ask(by(book), FINGERPRINTS[:1], [0], b"".join(hashes), 8) == keys[1:3]


def test_no_engine_and_no_groups() -> None:
    assert next_to_ask(by({}), [], [0], bytes(32), 8) == []
    assert next_to_ask(by({}), FINGERPRINTS, [], bytes(32), 8) == []
