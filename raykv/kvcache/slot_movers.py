"""The ways in which `SlotMover` moves the rows of blocks to slots and back: by memcpy, through a window, over a GPU.

A mover has some consecutive planes of a block (see `blocks`). For a list of *runs* (slots that are copied at once) it
makes one copy for each; nothing has moved before a copy is called, and any of them may be left out.

What limits them, measured: memcpy of shuffled pieces of 4 and 16 KiB, in a loop in C, has 0.85 to 1 of the speed it has
for pieces of 128 KiB, because each piece is a new stream for the memory (with planes a power of two apart, so that all
pieces of a block compete for the same sets of the caches, 0.75). No way here is faster than that loop. What comes on
top of it is the call: 3 us for one of torch, 0.4 us for one memcpy, where 128 KiB take 13 us; and three times as much
where the copy before has emptied the caches.

Tried and slower, in C too: a chunk that stays in the L2 cache between the two (0.45 to 0.55), one plane of many blocks
after the other (0.55 to 0.75), touching the next rows ahead (0.95 to 1.05 of the same without). Stores past the cache
would bring loads to 1.1 to 1.4 and saves of 4 KiB nothing; neither torch nor libc has them for pieces this small.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, repeat
from typing import Protocol, TypeAlias

import torch

from raykv.kvcache.blocks import read_blocks, write_blocks

Run: TypeAlias = Sequence[int]
Copy: TypeAlias = Callable[[], object]

_FEW = 4  # planes: so many memcpys take no longer than one call of torch
_LONG_ROW = 64 * 1024  # of a row: as fast in torch's 16-byte loop as by memcpy
_LONG_CALL = 128 * 1024  # moved by a call: worth one
_LONG_BLOCK = 512 * 1024
_WORDS = (torch.complex128, torch.int64, torch.uint8)

_memcpy = ctypes.CDLL(None).memcpy  # gives up the GIL
_memcpy_with_gil = ctypes.PyDLL(None).memcpy
for _function in (_memcpy, _memcpy_with_gil):
    _function.argtypes, _function.restype = (ctypes.c_size_t,) * 3, None


class Mover(Protocol):
    """`block_ids[i]` goes with the i-th slot of all runs together. All are checked by the caller.

    All that can be is prepared before the first copy: after one the caches hold nothing of what Python and torch need,
    and the same work takes three times as long.
    """

    def saves(self, block_ids: torch.Tensor, runs: Sequence[Run]) -> list[Copy]: ...

    def loads(self, block_ids: torch.Tensor, runs: Sequence[Run]) -> list[Copy]: ...

    def finish(self) -> None:
        """Return when all copies that were called are complete."""


class Memcpy:
    """One plane, a memcpy for each row."""

    def __init__(self, plane: torch.Tensor, pool: torch.Tensor, offset: int) -> None:
        self._base, self._stride, self._nbytes = plane.data_ptr(), plane.stride(0), plane.shape[1]
        self._pool, self._slot_nbytes = pool.data_ptr() + offset, pool.shape[1]
        # Giving up the GIL may cost 5 ms to get it back: not for a few microseconds' copy.
        self._memcpy = _memcpy if self._nbytes >= _LONG_ROW else _memcpy_with_gil

    def saves(self, block_ids: torch.Tensor, runs: Sequence[Run]) -> list[Copy]:
        return [partial(self._copy, slots, rows) for rows, slots in self._addresses(block_ids, runs)]

    def loads(self, block_ids: torch.Tensor, runs: Sequence[Run]) -> list[Copy]:
        return [partial(self._copy, rows, slots) for rows, slots in self._addresses(block_ids, runs)]

    def finish(self) -> None:
        pass

    def _copy(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        deque(map(self._memcpy, targets, sources, repeat(self._nbytes)), maxlen=0)

    def _addresses(self, block_ids: torch.Tensor, runs: Sequence[Run]) -> Iterator[tuple[list[int], list[int]]]:
        rows, start = (block_ids * self._stride + self._base).tolist(), 0
        for run in runs:
            yield rows[start : start + len(run)], [self._pool + slot * self._slot_nbytes for slot in run]
            start += len(run)


class Window:
    """Planes with rows of one size. A run is one slot or, if these planes fill a slot, consecutive ones.

    A *window* is a tensor over the address range that spans all planes, whose row i begins at word i; so one call of
    `index_select` gathers all rows of some blocks, whatever storages they lie in, into consecutive slots: a memcpy for
    each row, in C. Rows overlap in a window and most of its range is not ours: nothing but checked ids is ever turned
    into an index. The way back is the same call, from a window over the pool into the planes, for one block at a time
    and planes equally far apart, in order (one storage, or mappings that follow each other); or `index_copy_`, which
    takes any planes and many blocks, and moves a word at a time: at 16 bytes (complex128, moved and never computed
    with) 1.3 times as fast as at 8, and 0.6 to 0.8 of memcpy for rows of 4 and 16 KiB: memcpy need not read what it
    overwrites.
    """

    def __init__(self, planes: Sequence[torch.Tensor], pool: torch.Tensor, offset: int) -> None:
        low = min(plane.data_ptr() for plane in planes)
        nbytes = max(plane.data_ptr() + (len(plane) - 1) * plane.stride(0) + plane.shape[1] for plane in planes) - low
        row, slot_nbytes = planes[0].shape[1], pool.shape[1]
        numbers = [row, nbytes, offset, slot_nbytes, low, pool.data_ptr()]
        numbers += [number for plane in planes for number in (plane.data_ptr() - low, plane.stride(0))]
        word = next(dtype for dtype in _WORDS if all(number % dtype.itemsize == 0 for number in numbers))
        width, self._row = word.itemsize, row // word.itemsize
        bases = [(plane.data_ptr() - low) // width for plane in planes]
        strides = [plane.stride(0) // width for plane in planes]
        self._bases, self._strides = torch.tensor(bases), torch.tensor(strides)
        self._memory = torch.frombuffer((ctypes.c_char * nbytes).from_address(low), dtype=word)
        self._window = _rows_anywhere(self._memory, self._row)
        slots, self._slot, self._offset = pool.view(-1).view(word), slot_nbytes // width, offset // width
        # as_strided counts from the storage's start
        start = slots.storage_offset() + self._offset
        self._slots = slots.as_strided((len(pool), len(planes), self._row), (self._slot, self._row, 1), start)
        self._pool_window = _rows_anywhere(slots, self._row)
        self._series = equally_spaced(bases, strides)
        in_order = all(each.step > 0 for each in self._series)  # else slots are read backwards: no faster
        fast = in_order and row < _LONG_ROW and len(planes) * row >= _LONG_CALL * len(self._series)
        self._by_block, self._by_run = fast, fast and len(planes) * row >= _LONG_BLOCK

    def saves(self, block_ids: torch.Tensor, runs: Sequence[Run]) -> list[Copy]:
        select = torch.index_select
        return [partial(select, self._window, 0, index, out=rows) for index, rows in self._pairs(block_ids, runs)]

    def loads(self, block_ids: torch.Tensor, runs: Sequence[Run]) -> list[Copy]:
        if self._by_run or (self._by_block and len(runs) == len(block_ids)):
            return self._loads_by_block(block_ids, runs)
        copy = self._window.index_copy_
        return [partial(copy, 0, index, rows) for index, rows in self._pairs(block_ids, runs)]

    def finish(self) -> None:
        pass

    def _pairs(self, block_ids: torch.Tensor, runs: Sequence[Run]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each run its rows in the window, by index, and in the pool."""
        places, planes, slots = (
            torch.addcmul(self._bases, block_ids[:, None], self._strides),
            len(self._bases),
            self._slots,
        )
        for index, run in zip(places.view(-1).split([len(run) * planes for run in runs]), runs, strict=True):
            first = run[0]
            yield index, slots[first] if len(run) == 1 else slots[first : first + len(run)].view(-1, self._row)

    def _loads_by_block(self, block_ids: torch.Tensor, runs: Sequence[Run]) -> list[Copy]:
        slots = torch.tensor([slot for run in runs for slot in run], dtype=torch.int64)[:, None] * self._slot
        copies: list[list[Copy]] = [[] for _ in range(len(block_ids))]
        for each in self._series:
            first = self._offset + each.first * self._row
            rows = torch.arange(first, first + each.count * self._row, self._row)
            sources = (slots + rows).unbind(0)
            size, stride, view = (each.count, self._row), (each.step, 1), self._memory.as_strided
            starts = (block_ids * each.block_stride + each.base).tolist()
            for place, (index, start) in enumerate(zip(sources, starts, strict=True)):
                target = view(size, stride, start)
                copies[place].append(partial(torch.index_select, self._pool_window, 0, index, out=target))
        found: list[Copy] = []
        start = 0
        for run in runs:
            found.append(partial(_call, [copy for part in copies[start : start + len(run)] for copy in part]))
            start += len(run)
        return found


