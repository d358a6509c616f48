"""A block key in 60 bits: what the Directory knows a block by.

Two keys with one mark are taken for one block: the Directory may then name a store that does not hold it, which says
no when it is asked by the whole key. With 10^10 blocks that is the fate of one look-up in 10^8. 60 bits, since Python
keeps such an integer in 32 bytes and needs 48 for one of 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from struct import iter_unpack, pack, unpack

from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES

NBYTES = 8
HEAD_NBYTES = FINGERPRINT_NBYTES + 1
_SPARE_BITS = 4
_HASH = f"<Q{HASH_NBYTES - NBYTES}x"


@lru_cache(maxsize=4096)
def salt(head: bytes) -> int:
    """What sets the blocks of one fingerprint and KV group apart from others. `head`: a key without its hash."""
    return int.from_bytes(blake2b(head, digest_size=NBYTES).digest(), "little") >> _SPARE_BITS


def pack_keys(keys: Iterable[bytes]) -> bytes:
    """The marks of block keys, NBYTES each, as they go over the wire."""
    end = HEAD_NBYTES + NBYTES
    marks = [(int.from_bytes(key[HEAD_NBYTES:end], "little") >> _SPARE_BITS) ^ salt(key[:HEAD_NBYTES]) for key in keys]
    return pack(f"<{len(marks)}Q", *marks)


def unpack_marks(packed: bytes) -> tuple[int, ...]:
    """What `pack_keys` packed. Raises ValueError for anything that can't be."""
    if len(packed) % NBYTES:
        raise ValueError(f"{len(packed)} bytes are no whole number of marks of {NBYTES} bytes")
    return unpack(f"<{len(packed) // NBYTES}Q", packed)


def of_hashes(hashes: bytes) -> list[int]:
    """For each of the concatenated hashes what gives, xor a `salt`, the mark of the block. Raises ValueError."""
    if len(hashes) % HASH_NBYTES:
        raise ValueError(f"{len(hashes)} bytes are no whole number of block hashes of {HASH_NBYTES} bytes")
    return [start >> _SPARE_BITS for (start,) in iter_unpack(_HASH, hashes)]
