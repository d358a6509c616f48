"""Which blocks a store has held since its start: the ceiling of its hit rate, had it never thrown one out.

A bitmap and two bits for each block, taken from its hash, which is as good as random. So it says "yes" wrongly now and
then, at most 1 time in 64 for a block as long as no more than an eighth of its bits are set; above that it begins anew
with the bitmap before it as a second one, and forgets what is older.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES

BITS = 1 << 27
"""16 MiB, and twice that when it is full the first time: 8 million blocks each."""
FULL = 1 / 8
_WORD = struct.Struct("<Q").unpack_from


class EverHeld:
    """One thread adds, one asks; they need no lock between them."""

    def __init__(self, bits: int = BITS) -> None:
        """`bits`: a power of two."""
        if bits < 8 or bits & (bits - 1):
            raise ValueError(f"a bitmap has a power of two bits, not {bits}")
        self._bits, self._mask = bits, bits - 1
        self._new, self._old = bytearray(bits // 8), bytearray(1)
        self._set = 0

    def add(self, keys: Sequence[bytes]) -> None:
        """These BlockKeys are held now."""
        for key in keys:
            for bit in self._bits_of(key, key, FINGERPRINT_NBYTES + 1):
                before = self._new[bit >> 3]
                after = before | 1 << (bit & 7)
                if after != before:
                    self._new[bit >> 3] = after
                    self._set += 1
        if self._set > self._bits * FULL:
            self._old, self._new, self._set = self._new, bytearray(self._bits // 8), 0

    def prefix(self, fingerprint: bytes, hashes: bytes, held: int) -> int:
        """How many of a prompt's first blocks have been held; `held` are now.

        Asks for a few only, in steps that double and then halve: a block is hardly ever held without those before it.
        """
        total = len(hashes) // HASH_NBYTES
        if held >= total or not self._had(fingerprint, hashes, held):  # most often, and quick
            return held
        low, step = held + 1, 2
        while low < total and self._had(fingerprint, hashes, min(total, low + step) - 1):
            low, step = min(total, low + step), 2 * step
        high = min(total, low + step)  # of [low, high) the last one is not held, or there is none
        while low + 1 < high:
            middle = (low + high) // 2
            if self._had(fingerprint, hashes, middle - 1):
                low = middle
            else:
                high = middle
        return low

    def _had(self, fingerprint: bytes, hashes: bytes, number: int) -> bool:
        (left,), (right,) = _WORD(hashes, HASH_NBYTES * number), _WORD(fingerprint, 0)
        mixed, mask = left ^ right, self._mask
        one = mixed & mask
        if self._new[one >> 3] >> (one & 7) & 1:
            two = (mixed >> 32) & mask
            if self._new[two >> 3] >> (two & 7) & 1:
                return True
        old = self._old
        if len(old) == 1 or not old[one >> 3] >> (one & 7) & 1:
            return False
        two = (mixed >> 32) & mask
        return bool(old[two >> 3] >> (two & 7) & 1)

    def _bits_of(self, fingerprint: bytes, hashes: bytes, at: int) -> tuple[int, int]:
        mixed = int.from_bytes(hashes[at : at + 8], "little") ^ int.from_bytes(fingerprint[:8], "little")
        return mixed & self._mask, (mixed >> 32) & self._mask