class Gpu:
    """All planes of a GPU's KV cache: gathered there, then one copy a slot. Runs are of any slots.

    Asynchronous, and as fast as the bus, if the pool's memory is pinned. On the current stream.
    """

    def __init__(self, planes: Sequence[torch.Tensor], pool: torch.Tensor) -> None:
        self._planes, self._pool, self._device = planes, pool, planes[0].device
        self._nbytes = sum(plane.shape[1] for plane in planes)

    def saves(self, block_ids: torch.Tensor, runs: Sequence[Run]) -> list[Copy]:
        return [partial(self._save, ids, stage, run) for ids, stage, run in self._stages(block_ids, runs)]

    def loads(self, block_ids: torch.Tensor, runs: Sequence[Run]) -> list[Copy]:
        return [partial(self._load, ids, stage, run) for ids, stage, run in self._stages(block_ids, runs)]

    def finish(self) -> None:
        if self._device.type == "cuda":  # a test runs this class on the CPU
            torch.cuda.current_stream(self._device).synchronize()

    def _save(self, ids: torch.Tensor, stage: torch.Tensor, run: Run) -> None:
        read_blocks(self._planes, ids, stage)
        for row, slot in zip(stage, run, strict=True):
            self._pool[slot, : self._nbytes].copy_(row, non_blocking=True)

    def _load(self, ids: torch.Tensor, stage: torch.Tensor, run: Run) -> None:
        for row, slot in zip(stage, run, strict=True):
            row.copy_(self._pool[slot, : self._nbytes], non_blocking=True)
        write_blocks(self._planes, ids, stage)

    def _stages(self, block_ids: torch.Tensor, runs: Sequence[Run]) -> Iterator[tuple[torch.Tensor, torch.Tensor, Run]]:
        stage = torch.empty((max(map(len, runs), default=0), self._nbytes), dtype=torch.uint8, device=self._device)
        parts = block_ids.to(self._device).split([len(run) for run in runs])
        for ids, run in zip(parts, runs, strict=True):  # one stage for all: its uses follow each other on the stream
            yield ids, stage[: len(run)], run


