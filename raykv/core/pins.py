"""Pins: RayKV's own references on the blocks of vLLM's pool.

The theory. A hosted child reads a request's blocks in another process, after the step that planned the read.
vLLM may take a block from its request at any moment: at its end, by preemption, behind a sliding window. So
every block of a request that a child may still read carries one reference of RayKV's, taken in the step that
first hands the block to the children and given back when

  1. the request no longer holds the block (it ended, was preempted, or its window moved on), and
  2. every host has completed the last step that was planned while the request held it, on every rank, and
  3. every child that owes a send for the request has settled it, on every rank.

A *pin set* is the blocks of one request. It is *open* while the request holds them and *closing* afterwards.
This class decides only: each call returns the blocks to touch or to free, and the caller does so at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from raykv.errors import IntegrityError
from raykv.messages import ChildIndex
from raykv.types import RequestId, StepId


class Block(Protocol, Hashable):
    """What a pin needs to know of a block of vLLM's pool."""

    block_id: int
    ref_cnt: int


Fence = Mapping[ChildIndex, StepId]
"""By child: the last step planned for it. A fence is passed when each child has completed its step."""


@dataclass(slots=True, eq=False)
class _Closing:
    blocks: list[Block]
    fence: dict[ChildIndex, StepId]
    sends: set[ChildIndex] = field(default_factory=set)


class PinTable:
    """The pins of one engine. One thread: the scheduler's."""

    def __init__(self) -> None:
        self._open: dict[RequestId, dict[int, deque[Block]]] = {}
        self._closing: dict[RequestId, list[_Closing]] = {}
        self._count: Counter[int] = Counter()

    # -- taking ---------------------------------------------------------------------------------------------

    def grow(self, request: RequestId, group: int, blocks: Sequence[Block]) -> Sequence[Block]:
        """The request was given these blocks: touch what is returned, in the step that plans their use."""
        if not blocks:
            return ()
        self._open.setdefault(request, {}).setdefault(group, deque()).extend(blocks)
        self._count.update(b.block_id for b in blocks)
        return blocks

    def is_open(self, request: RequestId) -> bool:
        return request in self._open

    def open_but(self, others: Mapping[str, object]) -> list[RequestId]:
        """The requests that are open and not among these."""
        return list(self._open.keys() - others.keys())

    # -- giving back ----------------------------------------------------------------------------------------

    def trim(self, request: RequestId, group: int, fence: Fence) -> None:
        """Close the leading blocks that only pins still hold: the request's window has moved on."""
        held = self._open.get(request, {}).get(group)
        dropped: list[Block] = []
        while held and held[0].ref_cnt == self._count[held[0].block_id]:
            dropped.append(held.popleft())
        if dropped:
            self._closing.setdefault(request, []).append(_Closing(dropped, dict(fence)))

    def close(self, request: RequestId, fence: Fence, sends: Iterable[ChildIndex] = ()) -> None:
        """The request no longer holds its blocks; free them once `fence` is passed and `sends` are settled."""
        groups = self._open.pop(request, None)
        if groups is None:
            return
        blocks = [b for held in groups.values() for b in held]
        self._closing.setdefault(request, []).append(_Closing(blocks, dict(fence), set(sends)))

    def send_settled(self, request: RequestId, child: ChildIndex) -> None:
        """`child` no longer reads the blocks of the ended request, on any rank. Unknown requests are fine."""
        for closing in self._closing.get(request, ()):
            if child in closing.sends:
                closing.sends.discard(child)
                return

    def release(self, completed: Fence) -> list[Block]:
        """The blocks whose pins end now, in the order in which the pool should reuse them (tail first)."""
        freed: list[Block] = []
        for request in list(self._closing):
            still = []
            for closing in self._closing[request]:
                for child in [c for c, step in closing.fence.items() if completed.get(c, -1) >= step]:
                    del closing.fence[child]
                if closing.fence or closing.sends:
                    still.append(closing)
                else:
                    freed.extend(reversed(closing.blocks))
            if still:
                self._closing[request] = still
            else:
                del self._closing[request]
        self._count.subtract(b.block_id for b in freed)
        for block in freed:
            if self._count[block.block_id] <= 0:
                del self._count[block.block_id]
        return freed

    # -- questions ------------------------------------------------------------------------------------------

    @property
    def closing(self) -> int:
        """Pin sets that wait for a host or a send: while there are any, the engine must keep stepping."""
        return sum(len(sets) for sets in self._closing.values())

    @property
    def any_closing(self) -> bool:
        return bool(self._closing)

    def frees_soon(self) -> bool:
        """Whether a block's last reference is a pin that waits for hosts only.

        An open send (P/D) can last as long as its peer likes, so it is no reason for vLLM not to preempt.
        """
        return any(
            block.ref_cnt == self._count[block.block_id]
            for sets in self._closing.values()
            for closing in sets
            if not closing.sends
            for block in closing.blocks
        )

    def waits_for(self, child: ChildIndex) -> bool:
        """Whether blocks are kept for this child: for a step of its hosts, or for a send."""
        return any(
            child in closing.fence or child in closing.sends for sets in self._closing.values() for closing in sets
        )

    def pinned(self) -> Counter[int]:
        """By block id: how many references are RayKV's."""
        return Counter(self._count)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the counts are those of the sets."""
        found: Counter[int] = Counter()
        for groups in self._open.values():
            for held in groups.values():
                found.update(b.block_id for b in held)
        for sets in self._closing.values():
            for closing in sets:
                found.update(b.block_id for b in closing.blocks)
                if not closing.fence and not closing.sends and not closing.blocks:
                    raise IntegrityError("a closing pin set waits for nothing and holds nothing")
        if found != self._count:
            raise IntegrityError(f"pin counts {dict(self._count)} differ from the sets {dict(found)}")
