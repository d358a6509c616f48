"""Copy blocks between the engine's KV cache and the slots of a pool in host memory: one copy, none in between.

A block is a row in each of some planes (see `blocks`); in its slot these rows follow each other. On a CPU there are
two ways to copy one, chosen by shape:

- **Up to four planes**: a memcpy for each row.
- **Many planes**: torch's `index_select` (save) and `index_copy_` (load) over a *window*, a tensor over the address
  range that spans all planes, whose row i begins at word i. So one call gathers all rows of a block, whatever
  storages they lie in, straight into the slot. Rows overlap in a window and most of its range is not ours: nothing
  but checked ids is ever turned into an index. Blocks for consecutive slots go in one call.

A word is as wide as all addresses and sizes allow: `index_copy_` moves a word at a time, at 16 bytes (complex128,
moved and never computed with) 1.3 times as fast as at 8.

Ratios to one memcpy of a large buffer in the same run (`benchmarks.storage`; 2 shared cores, 7 to 10 GB/s, medians;
shuffled blocks and slots; save / load, then the same with checksums):

    128 KiB in 1 plane     0.78 / 0.89, 0.59 / 0.65      1 MiB in 16 of 64 KiB   0.85 / 0.91, 0.62 / 0.63
    1 MiB in 1 plane       0.84 / 0.88, 0.60 / 0.70      1 MiB in 64 of 16 KiB   0.70 / 0.63, 0.52 / 0.44
    128 KiB in 8 of 16     0.61 / 0.61, 0.44 / 0.41      4 MiB in 64 of 64 KiB   0.80 / 0.99, 0.56 / 0.59
    128 KiB in 32 of 4     0.55 / 0.45, 0.39 / 0.34      and slots in order      0.72 / 0.54, 0.51 / 0.36

Tried and slower here: a staging chunk that stays in the L2 cache (0.25 to 0.6), process_vm_readv (0.2 to 0.6), a
memcpy per row of 4 to 16 KiB (0.25 to 0.5), the same loops under TorchScript (no gain: torch's own 3 us a call are it).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Literal, Protocol

import torch

from raykv.kvcache.blocks import LayerLayout, read_blocks, write_blocks

Checksum = Callable[[memoryview], int]

_FEW = 4  # planes: so many memcpys are faster than one call of torch (3 to 5 us)
_LONG_ROW = 64 * 1024
_RUN_NBYTES = 4 * 1024 * 1024  # of consecutive slots in one call
_CACHED_NBYTES = 4 * 1024 * 1024  # hashed right after, or before, it is copied; smaller: calls cost more than is won
_STAGE_NBYTES = 64 * 1024 * 1024  # of GPU memory, as long as a copy runs
_WORDS = (torch.complex128, torch.int64, torch.uint8)

_memcpy = ctypes.CDLL(None).memcpy  # gives up the GIL
_memcpy_with_gil = ctypes.PyDLL(None).memcpy
for _function in (_memcpy, _memcpy_with_gil):
    _function.argtypes, _function.restype = (ctypes.c_size_t,) * 3, None


class SlotMover:
    """Copies blocks of one KV group between `layouts` and `pool_slots` (uint8 [slots, slot_nbytes], in host memory).

    Stateless between calls; any thread, several at once, each with torch.set_num_threads(1). The GIL is released
    while bytes move. The caller guarantees that nobody else writes what is read or touches what is written, that no
    block id repeats in a load and no slot in a save, and, on a GPU, that the blocks are ready (see `fence`).
    """

    def __init__(
        self, layouts: Sequence[LayerLayout], pool_slots: torch.Tensor, checksum: Checksum | None = None
    ) -> None:
        """`checksum` is needed for calls with checksums. Raises ValueError where a block does not fit a slot."""
        planes = tuple(plane for layout in layouts for plane in layout.planes)
        self.num_blocks = layouts[0].num_blocks
        self.block_nbytes = sum(plane.shape[1] for plane in planes)
        num_slots, slot_nbytes = pool_slots.shape
        if any(layout.num_blocks != self.num_blocks for layout in layouts):
            raise ValueError("The layers of one KV group have as many blocks each.")
        if pool_slots.dtype != torch.uint8 or not pool_slots.is_contiguous() or pool_slots.device.type != "cpu":
            raise ValueError("A pool is a contiguous uint8 tensor [slots, slot_nbytes] in host memory.")
        if self.block_nbytes > slot_nbytes:
            raise ValueError(f"A block of {self.block_nbytes} bytes does not fit a slot of {slot_nbytes}.")
        self._checksum, self._pool, self._slot_nbytes = checksum, pool_slots, slot_nbytes  # the pool stays alive
        self._num_slots, self._bytes = num_slots, _view(pool_slots)
        if planes[0].device.type == "cuda":
            self._movers: list[_Mover] = [_Gpu(planes, pool_slots)]
            self._run, self._any_slots = max(1, _STAGE_NBYTES // self.block_nbytes), True
        else:
            self._movers = _sections(planes, pool_slots)
            # Slots that one window fills: consecutive ones are one run of rows.
            joins = self.block_nbytes == slot_nbytes and [type(m) for m in self._movers] == [_Window]
            self._run, self._any_slots = max(1, _RUN_NBYTES // self.block_nbytes) if joins else 1, False

    def save(self, block_ids: Sequence[int], slots: Sequence[int], *, checksums: bool = False) -> list[int]:
        """Copy block `block_ids[i]` to `slots[i]`. With `checksums` return that of each slot's block, else nothing.

        Raises IndexError before anything is copied.
        """
        self._check(block_ids, slots)
        found: list[int] = []
        for start, end in self._groups(len(slots), checksums):
            self._copy("save", slots[start:end], block_ids[start:end])
            if checksums:
                found.extend(map(self._hash, slots[start:end]))
        return found

    def load(self, slots: Sequence[int], block_ids: Sequence[int], *, expect: Sequence[int] | None = None) -> list[int]:
        """Copy `slots[i]` to block `block_ids[i]`. With `expect`, checksums from a save, each slot is compared first:
        return the places i of those that differ; their blocks are not touched.

        Raises IndexError before anything is copied.
        """
        self._check(block_ids, slots)
        if expect is not None and len(expect) != len(slots):
            raise ValueError(f"{len(slots)} slots, {len(expect)} checksums")
        bad: list[int] = []
        for start, end in self._groups(len(slots), expect is not None):
            wrong = [i for i in range(start, end) if self._hash(slots[i]) != expect[i]] if expect is not None else []
            if wrong:
                bad += wrong
                good = [i for i in range(start, end) if i not in wrong]
                self._copy("load", [slots[i] for i in good], [block_ids[i] for i in good])
            else:
                self._copy("load", slots[start:end], block_ids[start:end])
        return bad

    def _copy(self, what: Literal["save", "load"], slots: Sequence[int], block_ids: Sequence[int]) -> None:
        ids, runs = torch.tensor(block_ids, dtype=torch.int64), self._runs(slots)
        for mover in self._movers:
            if what == "save":
                mover.save(ids, runs)
            else:
                mover.load(ids, runs)

    def _groups(self, count: int, checksums: bool) -> list[tuple[int, int]]:
        """All at once; or so many that the slots are still in the cache for the second of copy and checksum."""
        size = max(1, _CACHED_NBYTES // self.block_nbytes) if checksums else max(1, count)
        return [(start, min(start + size, count)) for start in range(0, count, size)]

    def _check(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        if len(block_ids) != len(slots):
            raise ValueError(f"{len(block_ids)} blocks, {len(slots)} slots")
        for name, ids, bound in (("block", block_ids, self.num_blocks), ("slot", slots, self._num_slots)):
            if ids and not (min(ids) >= 0 and max(ids) < bound):
                raise IndexError(f"{name} {min(ids) if min(ids) < 0 else max(ids)} of {bound}")

    def _runs(self, slots: Sequence[int]) -> list[Sequence[int]]:
        """`slots` in the pieces that are copied at once."""
        if self._run == 1:
            return [(slot,) for slot in slots]
        runs, start = [], 0
        for place in range(1, len(slots) + 1):
            full = place - start == self._run or place == len(slots)
            if full or not (self._any_slots or slots[place] == slots[place - 1] + 1):
                runs.append(slots[start:place])
                start = place
        return runs

    def _hash(self, slot: int) -> int:
        assert self._checksum is not None, "this mover was made without a checksum"
        start = slot * self._slot_nbytes
        return self._checksum(self._bytes[start : start + self.block_nbytes])


class _Mover(Protocol):
    """Copies some consecutive planes of blocks to and from slots, which come in runs: see `_runs`."""

    def save(self, block_ids: torch.Tensor, runs: Sequence[Sequence[int]]) -> None: ...

    def load(self, block_ids: torch.Tensor, runs: Sequence[Sequence[int]]) -> None: ...


class _Memcpy:
    """One plane, a memcpy for each row. Runs are of one slot."""

    def __init__(self, plane: torch.Tensor, pool: torch.Tensor, offset: int) -> None:
        self._base, self._stride, self._nbytes = plane.data_ptr(), plane.stride(0), plane.shape[1]
        self._pool, self._slot_nbytes = pool.data_ptr() + offset, pool.shape[1]
        # Giving up the GIL may cost 5 ms to get it back: not for a few microseconds' copy.
        self._memcpy = _memcpy if self._nbytes >= _LONG_ROW else _memcpy_with_gil

    def save(self, block_ids: torch.Tensor, runs: Sequence[Sequence[int]]) -> None:
        memcpy, pool, step, nbytes = self._memcpy, self._pool, self._slot_nbytes, self._nbytes
        for address, (slot,) in zip(self._addresses(block_ids), runs, strict=True):
            memcpy(pool + slot * step, address, nbytes)

    def load(self, block_ids: torch.Tensor, runs: Sequence[Sequence[int]]) -> None:
        memcpy, pool, step, nbytes = self._memcpy, self._pool, self._slot_nbytes, self._nbytes
        for address, (slot,) in zip(self._addresses(block_ids), runs, strict=True):
            memcpy(address, pool + slot * step, nbytes)

    def _addresses(self, block_ids: torch.Tensor) -> list[int]:
        return (block_ids * self._stride + self._base).tolist()


class _Window:
    """Planes with rows of one size. Runs are of consecutive slots; of several only if these planes fill a slot."""

    def __init__(self, planes: Sequence[torch.Tensor], pool: torch.Tensor, offset: int) -> None:
        low = min(plane.data_ptr() for plane in planes)
        nbytes = max(plane.data_ptr() + (len(plane) - 1) * plane.stride(0) + plane.shape[1] for plane in planes) - low
        row, slot_nbytes = planes[0].shape[1], pool.shape[1]
        numbers = [row, nbytes, offset, slot_nbytes, low, pool.data_ptr()]
        numbers += [number for plane in planes for number in (plane.data_ptr() - low, plane.stride(0))]
        word = next(dtype for dtype in _WORDS if all(number % dtype.itemsize == 0 for number in numbers))
        width, self._planes, self._row = word.itemsize, len(planes), row // word.itemsize
        memory = torch.frombuffer((ctypes.c_char * nbytes).from_address(low), dtype=word)
        self._window = memory.as_strided((memory.numel() - self._row + 1, self._row), (1, 1))
        self._slots, self._slot = pool.view(-1).view(word), slot_nbytes // width
        self._offset = self._slots.storage_offset() + offset // width  # as_strided counts from the storage's start
        self._bases = torch.tensor([(plane.data_ptr() - low) // width for plane in planes])
        self._strides = torch.tensor([plane.stride(0) // width for plane in planes])

    def save(self, block_ids: torch.Tensor, runs: Sequence[Sequence[int]]) -> None:
        window, select = self._window, torch.index_select
        for index, rows in self._pairs(block_ids, runs):
            select(window, 0, index, out=rows)

    def load(self, block_ids: torch.Tensor, runs: Sequence[Sequence[int]]) -> None:
        copy = self._window.index_copy_
        for index, rows in self._pairs(block_ids, runs):
            copy(0, index, rows)

    def _pairs(
        self, block_ids: torch.Tensor, runs: Sequence[Sequence[int]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each run its rows in the window, by index, and in the pool."""
        places = torch.addcmul(self._bases, block_ids[:, None], self._strides).view(-1)
        view, planes, row, step, offset = self._slots.as_strided, self._planes, self._row, self._slot, self._offset
        for index, run in zip(places.split([len(run) * planes for run in runs]), runs, strict=True):
            yield index, view((len(run) * planes, row), (row, 1), run[0] * step + offset)


