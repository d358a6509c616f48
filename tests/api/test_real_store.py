"""The API against a real NodeStore, in this process: every operation that the store has, with its effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raykv.admin_messages import tenant_tag
from raykv.api import Cluster, NotFoundError, OperationError
from raykv.store_messages import Medium, SaveJob, Settle, StoreSpec, TierSpec
from raykv.types import EngineId, JobId
from tests.api.cases import TOKENS, desk
from tests.support.fake_operators import NODES, FakeWorld, hashes_of

pytestmark = pytest.mark.process

SLOT = 16384  # of KVRank's blocks
ACTOR = f"raykv-store-real-{NODES[0][:12]}"
ALICE = hashes_of(tuple(TOKENS), "alice")
PLAIN = hashes_of(tuple(TOKENS))


class Real:
    """A store with a host and a disk tier, and one rank of an engine that saves into it."""

    def __init__(self, folder: Path, world: FakeWorld) -> None:
        from raykv.actors.node_store import NodeStore
        from tests.support.kv_rank import KVRank

        tiers = (TierSpec(Medium.HOST, 16 * SLOT), TierSpec(Medium.DISK, 32 * SLOT, str(folder / "disk")))
        self.store = NodeStore(StoreSpec("real", tiers), "test", shm=folder)
        self.rank = KVRank(EngineId("engine-a"))
        self.store.attach(dataclasses.replace(self.rank.attach, model="tiny", facts="{}"))
        self.jobs = 0
        world.store_callers.clear()
        self.caller = world.add_store(_Named(self.store), NODES[0])
        of = desk(world)
        of.base = dataclasses.replace(of.base, store=ACTOR, fingerprints=(self.rank.attach.fingerprint.hex(),))
        world.desk_callers.pop("raykv-desk-engine-b")

    def save(self, hashes: list[bytes], tenant: str = "") -> None:
        self.jobs += 1
        tag = tenant_tag(tenant)
        job = SaveJob(JobId(self.jobs), (b"".join(hashes),), (tuple(range(len(hashes))),), (((tag, len(hashes)),),))
        attach = self.rank.attach
        _, (done,) = self.store.save(self.store.life, attach.engine, attach.rank, [job])
        assert done.ok, done.error
        self.store.settle(attach.engine, Settle(commits=(job.job,)))

    def close(self) -> None:
        self.store.check_integrity()
        self.store.shutdown(remove_host=True)
        self.rank.close()


class _Named:
    """A NodeStore under the name that the fake world wants."""

    def __init__(self, store: Any) -> None:
        self.name, self._store = "real", store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def real(tmp_path: Path) -> Iterator[tuple[Real, Cluster]]:
    world = FakeWorld()
    made = Real(tmp_path, world)
    try:
        yield made, Cluster(world, 10.0)
    finally:
        made.close()


def test_what_is_seen(real: tuple[Real, Cluster]) -> None:
    made, kv = real
    made.save(PLAIN)
    [store] = kv.stores
    assert (store.actor, store.at, store.problem) == (ACTOR, "real@a1a1a1a1a1a1", "")
    assert [(tier.medium, tier.used, tier.capacity) for tier in store.tiers] == [
        ("host", 3, 16 * SLOT),
        ("disk", 0, 32 * SLOT),
    ]
    [model] = store.models
    assert (model.model, model.blocks, model.engines) == ("tiny", 3, ("engine-a",))
    found = kv.lookup(TOKENS)
    assert found.held_tokens == 48 and found.blocks[0].places[0].media == ("host",)
    assert kv.lookup(TOKENS, cache_salt="alice").held_tokens == 0


def test_pins_and_clear(real: tuple[Real, Cluster]) -> None:
    made, kv = real
    made.save(PLAIN)
    made.save(ALICE, "alice")
    done = kv.pin(TOKENS, "10m", note="why")
    assert done.blocks == 3 and [(pin.number, pin.note) for pin in kv.pins()] == [(done.number, "why")]
    assert kv.lookup(TOKENS).blocks[0].places[0].pinned_until > 0
    with pytest.raises(NotFoundError, match="nothing is pinned"):
        kv.pin(TOKENS, "10m", cache_salt="bob")
    assert kv.clear(everything=True).blocks == 3  # what is pinned stays
    assert kv.lookup(TOKENS).held_tokens == 48 and kv.lookup(TOKENS, cache_salt="alice").held_tokens == 0
    assert kv.unpin(done.number).blocks == 3 and not kv.pins()
    made.save(ALICE, "alice")
    assert kv.clear(tenant="alice").blocks == 3
    assert kv.clear(prefix=TOKENS).blocks == 3
    made.save(PLAIN)
    assert kv.clear(model="tiny", tier="host").blocks == 3 and not kv.lookup(TOKENS).held_tokens


def test_quotas(real: tuple[Real, Cluster]) -> None:
    made, kv = real
    made.save(ALICE, "alice")
    assert [(quota.blocks, quota.quota) for quota in kv.quotas()] == [(3, None)]
    kv.set_quota("alice", SLOT)
    assert [(quota.blocks, quota.quota) for quota in kv.quotas()] == [(1, SLOT)]
    kv.set_quota("alice", None)
    with pytest.raises(OperationError, match="no quota"):
        kv.set_quota("", "1GiB")


def test_verify_and_prefetch(real: tuple[Real, Cluster]) -> None:
    made, kv = real
    made.save(PLAIN)
    heard: list[int] = []
    done = kv.verify(tell=lambda progress: heard.append(progress.done))
    assert done.ok and done.blocks == 3 and heard == sorted(heard)
    assert kv.verify(number=done.number).said == done.said and len(kv.operation(done.number)) == 1
    assert kv.prefetch(TOKENS, "host").ok
    with pytest.raises(NotFoundError, match=r'has no tier "fs"'):
        kv.prefetch(TOKENS, "fs")


def test_why_blocks_are_missing(real: tuple[Real, Cluster]) -> None:
    made, kv = real
    fingerprints = kv.engine().fingerprints
    hashes = b"".join(PLAIN)
    assert [absence.why for absence in made.store.why(fingerprints, hashes) if absence] == ["never stored"] * 3
    made.save(PLAIN)
    assert made.store.why(fingerprints, hashes) == (None, None, None)
    kv.clear(prefix=TOKENS)
    assert [absence.why for absence in made.store.why(fingerprints, hashes) if absence] == ["cleared"] * 3


def test_tiers_live(real: tuple[Real, Cluster], tmp_path: Path) -> None:
    made, kv = real
    made.save(PLAIN)
    assert kv.resize_tier("disk", 64 * SLOT).ok
    assert kv.store("real").tier("disk").capacity == 64 * SLOT  # type: ignore[union-attr]
    assert kv.drain_tier("disk").ok
    assert kv.remove_tier("disk").ok and kv.store("real").tier("disk") is None
    assert kv.add_tier("disk", 8 * SLOT, path=str(tmp_path / "again")).ok
    assert [tier.medium for tier in kv.store("real").tiers] == ["host", "disk"]
    with pytest.raises(OperationError, match="already"):
        kv.add_tier("disk", 8 * SLOT, path=str(tmp_path / "again"))
    assert kv.lookup(TOKENS).held_tokens == 48
