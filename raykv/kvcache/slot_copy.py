"""Copy blocks between the engine's KV cache and the slots of a pool in host memory: one copy, none in between.

A block is a row in each of some planes (see `blocks`); in its slot these rows follow each other. How rows move is in
`slot_movers`; figures are in docs/soak.md.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from raykv.kvcache.blocks import LayerLayout
from raykv.kvcache.slot_movers import Gpu, Mover, RowCopy, Rows, memcpy_rows

Checksum = Callable[[memoryview], int]

_RUN_NBYTES = 1024 * 1024  # of slots that are compared, then copied: what was compared comes from the L2 cache


class SlotMover:
    """Copies blocks of one KV group between `layouts` and `pool_slots` (uint8 [slots, slot_nbytes], in host memory).

    Stateless between calls; any thread, several at once, each with torch.set_num_threads(1). The GIL is released
    while bytes move. The caller guarantees that nobody else writes what is read or touches what is written, that no
    block id repeats in a load and no slot in a save, and, on a GPU, that the blocks are ready (see `fence`).
    """

    def __init__(
        self,
        layouts: Sequence[LayerLayout],
        pool_slots: torch.Tensor,
        checksum: Checksum | None = None,
        copy_rows: RowCopy | None = None,
    ) -> None:
        """`checksum` is needed for calls with checksums. `copy_rows` moves rows of CPU memory (`storage.row_copy`);
        None: libc's memcpy does. Raises ValueError where a block does not fit a slot."""
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
        self._mover: Mover
        if planes[0].device.type == "cuda":
            self._mover = Gpu(planes, pool_slots)
        else:
            self._mover = Rows(planes, pool_slots, copy_rows or memcpy_rows)

    def save(self, block_ids: Sequence[int], slots: Sequence[int], *, checksums: bool = False) -> list[int]:
        """Copy block `block_ids[i]` to `slots[i]`. With `checksums` return that of each slot's block, else nothing.

        Raises IndexError before anything is copied.
        """
        if not self._check(block_ids, slots):
            return []
        with torch.inference_mode():  # calls take less time
            transfer = self._mover.transfer(block_ids, slots)
            transfer.save(0, len(slots))
            transfer.finish()
        return [self._hash(slot) for slot in slots] if checksums else []

    def load(
        self,
        slots: Sequence[int],
        block_ids: Sequence[int],
        *,
        expect: Sequence[int] | None = None,
        sound: Callable[[int, int], bool] | None = None,
    ) -> list[int]:
        """Copy `slots[i]` to block `block_ids[i]`. With `expect`, checksums from a save, each slot is compared first:
        return the places i of those that differ; their blocks are not touched. With `sound` the caller compares: it
        gets a place and the checksum of what is there.

        Raises IndexError before anything is copied.
        """
        if expect is not None:
            if len(expect) != len(slots):
                raise ValueError(f"{len(slots)} slots, {len(expect)} checksums")
            sound = lambda place, found: found == expect[place]  # noqa: E731
        if not self._check(block_ids, slots):
            return []
        bad: list[int] = []
        run = len(slots) if sound is None else max(1, _RUN_NBYTES // self.block_nbytes)
        with torch.inference_mode():
            transfer = self._mover.transfer(block_ids, slots)
            for first in range(0, len(slots), run):
                last = min(first + run, len(slots))
                for place in range(first, last) if sound is not None else ():
                    assert sound is not None
                    if not sound(place, self._hash(slots[place])):
                        bad.append(place)
                        transfer.load(first, place)
                        first = place + 1
                transfer.load(first, last)
            transfer.finish()
        return bad

    def _check(self, block_ids: Sequence[int], slots: Sequence[int]) -> bool:
        """Whether there is anything to do."""
        if len(block_ids) != len(slots):
            raise ValueError(f"{len(block_ids)} blocks, {len(slots)} slots")
        for name, ids, bound in (("block", block_ids, self.num_blocks), ("slot", slots, self._num_slots)):
            if ids and not (min(ids) >= 0 and max(ids) < bound):
                raise IndexError(f"{name} {min(ids) if min(ids) < 0 else max(ids)} of {bound}")
        return bool(slots)

    def _hash(self, slot: int) -> int:
        assert self._checksum is not None, "this mover was made without a checksum"
        start = slot * self._slot_nbytes
        return self._checksum(self._bytes[start : start + self.block_nbytes])


def _view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor that stays alive, without numpy."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
