"""A node's store without one: in this process and thread, on the KV cache that the worker half exported.

It copies real bytes, at the last moment that a test lets it (`hold_jobs`), so a block that was given away too early
ends up in a request's tokens. It is strict: what a real store may forgive is an AssertionError here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import cloudpickle

from raykv.kvcache.share import open_kv_caches
from raykv.store_messages import (
    HASH_NBYTES,
    Attached,
    JobDone,
    LoadJob,
    LookedUp,
    LookUp,
    Medium,
    RankAttach,
    SaveJob,
    Settle,
)
from raykv.types import JobId, LeaseId, Rank, RequestId, StoreLife


def split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + HASH_NBYTES] for i in range(0, len(hashes), HASH_NBYTES)]


class FakeStore:
    """The store of one engine, and both ends of its links."""

    store = "raykv-store-fake-00"

    def __init__(self) -> None:
        self.links: dict[Rank, FakeLink] = {}
        self.blocks: dict[tuple[Rank, int, bytes], dict[str, Any]] = {}
        self.pending: dict[JobId, dict[Rank, dict[tuple[Rank, int, bytes], Any]]] = {}
        self.leases: dict[LeaseId, list[bytes]] = {}
        self.medium: dict[int, Medium] = {}
        """By place in the prefix; host memory where nothing is said."""
        self.hold_answers = self.hold_jobs = False
        self.fail_loads: set[int] = set()
        self.fail_saves: set[int] = set()
        self.asked: list[LookUp] = []
        self.settled: list[Settle] = []
        self.saved: list[SaveJob] = []
        self.loaded: list[LoadJob] = []
        self.lives = itertools.count(1)
        self.life = StoreLife("life-0")
        self.away = False
        self.closed = 0
        self._waiting: list[LookUp] = []
        self._answers: list[LookedUp] = []
        self._numbers = itertools.count()

    # -- the scheduler half's link --------------------------------------------------------------------------

    def ask(self, look_up: LookUp) -> None:
        assert len(look_up.hashes) % HASH_NBYTES == 0 and look_up.hashes, "an empty question"
        assert look_up.request not in {one.request for one in self.asked}, "a question was asked twice"
        self.asked.append(look_up)
        self._waiting.append(look_up)

    def forget(self, request: RequestId) -> None:
        """Its answer is given back when it comes."""

    def wait_tried(self, timeout_s: float) -> bool:
        return True

    def take_answers(self) -> list[LookedUp]:
        if not self.hold_answers:
            self.answer()
        taken, self._answers = self._answers, []
        return taken

    def answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._answers += [self._look_up(one) for one in waiting]

    def _look_up(self, look_up: LookUp) -> LookedUp:
        hashes = split(look_up.hashes)
        held = next((n for n in range(len(hashes), 0, -1) if self._holds(hashes[:n])), 0)
        if self.away or not held:
            return LookedUp(self.life, look_up.request, 0)
        lease = LeaseId(next(self._numbers))
        self.leases[lease] = hashes[:held]
        media = tuple(self.medium.get(i, Medium.HOST) for i in range(held))
        peer = "b2b2b2b2b2b2" if Medium.PEER in media else ""
        return LookedUp(self.life, look_up.request, held, lease, media, peer=peer)

    def _holds(self, hashes: Sequence[bytes]) -> bool:
        return all(
            (rank, group, one) in self.blocks
            for rank, link in self.links.items()
            if link.attach.writes
            for group, layout in enumerate(link.attach.groups)
            for one in hashes[-layout.window_blocks :]  # 0: all of them
        )

    def settle(self, settle: Settle) -> None:
        self.settled.append(settle)
        for job in settle.commits:
            parts = self.pending.pop(job, None)
            if parts is None:
                continue  # of an earlier life
            writers = {rank for rank, link in self.links.items() if link.attach.writes}
            assert set(parts) == writers, f"job {job} was committed before all its ranks wrote"
            for part in parts.values():
                self.blocks.update(part)
        for job in settle.aborts:
            self.pending.pop(job, None)
        self.release(settle.releases)

    def release(self, leases: Iterable[LeaseId]) -> None:
        for lease in leases:
            self.leases.pop(lease, None)

    def close(self) -> None:
        self.closed += 1

    # -- what a test does to it -----------------------------------------------------------------------------

    def new_asker(self, options: Any, engine: Any) -> FakeStore:
        return self

    def new_link(self, options: Any, attach: RankAttach) -> FakeLink:
        return FakeLink(self, attach)

    def touching(self, blocks: Iterable[int]) -> list[str]:
        """The jobs that may still touch any of these blocks."""
        wanted = set(blocks)
        return [
            f"rank {rank}: {type(job).__name__} {job.job}"
            for rank, link in self.links.items()
            for job in link.queue
            if not wanted.isdisjoint(block for ids in job.block_ids for block in ids)
        ]

    def die(self, forget: bool = False, away: bool = False) -> None:
        """Its process ends: what was under way has failed, leases and uncommitted blocks are gone."""
        for link in self.links.values():
            link.lose()
        self.leases, self.pending = {}, {}
        self._answers += [LookedUp(self.life, one.request, 0) for one in self._waiting]
        self._waiting = []
        self.life = StoreLife(f"life-{next(self.lives)}")
        self.away = away
        if forget:
            self.blocks = {}

    def check_empty(self) -> None:
        """Nothing is owed to the store."""
        assert not self.pending, f"jobs were never settled: {list(self.pending)}"
        assert not self.leases, f"leases were never given back: {list(self.leases)}"
        assert not any(link.queue for link in self.links.values())


class FakeLink:
    """One rank's link. Jobs end when their ends are asked for."""

    def __init__(self, store: FakeStore, attach: RankAttach) -> None:
        self.store, self.attach, self.rank = store, attach, attach.rank
        self.queue: list[SaveJob | LoadJob] = []
        self._done: list[JobDone] = []
        self._mapped = open_kv_caches(cloudpickle.loads(attach.caches).caches)

    @property
    def life(self) -> StoreLife | None:
        return None if self.store.away else self.store.life

    def start(self, timeout_s: float) -> Attached:
        self.store.links[self.rank] = self
        return Attached(self.store.life, 1, 1, 4096)

    def save(self, jobs: Sequence[SaveJob]) -> None:
        for job in jobs:
            assert any(job.block_ids) and len(job.block_ids) == len(self.attach.groups)
            for hashes, ids in zip(job.hashes, job.block_ids, strict=True):
                assert len(hashes) == HASH_NBYTES * len(ids) and 0 not in ids
                assert len(set(ids)) == len(ids) == len(set(split(hashes))), "a block is saved twice in one job"
        if self.rank == 0:
            self.store.saved += jobs
        self._hand_over(jobs)

    def load(self, jobs: Sequence[LoadJob]) -> None:
        for job in jobs:
            assert [len(i) for i in job.indices] == [len(i) for i in job.block_ids]
            assert not any(0 in ids for ids in job.block_ids)
        if self.rank == 0:
            self.store.loaded += jobs
        self._hand_over(jobs)

    def _hand_over(self, jobs: Sequence[SaveJob | LoadJob]) -> None:
        if self.store.away:
            self._done += [self._failed(job) for job in jobs]
        else:
            self.queue += jobs

    def take_done(self) -> list[JobDone]:
        if not self.store.hold_jobs:
            queue, self.queue = self.queue, []
            self._done += [self._save(job) if isinstance(job, SaveJob) else self._load(job) for job in queue]
        done, self._done = self._done, []
        return done

    def _save(self, job: SaveJob) -> JobDone:
        if self.rank in self.store.fail_saves:
            return self._failed(job)
        part = {}
        for group, layout in enumerate(self.attach.groups):
            for one, block in zip(split(job.hashes[group]), job.block_ids[group], strict=True):
                rows = {layer: self._mapped.kv_caches[layer][block].clone() for layer in layout.layers}
                part[(self.rank, group, one)] = rows
        self.store.pending.setdefault(job.job, {})[self.rank] = part
        return JobDone(job.job, ok=True)

    def _load(self, job: LoadJob) -> JobDone:
        hashes = self.store.leases.get(job.lease)
        fails = self.rank in self.store.fail_loads
        for group, layout in enumerate(self.attach.groups):
            for index, block in zip(job.indices[group], job.block_ids[group], strict=True):
                if hashes is None or (layout.window_blocks and index < len(hashes) - layout.window_blocks):
                    return self._failed(job)
                rows = self.store.blocks[(self.rank, group, hashes[index])]
                for layer in layout.layers:
                    cache = self._mapped.kv_caches[layer]
                    assert not isinstance(cache, list)
                    cache[block].copy_(rows[layer]) if not fails else cache[block].fill_(-9)
        return self._failed(job) if fails else JobDone(job.job, ok=True)

    def _failed(self, job: SaveJob | LoadJob) -> JobDone:
        bad = tuple(block for ids in job.block_ids for block in ids)
        return JobDone(job.job, ok=False, bad_blocks=bad, error="told to fail")

    def lose(self) -> None:
        self._done += [self._failed(job) for job in self.queue]
        self.queue = []

    def close(self) -> None:
        self._mapped.close()
