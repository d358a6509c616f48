"""The ways in which `SlotMover` moves the rows of blocks to slots and back: by their addresses, or over a GPU.

A mover has the planes of a block (see `blocks`). What a job moves is prepared once, for all its blocks: after a copy
the caches hold nothing of what Python and torch need, and the same work takes three times as long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol

import torch

from raykv.kvcache.blocks import read_blocks, write_blocks

RowCopy = Callable[[int, int, int, int], object]
"""copy(targets, sources, count, nbytes): addresses of two arrays of `count` addresses; `nbytes` from each to each."""

_STAGE_NBYTES = 64 * 1024 * 1024  # of GPU memory, as long as a copy runs

_LONG_ROW = 64 * 1024  # giving up the GIL may cost 5 ms to get it back: not for a few microseconds' copy

_memcpy = ctypes.CDLL(None).memcpy  # gives up the GIL
_memcpy_with_gil = ctypes.PyDLL(None).memcpy
for _function in (_memcpy, _memcpy_with_gil):
    _function.argtypes, _function.restype = (ctypes.c_size_t,) * 3, None


class Transfer(Protocol):
    """The blocks and slots of one job, by their places in it. All ids were checked by who made it."""

    def save(self, first: int, last: int) -> None:
        """Copy blocks [first, last) to their slots."""

    def load(self, first: int, last: int) -> None:
        """Copy slots [first, last) to their blocks."""

    def finish(self) -> None:
        """Return when all copies are complete."""


class Mover(Protocol):
    """Planes of one place: a CPU's memory, or one GPU."""

    def transfer(self, block_ids: Sequence[int], slots: Sequence[int]) -> Transfer:
        """`block_ids[i]` goes with `slots[i]`. Nothing has moved yet."""


def memcpy_rows(targets: int, sources: int, count: int, nbytes: int) -> None:
    """A RowCopy without a compiler: a call of libc's memcpy for each row (0.4 us, as long as 4 KiB take)."""
    array, memcpy = ctypes.c_size_t * count, _memcpy if nbytes >= _LONG_ROW else _memcpy_with_gil
    for target, source in zip(array.from_address(targets), array.from_address(sources), strict=True):
        memcpy(target, source, nbytes)


class Rows:
    """Planes in a CPU's memory: one call for all rows of one size. Neighbours in a block are neighbours in the call, so
    that a slot is written, or read, from its start to its end."""

    def __init__(self, planes: Sequence[torch.Tensor], pool: torch.Tensor, copy: RowCopy) -> None:
        self._copy, self._slot_nbytes = copy, pool.shape[1]
        self._stretches: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        at = pool.data_ptr()
        for nbytes, stretch in groupby(planes, key=lambda plane: plane.shape[1]):
            same = list(stretch)
            bases = torch.tensor([plane.data_ptr() for plane in same])
            strides = torch.tensor([plane.stride(0) for plane in same])
            places = torch.arange(len(same)) * nbytes + at
            self._stretches.append((nbytes, bases, strides, places))
            at += nbytes * len(same)

    def transfer(self, block_ids: Sequence[int], slots: Sequence[int]) -> Transfer:
        blocks, starts = torch.tensor([block_ids, slots], dtype=torch.int64).unsqueeze(-1)
        starts *= self._slot_nbytes
        parts = [
            _Part(nbytes, torch.addcmul(bases, blocks, strides), starts + places)
            for nbytes, bases, strides, places in self._stretches
        ]
        return _RowsTransfer(self._copy, parts)


class _Part:
    """The addresses of some blocks' rows of one size, in the KV cache and in the pool: int64 [blocks, planes]."""

    def __init__(self, nbytes: int, rows: torch.Tensor, slots: torch.Tensor) -> None:
        self.nbytes, self.width = nbytes, rows.shape[1]
        self._tensors = (rows, slots)
        self.rows, self.slots = rows.data_ptr(), slots.data_ptr()


class _RowsTransfer:
    def __init__(self, copy: RowCopy, parts: Sequence[_Part]) -> None:
        self._copy, self._parts = copy, parts

    def save(self, first: int, last: int) -> None:
        for part in self._parts:
            at = first * part.width * 8
            self._copy(part.slots + at, part.rows + at, (last - first) * part.width, part.nbytes)

    def load(self, first: int, last: int) -> None:
        for part in self._parts:
            at = first * part.width * 8
            self._copy(part.rows + at, part.slots + at, (last - first) * part.width, part.nbytes)

    def finish(self) -> None:
        pass


class Gpu:
    """All planes of a GPU's KV cache: gathered there, then one copy a slot.

    Asynchronous, and as fast as the bus, if the pool's memory is pinned. On the current stream.
    """

    def __init__(self, planes: Sequence[torch.Tensor], pool: torch.Tensor) -> None:
        self.planes, self.pool, self.device = planes, pool, planes[0].device
        self.nbytes = sum(plane.shape[1] for plane in planes)
        self.run = max(1, _STAGE_NBYTES // self.nbytes)

    def transfer(self, block_ids: Sequence[int], slots: Sequence[int]) -> Transfer:
        return _GpuTransfer(self, torch.tensor(block_ids, dtype=torch.int64).to(self.device), slots)


class _GpuTransfer:
    def __init__(self, gpu: Gpu, ids: torch.Tensor, slots: Sequence[int]) -> None:
        self._gpu, self._ids, self._slots = gpu, ids, slots
        # One stage for all: its uses follow each other on the stream.
        self._stage = torch.empty((min(len(slots), gpu.run), gpu.nbytes), dtype=torch.uint8, device=gpu.device)

    def save(self, first: int, last: int) -> None:
        gpu = self._gpu
        for ids, stage, slots in self._runs(first, last):
            read_blocks(gpu.planes, ids, stage)
            for row, slot in zip(stage, slots, strict=True):
                gpu.pool[slot, : gpu.nbytes].copy_(row, non_blocking=True)

    def load(self, first: int, last: int) -> None:
        gpu = self._gpu
        for ids, stage, slots in self._runs(first, last):
            for row, slot in zip(stage, slots, strict=True):
                row.copy_(gpu.pool[slot, : gpu.nbytes], non_blocking=True)
            write_blocks(gpu.planes, ids, stage)

    def _runs(self, first: int, last: int) -> list[tuple[torch.Tensor, torch.Tensor, Sequence[int]]]:
        cuts = [(at, min(at + self._gpu.run, last)) for at in range(first, last, self._gpu.run)]
        return [(self._ids[a:b], self._stage[: b - a], self._slots[a:b]) for a, b in cuts]

    def finish(self) -> None:
        if self._gpu.device.type == "cuda":  # a test runs this class on the CPU
            torch.cuda.current_stream(self._gpu.device).synchronize()
