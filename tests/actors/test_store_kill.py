"""kill -9 of a store's process at any point: what it serves afterwards is what was committed, byte for byte."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raykv.actors import store_worker_link
from raykv.actors.store_link import StoreWorkerLink
from raykv.errors import HostError
from raykv.store_messages import Cascade, JobDone, Medium, Settle, StoreSpec, StoreStatus, TierSpec
from raykv.types import JobId
from tests.support.forked_store import ForkedStore
from tests.support.kv_rank import E, KVRank, load_job, look_up, save_job

pytestmark = pytest.mark.process

SLOT = 16384
PATIENCE = 60.0
KILLS = 6
SOURCE, SCRATCH = range(16), range(16, 24)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_worker_link, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(store_worker_link, "IDLE_CHECK_S", 0.02)


class Engine:
    """One rank and the jobs it has handed over."""

    def __init__(self, store: ForkedStore) -> None:
        self.store, self.rank = store, KVRank()
        self.expected = self.rank.blocks(SOURCE)
        self.link = StoreWorkerLink(store, self.rank.attach, PATIENCE, PATIENCE)
        self.link.start(PATIENCE)
        self.done: dict[JobId, JobDone] = {}
        self.jobs = 0
        self.killed = self.link.pid  # or will be: the life that the test looks back from

    def save(self, prompt: int) -> JobId:
        """4 blocks of a prompt, whose bytes follow from its number."""
        self.jobs += 1
        self.link.save([save_job(self.jobs, f"p{prompt}", self.blocks_of(prompt))])
        return JobId(self.jobs)

    @staticmethod
    def blocks_of(prompt: int) -> range:
        return range(prompt % 4 * 4, prompt % 4 * 4 + 4)

    def wait(self, job: JobId) -> JobDone:
        self.until(lambda: self.take() or job in self.done)
        return self.done[job]

    def take(self) -> None:
        self.done.update({one.job: one for one in self.link.take_done()})

    def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def check(self, prompt: int, whole: bool = True) -> int:
        """Load what the store holds of a prompt into scratch blocks; how many blocks it was. Never wrong bytes.

        `whole`: nobody kills the store meanwhile, so what was published must be there.
        """
        found = self.store.call("look_up", E, look_up(f"p{prompt}", 4, f"r{prompt}"), timeout=PATIENCE)
        if not found.num_blocks:
            return 0
        self.jobs += 1
        blocks = list(SCRATCH)[: found.num_blocks]
        self.rank.wipe(blocks)
        self.link.load([load_job(self.jobs, found.lease, blocks)])
        done = self.wait(JobId(self.jobs))
        assert found.lease is not None
        self.store.call("settle", E, Settle(releases=(found.lease,)), timeout=PATIENCE)
        source = self.blocks_of(prompt)
        for index, block in enumerate(blocks):
            if block not in done.bad_blocks:
                assert self.rank.block(block) == self.expected[source[index]]
        assert done.ok or not whole
        return found.num_blocks

    def status_after_death(self) -> StoreStatus:
        """Of the life that the link has come back to."""
        self.until(lambda: self.take() or self.link.pid not in (None, self.killed))
        self.killed = self.link.pid
        return self.status()

    def status(self) -> StoreStatus:
        return self.store.call("status", timeout=PATIENCE)

    def close(self) -> None:
        self.link.close(timeout=5)
        self.rank.close()


@pytest.fixture(params=[Cascade.WRITE, Cascade.EVICT])
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    tiers = (TierSpec(Medium.HOST, 16 * SLOT), TierSpec(Medium.DISK, 64 * SLOT, str(tmp_path / "disk")))
    store = ForkedStore(StoreSpec("test", tiers, cascade=request.param), tmp_path)
    engine = Engine(store)
    yield engine
    engine.close()
    store.close()


def test_kills_at_any_point_of_saves_moves_and_loads(engine: Engine) -> None:
    random_ = random.Random(7)
    committed: set[int] = set()
    served = 0
    for kill in range(KILLS):
        prompts = range(kill * 6, kill * 6 + 6)
        stop = threading.Timer(random_.uniform(0.0, 0.06), engine.store.kill)
        stop.start()
        for prompt in prompts:
            job = engine.save(prompt)
            if not engine.wait(job).ok:
                continue
            with contextlib.suppress(HostError):
                engine.store.call("settle", E, Settle(commits=(job,)), timeout=PATIENCE)
                committed.add(prompt)
                engine.check(random_.choice(sorted(committed)), whole=False)
        stop.join()
        life = engine.status_after_death()
        assert life.engines == (E,)
        for tier in life.tiers:
            assert tier.writing == 0 and tier.quarantined == 0 and tier.bad_reads == 0
        engine.store.call("check_integrity", timeout=PATIENCE)
        served += sum(engine.check(prompt) for prompt in range(kill * 6 + 6))
    assert served, "something outlived its store"


def test_every_slot_is_usable_after_a_kill(engine: Engine) -> None:
    for prompt in range(3):
        engine.save(prompt)  # never committed
    engine.store.kill()
    status = engine.status_after_death()
    assert [(tier.used, tier.writing) for tier in status.tiers] == [(0, 0), (0, 0)]
    for prompt in range(4):
        job = engine.save(prompt)
        assert engine.wait(job).skipped == 0
        engine.store.call("settle", E, Settle(commits=(job,)), timeout=PATIENCE)
    assert engine.status().tiers[0].used + engine.status().tiers[1].used >= 16
