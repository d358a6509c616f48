"""How long a prefix each of many holders has: the rule of `prefix.longest_prefix`, for all of them at once.

A set of holders is an integer, a bit for each (`mark_table`). That a holder has a block, for all ranks and groups that
need it, is the intersection of the sets of its keys; a prefix goes on for those that are in all intersections so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_

from raykv.core.block_marks import of_hashes, salt
from raykv.core.mark_table import LAST, indices
from raykv.core.prefix import block_key
from raykv.directory_messages import Locate

STRIDE = 64
TRIED = 32
"""So many of the longest candidates are looked at more closely for what sliding windows need."""

Runs = list[tuple[int, int]]
"""Blocks, and the set of holders that have so many; longest first, and perhaps a last one with 0 blocks or nobody."""
Shards = Sequence[dict[int, int]]


def prefix_runs(shards: Shards, asked: int, wanted: Locate, turn: int) -> Runs:
    """For the holders `asked`. `turn`: see `turned`. Raises ValueError for hashes that are none."""
    starts = of_hashes(wanted.hashes)
    heads = [[block_key(one, group, b"") for one in wanted.fingerprints] for group in range(len(wanted.windows))]
    groups = [(window, [salt(head) for head in row]) for window, row in zip(wanted.windows, heads, strict=True)]
    full = [one for window, salts in groups if not window for one in salts]
    windowed = [(window, salts) for window, salts in groups if window and salts]
    runs: Runs = []
    if full:
        runs = _runs(shards, asked, starts, full)
    elif windowed:
        runs = _last_held(shards, asked, starts, [one for _, salts in windowed for one in salts])
    if windowed:
        tried = [(blocks, 1 << index) for blocks, held in runs if blocks for index in turned(held, turn)][:TRIED]
        runs = [(_windows_held(shards, bit, blocks, starts, windowed), bit) for blocks, bit in tried]
        runs.sort(key=lambda run: -run[0])
    return runs


def turned(held: int, turn: int) -> list[int]:
    """The indices of a set, from another one on each turn, so that not all who ask come to the same holder."""
    found = indices(held)
    first = turn % len(found) if found else 0
    return found[first:] + found[:first]


def _all_held(shards: Shards, held: int, starts: Sequence[int], salts: Sequence[int]) -> int:
    """Those of the holders that have all of these blocks under all of these salts."""
    for one in salts:
        held = reduce(and_, [shards[(mark := start ^ one) & LAST].get(mark, 0) for start in starts], held)
    return held


def _runs(shards: Shards, held: int, starts: Sequence[int], salts: Sequence[int]) -> Runs:
    """How far the prefix goes for each holder if all of its blocks are needed. Ends with the last holder's run.

    In strides: one in which no holder drops out, nearly every one, is one expression.
    """
    held = _all_held(shards, held, starts[:1], salts)
    runs: Runs = []
    for first in range(0, len(starts), STRIDE):
        stride = starts[first : first + STRIDE]
        if not held:
            break
        if _all_held(shards, held, stride, salts) == held:
            continue
        for number, start in enumerate(stride, first):
            left = _all_held(shards, held, (start,), salts)
            if left != held:
                runs.append((number, held & ~left))
                held = left
    runs.append((len(starts), held))
    return runs[::-1]


def _last_held(shards: Shards, asked: int, starts: Sequence[int], salts: Sequence[int]) -> Runs:
    """No group needs the whole prefix: it can't go beyond the last block that a holder has for all of them."""
    runs: Runs = []
    for blocks in range(len(starts), 0, -1):
        if not asked:
            break
        held = _all_held(shards, asked, starts[blocks - 1 : blocks], salts)
        if held:
            runs.append((blocks, held))
            asked &= ~held
    return runs


def _windows_held(
    shards: Shards, bit: int, n: int, starts: Sequence[int], windowed: Sequence[tuple[int, Sequence[int]]]
) -> int:
    """The longest prefix of at most `n` blocks of which the holder has the last ones that each window needs."""
    shrunk = True
    while shrunk:
        shrunk = False
        for window, salts in windowed:
            last = range(n - 1, max(n - window, 0) - 1, -1)
            lost = next((i for i in last if not _all_held(shards, bit, starts[i : i + 1], salts)), None)
            if lost is not None:
                n, shrunk = lost, True
    return n
