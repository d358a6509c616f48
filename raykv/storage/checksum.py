"""The checksum of a block's bytes: xxh3_64.

It finds what media and torn writes do to data; it is no defence against somebody who forges data.
Speed here, data in the cache: 26 to 31 GB/s. xxhash's one-shot function holds the GIL for as long as it runs, its
streaming `update` releases it for large buffers (both seen with a second thread). So long data is streamed; for short
data the GIL is held for 10 us at most, which costs less than giving it up.
"""

from __future__ import annotations

import ctypes
from typing import TypeAlias

import torch
import xxhash

Bytes: TypeAlias = torch.Tensor | memoryview | bytes | bytearray

_SHORT = 256 * 1024


def checksum(data: Bytes) -> int:
    """xxh3_64 of the bytes, an unsigned 64-bit number. A tensor must be contiguous, on the CPU, of dtype uint8."""
    view = data if isinstance(data, memoryview) else as_bytes(data)
    if view.nbytes <= _SHORT:
        return xxhash.xxh3_64_intdigest(view)
    digest = xxhash.xxh3_64()
    digest.update(view)
    return digest.intdigest()


def matches(data: Bytes, expected: int) -> bool:
    """Whether the bytes are those that had this checksum."""
    return checksum(data) == expected


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Memory of this process that stays as long as the view is used. Takes less than a slice of a tensor."""
    return memoryview((ctypes.c_char * nbytes).from_address(address))


def as_bytes(data: Bytes) -> memoryview:
    """The bytes of `data` in place, writable where they were."""
    if isinstance(data, torch.Tensor):
        if data.dtype != torch.uint8 or not data.is_contiguous() or data.device.type != "cpu":
            raise ValueError(f"Bytes are a contiguous uint8 tensor on the CPU, not {data.dtype} on {data.device}.")
        data = memoryview(data.detach().numpy())
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(bytearray())  # an empty view can't be cast
