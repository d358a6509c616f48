"""Which prefix of a prompt is held: the rule, over any index."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raykv.core.store_plans import Place

Find = Callable[[bytes], Place | None]
Places = tuple[tuple[tuple[Place | None, ...], ...], ...]
"""By fingerprint (rank), KV group and block; None where the prefix does not need the block."""


def block_key(fingerprint: bytes, group: int, block_hash: bytes) -> bytes:
    """The BlockKey of one block of one KV group of one rank."""
    return fingerprint + bytes((group,)) + block_hash


def longest_prefix(
    find: Find, fingerprints: Sequence[bytes], windows: Sequence[int], hashes: Sequence[bytes]
) -> tuple[int, Places]:
    """The most blocks n for which every fingerprint has what its groups need, and where that lies.

    A group with window 0 needs blocks 0 to n - 1; one with window w the last min(w, n) of them.
    """
    if not fingerprints or not windows:
        return 0, ()
    heads = [[block_key(fingerprint, group, b"") for group in range(len(windows))] for fingerprint in fingerprints]
    full = [group for group, window in enumerate(windows) if not window]
    found: list[list[list[Place | None]]] = [[[None] * len(hashes) for _ in windows] for _ in fingerprints]

    def held(group: int, i: int) -> bool:
        for rank, head in enumerate(heads):
            place = found[rank][group][i] or find(head[group] + hashes[i])
            if place is None:
                return False
            found[rank][group][i] = place
        return True

    n = 0
    while n < len(hashes) and all(held(group, n) for group in full):
        n += 1
    # Each missing block of a window rules out all prefixes whose window has it: go on with the one that ends before it.
    shrunk = True
    while shrunk:
        shrunk = False
        for group, window in enumerate(windows):
            missing = next((i for i in range(n - 1, n - 1 - min(window, n), -1) if not held(group, i)), None)
            if missing is not None:
                n, shrunk = missing, True
    return n, tuple(
        tuple(
            tuple(place if not window or i >= n - window else None for i, place in enumerate(row[:n]))
            for window, row in zip(windows, rows, strict=True)
        )
        for rows in found
    )
