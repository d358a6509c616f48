"""The keys of a tier's slots, once more beside the index and in order of slots, to be compared in runs.

A key is kept in two parts, its head (which rank's and group's it is) and its hash, so that the hashes of a prompt as
they come are compared with those of a run of slots in one go. Of a slot without a block the parts mean nothing.
"""

from __future__ import annotations

from raykv.errors import IntegrityError
from raykv.store_messages import HASH_NBYTES, KEY_NBYTES

HEAD_NBYTES = KEY_NBYTES - HASH_NBYTES
FINE_NBYTES = 16 * HASH_NBYTES
"""Of so few bytes the first one that differs is computed, of more it is searched for by halves."""


class SlotKeys:
    """KEY_NBYTES a slot. Not thread-safe."""

    def __init__(self, slots: int) -> None:
        self._heads = bytearray(HEAD_NBYTES * slots)
        self._hashes = bytearray(HASH_NBYTES * slots)

    def resize(self, slots: int) -> None:
        """So many slots from now on."""
        for parts, size in ((self._heads, HEAD_NBYTES), (self._hashes, HASH_NBYTES)):
            del parts[size * slots :]
            parts.extend(bytes(size * slots - len(parts)))

    @staticmethod
    def check(key: bytes) -> None:
        """Raise IntegrityError if it is no key."""
        if len(key) != KEY_NBYTES:
            raise IntegrityError(f"a block's key has {KEY_NBYTES} bytes, not {len(key)}")

    def put(self, slot: int, key: bytes) -> None:
        self.check(key)
        self._heads[HEAD_NBYTES * slot : HEAD_NBYTES * (slot + 1)] = key[:HEAD_NBYTES]
        self._hashes[HASH_NBYTES * slot : HASH_NBYTES * (slot + 1)] = key[HEAD_NBYTES:]

    def get(self, slot: int) -> bytes:
        head, digest = HEAD_NBYTES * slot, HASH_NBYTES * slot
        return bytes(self._heads[head : head + HEAD_NBYTES] + self._hashes[digest : digest + HASH_NBYTES])

    def same_hashes(self, slot: int, hashes: bytes, first: int) -> int:
        """How many slots from `slot` on have the hashes of a prompt's blocks from `first` on. The first one has."""
        return _in_common(self._hashes, HASH_NBYTES * slot, hashes, HASH_NBYTES * first)

    def same_heads(self, slot: int, count: int, head: bytes) -> int:
        """How many of these slots come before one with another head."""
        if self._heads[HEAD_NBYTES * slot : HEAD_NBYTES * (slot + count)] == head * count:
            return count
        heads = (self._heads[HEAD_NBYTES * one : HEAD_NBYTES * (one + 1)] for one in range(slot, slot + count))
        return next(i for i, other in enumerate(heads) if other != head)


def _in_common(left: bytearray, at_left: int, right: bytes, at_right: int) -> int:
    """How many hashes from two places on are the same. The first ones are."""
    most = min(len(left) - at_left, len(right) - at_right) // HASH_NBYTES * HASH_NBYTES
    same = step = HASH_NBYTES
    growing = True
    while same < most:
        step = min(step, most - same)
        a = left[at_left + same : at_left + same + step]
        b = right[at_right + same : at_right + same + step]
        if a == b:
            same += step
            step = max(FINE_NBYTES, 2 * step if growing else step // 2)
        elif step > FINE_NBYTES:
            step //= 2
            growing = False
        else:
            differ = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
            same += ((differ & -differ).bit_length() - 1) // 8  # the first byte that differs
            break
    return same // HASH_NBYTES
