"""The compiled copy of rows against Python's own, for every alignment and length around its turns; what it leaves."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.storage import row_copy as module
from raykv.storage.row_copy import row_copy
from tests.support.examples import examples

FENCE = 238


def copied(rows: list[tuple[int, int]], nbytes: int, size: int = 1 << 13) -> tuple[np.ndarray, np.ndarray]:
    """Rows of `nbytes` from the second offset of each pair to the first; what is there now and what should be."""
    copy = row_copy()
    assert copy is not None
    source = np.random.default_rng(nbytes).integers(0, 256, size, dtype=np.uint8)
    target = np.full(size, FENCE, np.uint8)
    wanted = target.copy()
    for to, at in rows:
        wanted[to : to + nbytes] = source[at : at + nbytes]
    targets = np.array([target.ctypes.data + to for to, _ in rows], np.uint64)
    sources = np.array([source.ctypes.data + at for _, at in rows], np.uint64)
    copy(targets.ctypes.data, sources.ctypes.data, len(rows), nbytes)
    return target, wanted


@settings(max_examples=examples(60))
@given(
    nbytes=st.sampled_from([0, 1, 63, 64, 255, 256, 257, 300, 512, 1000, 1024]),
    starts=st.lists(st.tuples(st.integers(0, 127), st.integers(0, 4000)), max_size=4),
)
def test_the_bytes_of_rows_and_nothing_else(nbytes: int, starts: list[tuple[int, int]]) -> None:
    rows = [(1200 * i + to, at) for i, (to, at) in enumerate(starts)]
    target, wanted = copied(rows, nbytes)
    assert (target == wanted).all()


@pytest.mark.parametrize("nbytes", [4096, 4160, 65536])
def test_long_rows(nbytes: int) -> None:
    target, wanted = copied([(0, 64), (nbytes, 3), (2 * nbytes + 64, 0)], nbytes, 4 * nbytes)
    assert (target == wanted).all()


def test_where_it_can_not_be_compiled_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Callable[..., object]:
        raise RuntimeError("no such target")

    monkeypatch.setattr(module, "_compiled", broken)
    assert row_copy.__wrapped__() is None
    assert ctypes.sizeof(ctypes.c_size_t) == 8, "addresses are 64-bit numbers in the compiled loop"
