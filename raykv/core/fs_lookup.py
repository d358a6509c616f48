"""What to ask a shared directory for: of a prompt's blocks those of which the answer to a look-up depends.

A directory answers one key at a time, by a round trip or several. So only what can make the prefix longer is asked
for: from the first block that is not known to be held, until one is known to be absent.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence

from raykv.core.prefix import block_key
from raykv.store_messages import HASH_NBYTES


class Known(enum.Enum):
    """What is known of a block."""

    HELD = "held"
    ABSENT = "absent"
    UNKNOWN = "unknown"


Ask = Callable[[bytes], Known]


def next_to_ask(
    known: Ask, fingerprints: Sequence[bytes], windows: Sequence[int], hashes: bytes, most: int
) -> list[bytes]:
    """Up to `most` keys that are UNKNOWN and decide about the longest prefix (see `prefix.longest_prefix`).

    Ask again once they are known. Empty: the prefix is known.
    """
    heads = [[block_key(fingerprint, group, b"") for group in range(len(windows))] for fingerprint in fingerprints]

    def keys(group: int, i: int) -> Iterator[bytes]:
        digest = hashes[HASH_NBYTES * i : HASH_NBYTES * (i + 1)]
        for head in heads:
            yield head[group] + digest

    asks: list[bytes] = []
    n = 0
    full = [group for group, window in enumerate(windows) if not window]
    while n < len(hashes) // HASH_NBYTES and len(asks) < most:
        answers = {key: known(key) for group in full for key in keys(group, n)}
        if Known.ABSENT in answers.values():
            break
        asks.extend(key for key, answer in answers.items() if answer is Known.UNKNOWN)
        n += 1
    if asks:
        return asks[:most]
    # The windows at the end of what the other groups have; an absent block rules out all prefixes that need it.
    shrunk = True
    while shrunk:
        shrunk, asks = False, []
        for group, window in enumerate(windows):
            for i in range(n - 1, n - 1 - min(window, n), -1):
                answers = {key: known(key) for key in keys(group, i)}
                if Known.ABSENT in answers.values():
                    n, shrunk = i, True
                    break
                asks.extend(key for key, answer in answers.items() if answer is Known.UNKNOWN)
            if shrunk:
                break
    return asks[:most]
