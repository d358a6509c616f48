"""The copy jobs of one engine that are under way on some rank, and the pins of those that save.

The theory. A save reads its blocks in the store's process, after the step that planned it. Each of its blocks
carries one reference of RayKV's from that step until **every** rank has reported the job's end, whatever became of
the request meanwhile. A load needs none: vLLM keeps the blocks of a request that waits for a load, also of one that
was aborted, until it has heard of the load's end from every rank.

This class decides only; its caller touches and frees the blocks. One thread: the scheduler's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from raykv.core.pins import Block
from raykv.errors import IntegrityError
from raykv.store_messages import JobDone
from raykv.types import JobId, Rank


@dataclass(frozen=True, slots=True)
class Ended:
    """A job has ended on all ranks. `ok`: well, on each of them. `unpin`: blocks to free, in this order."""

    job: JobId
    ok: bool
    reports: tuple[JobDone, ...]
    unpin: tuple[Block, ...]


@dataclass(slots=True, eq=False)
class _Open:
    waiting: set[Rank]
    blocks: tuple[Block, ...]
    reports: list[JobDone] = field(default_factory=list)


class TierJobs:
    """Numbers jobs, and knows what each waits for. Falsy while nothing is under way."""

    def __init__(self, num_ranks: int) -> None:
        self._ranks = [Rank(rank) for rank in range(num_ranks)]
        self._open: dict[JobId, _Open] = {}
        self._pins: Counter[int] = Counter()
        self._next = 0

    def begin(self, blocks: Sequence[Block] = ()) -> JobId:
        """A new job of all ranks. `blocks` are pinned: the caller has touched each once for it, or does so now."""
        job = JobId(self._next)
        self._next += 1
        self._open[job] = _Open(set(self._ranks), tuple(blocks))
        self._pins.update(block.block_id for block in blocks)
        return job

    def report(self, rank: Rank, done: JobDone) -> Ended | None:
        """A rank's part has ended; None while other ranks' have not. A repeated or unknown report is nothing."""
        found = self._open.get(done.job)
        if found is None or rank not in found.waiting:
            return None
        found.waiting.discard(rank)
        found.reports.append(done)
        if found.waiting:
            return None
        del self._open[done.job]
        for block in found.blocks:
            self._pins[block.block_id] -= 1
            if not self._pins[block.block_id]:
                del self._pins[block.block_id]
        well = all(one.ok for one in found.reports)
        # The pool reuses what is freed first first: a prefix is worth more than what follows it.
        return Ended(done.job, well, tuple(found.reports), tuple(reversed(found.blocks)))

    def frees_soon(self) -> bool:
        """Whether the end of a job frees a block: a pin is its last reference."""
        return any(
            block.ref_cnt == self._pins[block.block_id] for found in self._open.values() for block in found.blocks
        )

    def pinned(self) -> Counter[int]:
        """By block id: how many references are RayKV's."""
        return Counter(self._pins)

    def __len__(self) -> int:
        return len(self._open)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the pins are those of the jobs, and each job waits for somebody."""
        found = Counter(block.block_id for one in self._open.values() for block in one.blocks)
        if found != self._pins:
            raise IntegrityError(f"pin counts {dict(self._pins)} differ from the jobs' {dict(found)}")
        for job, one in self._open.items():
            if not one.waiting:
                raise IntegrityError(f"job {job} waits for no rank and has not ended")