def movers_of(planes: Sequence[torch.Tensor], pool: torch.Tensor) -> list[Mover]:
    """For planes on the CPU: a mover for each stretch of planes with rows of one size."""
    movers: list[Mover] = []
    offset = 0
    for row, stretch in groupby(planes, key=lambda plane: plane.shape[1]):
        same = list(stretch)
        # Planes that fill a slot may have many slots in one call.
        if len(same) > (1 if len(same) * row == pool.shape[1] else _FEW):
            movers.append(Window(same, pool, offset))
        else:
            movers += [Memcpy(plane, pool, offset + row * i) for i, plane in enumerate(same)]
        offset += row * len(same)
    return movers


@dataclass(frozen=True)
class Series:
    """`count` planes from the `first`, which is at word `base`, `step` words from each to the next."""

    first: int
    count: int
    step: int
    base: int
    block_stride: int


def equally_spaced(bases: Sequence[int], strides: Sequence[int]) -> list[Series]:
    """All planes, by their first words and their blocks' strides, in as long series as come."""
    found, first = [], 0
    while first < len(bases):
        step = bases[first + 1] - bases[first] if first + 1 < len(bases) else 1
        end = first + 1
        while end < len(bases) and bases[end] - bases[end - 1] == step and strides[end] == strides[first]:
            end += 1
        found.append(Series(first, end - first, step, bases[first], strides[first]))
        first = end
    return found


def _call(copies: Sequence[Copy]) -> None:
    for copy in copies:
        copy()


def _rows_anywhere(memory: torch.Tensor, row: int) -> torch.Tensor:
    """Its row i begins at word i of `memory`."""
    return memory.as_strided((memory.numel() - row + 1, row), (1, 1))
