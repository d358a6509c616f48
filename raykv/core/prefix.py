"""Which prefix of a prompt is held, and in which runs: the rule, over any index.

A *row* is what one fingerprint (rank) has of one KV group. It needs all blocks of the prefix, or the last few of them,
and lies in *runs*: slots of one tier next to each other whose blocks follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from raykv.core.store_plans import Place, Row, Run
from raykv.store_messages import HASH_NBYTES

CHUNK = 128
"""So many blocks of one row are used before those of the next: see `tail_first`."""


class Index(Protocol):
    """Where blocks are."""

    def find(self, key: bytes) -> Place | None:
        """Where a block is READY."""

    def run(self, head: bytes, hashes: bytes, first: int) -> Run | None:
        """The same for block number `first` of a prompt, and how many from it on lie there in a row. `head`: what the
        row's keys begin with; `hashes`: the prompt's, concatenated."""


def block_key(fingerprint: bytes, group: int, block_hash: bytes) -> bytes:
    """The BlockKey of one block of one KV group of one rank."""
    return fingerprint + bytes((group,)) + block_hash


def longest_prefix(
    index: Index, fingerprints: Sequence[bytes], windows: Sequence[int], hashes: bytes
) -> tuple[int, tuple[tuple[Row, ...], ...]]:
    """The most blocks n for which every fingerprint has what its groups need, and its rows by fingerprint and group.

    A group with window 0 needs blocks 0 to n - 1; one with window w the last min(w, n) of them.
    """
    n = len(hashes) // HASH_NBYTES if fingerprints and windows else 0
    heads = [[block_key(fingerprint, group, b"") for group in range(len(windows))] for fingerprint in fingerprints]
    rows: dict[bytes, Row] = {}
    for group, window in enumerate(windows):
        for by_group in heads if not window else ():
            row = _row(index, by_group[group], hashes, 0, n)
            rows[by_group[group]] = row
            n = row.end
            if not n:
                return 0, ()
    n = _fitted(index, heads, windows, hashes, n)
    if not n:
        return 0, ()
    for group, window in enumerate(windows):
        for by_group in heads:
            if window:
                rows[by_group[group]] = _row(index, by_group[group], hashes, max(0, n - window), n)
    return n, tuple(tuple(rows[head].cut(n) for head in by_group) for by_group in heads)


def _row(index: Index, head: bytes, hashes: bytes, first: int, end: int) -> Row:
    """What is held of a prompt from block `first` on, up to the first one that is not, or to `end`."""
    runs: list[Run] = []
    at = first
    while at < end:
        run = index.run(head, hashes, at)
        if run is None:
            break
        runs.append(run)
        at += run.length
    row = Row(first, tuple(runs))
    return row.cut(end) if at > end else row


def _fitted(index: Index, heads: Sequence[Sequence[bytes]], windows: Sequence[int], hashes: bytes, n: int) -> int:
    """The longest prefix of at most n blocks whose windows are held."""
    held: list[set[int]] = [set() for _ in windows]  # by group: blocks that all fingerprints have

    def missing(group: int, i: int) -> bool:
        if i not in held[group]:
            digest = hashes[HASH_NBYTES * i : HASH_NBYTES * (i + 1)]
            if any(index.find(by_group[group] + digest) is None for by_group in heads):
                return True
            held[group].add(i)
        return False

    # Each missing block of a window rules out all prefixes whose window has it: go on with the one that ends before it.
    shrunk = True
    while shrunk:
        shrunk = False
        for group, window in enumerate(windows):
            gap = next((i for i in range(n - 1, n - 1 - min(window, n), -1) if missing(group, i)), None)
            if gap is not None:
                n, shrunk = gap, True
    return n


def tail_first(rows: Sequence[Row]) -> list[Run]:
    """All runs of a prefix in the order in which they are to be used: a block is worth nothing without those before
    it, and those of one rank nothing without the other ranks', so the tails of all rows come first, CHUNK by CHUNK."""
    if len(rows) == 1:
        return list(reversed(rows[0].runs))
    parts: list[tuple[int, int, int, Run]] = []
    for number, row in enumerate(rows):
        at = row.first
        for tier, slot, count in row.runs:
            end = at + count
            while at < end:
                part = min(end, (at // CHUNK + 1) * CHUNK) - at
                parts.append((-(at // CHUNK), number, -at, Run(tier, slot, part)))
                at, slot = at + part, slot + part
    return [run for *_, run in sorted(parts)]
