"""A block pool with the semantics of vLLM's `BlockPool` (0.32): reference counts, a free queue, a prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(eq=False)
class Block:
    """One block. `key`: the content that the prefix cache knows it by."""

    block_id: int
    ref_cnt: int = 0
    key: Hashable | None = None


class BlockPool:
    """Blocks get a new owner by `new` only, and only from the head of the free queue.

    `on_owner(block)` is called at each such moment, before the block is handed out: the place to check that
    nobody still touches it.
    """

    def __init__(self, num_blocks: int, on_owner: Callable[[Block], None] = lambda block: None) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self._free = OrderedDict((b.block_id, b) for b in self.blocks)
        self._cached: dict[Hashable, Block] = {}
        self._on_owner = on_owner

    @property
    def num_free(self) -> int:
        return len(self._free)

    def new(self, count: int) -> list[Block]:
        """Blocks for a new owner; what they held is forgotten."""
        assert count <= self.num_free
        taken = [self._free.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            assert block.ref_cnt == 0
            self._on_owner(block)
            if block.key is not None:
                self._cached.pop(block.key, None)
                block.key = None
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                del self._free[block.block_id]
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        freed = []
        for block in blocks:
            assert block.ref_cnt > 0, f"block {block.block_id} was freed more often than taken"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                freed.append(block)
        for block in freed:
            self._free[block.block_id] = block
        for block in reversed(freed):
            if block.key is None:  # never a prefix hit: reused first
                self._free.move_to_end(block.block_id, last=False)

    # -- prefix cache ---------------------------------------------------------------------------------------

    def cache(self, block: Block, key: Hashable) -> None:
        """`block` now holds the content `key`, unless another block does already."""
        if block.key is None and key not in self._cached:
            block.key = key
            self._cached[key] = block

    def cached(self, key: Hashable) -> Block | None:
        return self._cached.get(key)