class _Gpu:
    """All planes of a GPU's KV cache: gathered there, then one copy a slot; complete when it returns.

    Asynchronous, and as fast as the bus, if the pool's memory is pinned. On the current stream. Runs are of any slots.
    """

    def __init__(self, planes: Sequence[torch.Tensor], pool: torch.Tensor) -> None:
        self._planes, self._pool, self._device = planes, pool, planes[0].device
        self._nbytes = sum(plane.shape[1] for plane in planes)

    def save(self, block_ids: torch.Tensor, runs: Sequence[Sequence[int]]) -> None:
        for ids, stage, run in self._stages(block_ids, runs):
            read_blocks(self._planes, ids, stage)
            for row, slot in zip(stage, run, strict=True):
                self._pool[slot, : self._nbytes].copy_(row, non_blocking=True)
        self._finish()

    def load(self, block_ids: torch.Tensor, runs: Sequence[Sequence[int]]) -> None:
        for ids, stage, run in self._stages(block_ids, runs):
            for row, slot in zip(stage, run, strict=True):
                row.copy_(self._pool[slot, : self._nbytes], non_blocking=True)
            write_blocks(self._planes, ids, stage)
        self._finish()

    def _stages(
        self, block_ids: torch.Tensor, runs: Sequence[Sequence[int]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, Sequence[int]]]:
        stage = torch.empty((max(map(len, runs), default=0), self._nbytes), dtype=torch.uint8, device=self._device)
        parts = block_ids.to(self._device).split([len(run) for run in runs])
        for ids, run in zip(parts, runs, strict=True):  # one stage for all: its uses follow each other on the stream
            yield ids, stage[: len(run)], run

    def _finish(self) -> None:
        if self._device.type == "cuda":  # a test runs this class on the CPU
            torch.cuda.current_stream(self._device).synchronize()


def _sections(planes: Sequence[torch.Tensor], pool: torch.Tensor) -> list[_Mover]:
    """A mover for each stretch of planes with rows of one size."""
    movers: list[_Mover] = []
    offset = 0
    for row, stretch in groupby(planes, key=lambda plane: plane.shape[1]):
        same = list(stretch)
        if len(same) > _FEW:
            movers.append(_Window(same, pool, offset))
        else:
            movers += [_Memcpy(plane, pool, offset + row * i) for i, plane in enumerate(same)]
        offset += row * len(same)
    return movers


def _view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor that stays alive, without numpy."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
