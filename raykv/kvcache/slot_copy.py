"""Copy blocks between the engine's KV cache and the slots of a pool in host memory: one copy, none in between.

A block is a row in each of some planes (see `blocks`); in its slot these rows follow each other. How rows move, and
what limits that, is in `slot_movers`. A run of blocks is copied and, if wanted, hashed before the next one: what is
hashed comes from the cache, or what is copied does.

Ratios to one thread's memcpy of the same blocks in one piece (`benchmarks.storage`: 2 shared and busy cores, 6 to 10
GB/s; medians of two runs; slots in runs, as a pool hands them out), save and load, then the same with checksums:

    block      pieces of 4 KiB          16 KiB                   64 KiB                   128 KiB
    128 KiB    0.8, 0.5; 0.57, 0.43     0.8, 0.8; 0.60, 0.55     0.9, 0.9; 0.63, 0.66     0.8, 0.8; 0.66, 0.64
    512 KiB    0.9, 0.7; 0.67, 0.52     0.8, 0.7; 0.62, 0.55     0.8, 0.8; 0.60, 0.62     0.8, 0.9; 0.61, 0.66
    2 MiB      0.9, 0.6; 0.65, 0.51     0.8, 0.8; 0.64, 0.58     1.0, 1.0; 0.72, 0.76     1.0, 1.1; 0.75, 0.75

Shuffled slots are a call for each block: 0.55 to 0.7 and 0.45 to 0.65 for blocks of 128 KiB in pieces. Where the planes
lie in order and equally far apart, loads of 512 KiB and more in pieces of 4 and 16 KiB are 1.1 to 1.3 times as fast.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from raykv.kvcache.blocks import LayerLayout
from raykv.kvcache.slot_movers import Gpu, Memcpy, Mover, Run, Window, movers_of

Checksum = Callable[[memoryview], int]

_RUN_NBYTES = 2 * 1024 * 1024  # of slots in one call: its time is nothing to it, and it stays in the cache
_STAGE_NBYTES = 64 * 1024 * 1024  # of GPU memory, as long as a copy runs


class SlotMover:
    """Copies blocks of one KV group between `layouts` and `pool_slots` (uint8 [slots, slot_nbytes], in host memory).

    Stateless between calls; any thread, several at once, each with torch.set_num_threads(1). The GIL is released
    while bytes move, but for rows below 64 KiB in up to four planes, where it is held for 0.3 ms at most. The caller
    guarantees that nobody else writes what is read or touches what is written, that no block id repeats in a load and
    no slot in a save, and, on a GPU, that the blocks are ready (see `fence`).
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
            self._movers: list[Mover] = [Gpu(planes, pool_slots)]
            self._run, self._any_slots = max(1, _STAGE_NBYTES // self.block_nbytes), True
        else:
            self._movers = movers_of(planes, pool_slots)
            kinds = {type(mover) for mover in self._movers}
            # Slots that one window fills: consecutive ones are one run of rows. To memcpy all slots are alike.
            joins = kinds == {Window} and len(self._movers) == 1 and self.block_nbytes == slot_nbytes
            self._any_slots = kinds == {Memcpy}
            self._run = max(1, _RUN_NBYTES // self.block_nbytes) if joins or self._any_slots else 1

    def save(self, block_ids: Sequence[int], slots: Sequence[int], *, checksums: bool = False) -> list[int]:
        """Copy block `block_ids[i]` to `slots[i]`. With `checksums` return that of each slot's block, else nothing.

        Raises IndexError before anything is copied.
        """
        self._check(block_ids, slots)
        found: list[int] = []
        with torch.inference_mode():  # calls take less time
            ids, runs = torch.tensor(block_ids, dtype=torch.int64), self._runs(slots)
            for run, *copies in zip(runs, *(mover.saves(ids, runs) for mover in self._movers), strict=True):
                for copy in copies:
                    copy()
                if checksums:
                    self._finish()
                    found += map(self._hash, run)
            self._finish()
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
        with torch.inference_mode():
            ids, runs = torch.tensor(block_ids, dtype=torch.int64), self._runs(slots)
            start = 0
            for run, *copies in zip(runs, *(mover.loads(ids, runs) for mover in self._movers), strict=True):
                places = range(start, start + len(run))
                start += len(run)
                if expect is not None:
                    wrong = [place for place in places if self._hash(slots[place]) != expect[place]]
                    if wrong:
                        bad += wrong
                        good = [place for place in places if place not in wrong]
                        self.load([slots[place] for place in good], [block_ids[place] for place in good])
                        continue
                for copy in copies:
                    copy()
            self._finish()
        return bad

    def _finish(self) -> None:
        for mover in self._movers:
            mover.finish()

    def _check(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        if len(block_ids) != len(slots):
            raise ValueError(f"{len(block_ids)} blocks, {len(slots)} slots")
        for name, ids, bound in (("block", block_ids, self.num_blocks), ("slot", slots, self._num_slots)):
            if ids and not (min(ids) >= 0 and max(ids) < bound):
                raise IndexError(f"{name} {min(ids) if min(ids) < 0 else max(ids)} of {bound}")

    def _runs(self, slots: Sequence[int]) -> list[Run]:
        """`slots` in the pieces that are copied at once."""
        if self._run == 1:
            return [(slot,) for slot in slots]
        runs: list[Run] = []
        start = 0
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


def _view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor that stays alive, without numpy."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
