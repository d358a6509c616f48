"""Blocks from another node's store, with real bytes over real NIXL: right bytes or none, whatever the peer does."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raykv.actors import peer_reach
from raykv.actors.node_store import NodeStore
from raykv.admin_messages import Selection, tenant_tag
from raykv.peer_messages import Lend, Lent
from raykv.storage import nixl_transport
from raykv.storage.nixl_transport import TransferState
from raykv.store_messages import (
    HandOver,
    JobDone,
    LoadJob,
    LookedUp,
    LookUp,
    Medium,
    PeerStatus,
    Settle,
    StoreSpec,
    TierSpec,
)
from raykv.types import EngineId, JobId, LeaseId, StoreLife
from tests.support.kv_rank import E, KVRank, load_job, look_up, save_job
from tests.support.peer_stores import Nodes, find
from tests.support.waiting import eventually

pytestmark = pytest.mark.process

SLOT = 16384  # of KVRank's blocks: 2 layers x 4 heads x 8 tokens x 64 floats
FAR = EngineId("far")
PATIENCE = 30.0


class Harness:
    """Node "a" has what engine FAR saved; engine E asks at node "b"."""

    def __init__(self, folder: Path) -> None:
        self.nodes = Nodes(folder)
        self.stores: list[NodeStore] = []
        self.ranks: list[KVRank] = []
        self.jobs = 0

    def spec(self, host: int = 32, disk: int = 0, folder: str = "disk", **options: Any) -> StoreSpec:
        tiers = [TierSpec(Medium.HOST, host * SLOT)] if host else []
        if disk:
            tiers.append(TierSpec(Medium.DISK, disk * SLOT, str(self.nodes.folder / folder)))
        return StoreSpec("test", tuple(tiers), **options)

    def store(self, name: str, spec: StoreSpec | None = None) -> NodeStore:
        self.stores.append(self.nodes.add(name, spec or self.spec()))
        return self.stores[-1]

    def rank(self, store: NodeStore, engine: EngineId, rank: int = 0, num_ranks: int = 1, **options: Any) -> KVRank:
        self.ranks.append(KVRank(engine, rank, num_ranks, **options))
        store.attach(self.ranks[-1].attach)
        return self.ranks[-1]

    def put(self, store: NodeStore, rank: KVRank, prompt: str, *block_ids: Any) -> JobDone:
        self.jobs += 1
        attach, job = rank.attach, save_job(self.jobs, prompt, *block_ids)
        _, (done,) = store.save(store.life, attach.engine, attach.rank, [job])
        if attach.rank == attach.num_ranks - 1:
            store.settle(attach.engine, Settle(commits=(job.job,)))
        else:
            self.jobs -= 1
        return done

    def get(self, store: NodeStore, rank: KVRank, found: LookedUp, *block_ids: Any) -> JobDone:
        return self.run(store, rank, load_job(0, found.lease, *block_ids))

    def run(self, store: NodeStore, rank: KVRank, job: LoadJob) -> JobDone:
        self.jobs += 1
        attach = rank.attach
        job = dataclasses.replace(job, job=JobId(self.jobs))
        _, (done,) = store.load(store.life, attach.engine, attach.rank, [job])
        return done

    def close(self) -> None:
        for store in self.stores:
            store.check_integrity()
            store.shutdown(remove_host=True)
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def h(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    harness.close()


def release(store: NodeStore, found: LookedUp) -> None:
    store.settle(E, Settle(releases=(found.lease or LeaseId(0),)))


def test_what_was_read_elsewhere_is_its_askers(h: Harness) -> None:
    """The tenant of who asked has it here; beyond his quota it is loaded and not kept."""
    a, b = h.store("a"), h.store("b")
    far, near = h.rank(a, FAR), h.rank(b, E)
    before = {prompt: far.blocks(ids) for prompt, ids in (("p", [3, 1, 4, 5]), ("q", [6, 7, 8]))}
    h.put(a, far, "p", [3, 1, 4, 5])
    h.put(a, far, "q", [6, 7, 8])
    tag = tenant_tag("alice")
    b.set_quota(tag.hex(), 5 * SLOT)
    for prompt, ids in (("p", [9, 8, 7, 6]), ("q", [3, 2, 1])):
        found = find(b, E, dataclasses.replace(look_up(prompt, 9), tenant=tag))
        assert found.media == (Medium.PEER,) * len(ids) and found.peer == "node of a"
        near.wipe(range(24))
        assert h.get(b, near, found, ids).ok and near.blocks(ids) == before[prompt]
        release(b, found)
    [mine] = [one for one in b.view().tenants if one.tag == tag.hex()]
    assert mine.blocks == 5 and b.status().tiers[0].used == 5
    assert b.forget(Selection(tenant=tag.hex())).blocks == 5


def test_what_one_node_saved_another_loads_byte_for_byte(h: Harness) -> None:
    a, b = h.store("a"), h.store("b")
    far, near = h.rank(a, FAR), h.rank(b, E)
    before = far.blocks([3, 1, 4, 5])
    h.put(a, far, "p", [3, 1, 4, 5])
    near.wipe(range(24))
    found = find(b, E, look_up("p", 9))
    assert (found.num_blocks, found.media) == (4, (Medium.PEER,) * 4)
    assert a.status().leases == 1
    assert a.status().peer == PeerStatus(lent_blocks=4, lent_now=4, read_blocks=0, bad_blocks=0)
    done = h.get(b, near, found, [20, 2, 9, 11])
    assert (done.ok, done.error, done.bad_blocks, done.media) == (True, "", (), {Medium.PEER: 4})
    assert near.blocks([20, 2, 9, 11]) == before
    release(b, found)
    eventually(lambda: a.status().leases == 0)
    assert b.status().leases == 0
    assert a.status().peer == PeerStatus(lent_blocks=4, lent_now=0, read_blocks=0, bad_blocks=0)
    assert b.status().peer == PeerStatus(lent_blocks=0, lent_now=0, read_blocks=4, bad_blocks=0)
    # It was read into slots of its own, so the next one finds it here.
    near.wipe(range(24))
    found = find(b, E, look_up("p", 4))
    assert found.media == (Medium.HOST,) * 4
    assert h.get(b, near, found, [0, 1, 2, 3]).media == {Medium.HOST: 4}
    assert near.blocks([0, 1, 2, 3]) == before


def test_what_is_here_is_read_here_and_the_rest_there(h: Harness) -> None:
    a, b = h.store("a"), h.store("b")
    far, near = h.rank(a, FAR), h.rank(b, E)
    here, there = near.blocks([0, 1]), far.blocks(range(6))
    h.put(a, far, "p", list(range(6)))
    h.put(b, near, "p", [0, 1])
    found = find(b, E, look_up("p", 7))
    assert found.media == (Medium.HOST,) * 2 + (Medium.PEER,) * 4
    (lend,) = [args[0] for name, args in h.nodes.callers["a"].calls if name == "lend"]
    assert lend.first == 2
    done = h.get(b, near, found, [10, 11, 12, 13, 14, 15])
    assert (done.ok, done.media) == (True, {Medium.HOST: 2, Medium.PEER: 4})
    assert near.blocks(range(10, 16)) == here + there[2:]
    release(b, found)
    assert b.status().leases == 0


def test_part_of_a_leased_prefix_may_be_loaded(h: Harness) -> None:
    a, b = h.store("a"), h.store("b")
    far, near = h.rank(a, FAR), h.rank(b, E)
    before = far.blocks(range(6))
    h.put(a, far, "p", list(range(6)))
    found = find(b, E, look_up("p", 6))
    job = LoadJob(JobId(0), found.lease or LeaseId(0), ((3, 5),), ((20, 21),))
    assert h.run(b, near, job).ok
    assert near.blocks([20, 21]) == [before[3], before[5]]
    done = h.run(b, near, dataclasses.replace(job, indices=((5, 6),)))
    assert not done.ok and set(done.bad_blocks) == {20, 21}


def test_a_window_comes_from_the_peer_as_a_whole(h: Harness) -> None:
    a, b = h.store("a"), h.store("b")
    far, near = h.rank(a, FAR, windows=(0, 2)), h.rank(b, E, windows=(0, 2))
    full, window = far.blocks(range(5)), far.blocks([3, 4], 1)
    h.put(a, far, "p", list(range(5)), list(range(5)))
    h.put(b, near, "p", [0, 1, 2, 3], [0, 1, 2, 3])
    mine = near.blocks(range(4))
    found = find(b, E, look_up("p", 5))
    assert found.media == (Medium.HOST,) * 4 + (Medium.PEER,)
    job = LoadJob(JobId(0), found.lease or LeaseId(0), ((0, 1, 2, 3, 4), (3, 4)), ((8, 9, 10, 11, 12), (13, 14)))
    done = h.run(b, near, job)
    assert (done.ok, done.media) == (True, {Medium.HOST: 4, Medium.PEER: 3})
    assert near.blocks(range(8, 13)) == mine + full[4:]
    assert near.blocks([13, 14], 1) == window


def test_two_ranks_share_a_lease(h: Harness) -> None:
    a, b = h.store("a"), h.store("b")
    far = [h.rank(a, FAR, rank, 2) for rank in (0, 1)]
    near = [h.rank(b, E, rank, 2) for rank in (0, 1)]
    before = [one.blocks([0, 1, 2]) for one in far]
    for one in far:
        h.put(a, one, "p", [0, 1, 2])
    found = find(b, E, look_up("p", 3))
    assert found.num_blocks == 3
    for one, expected in zip(near, before, strict=True):
        assert h.get(b, one, found, [7, 8, 9]).media == {Medium.PEER: 3}
        assert one.blocks([7, 8, 9]) == expected


def test_without_room_it_goes_through_staging(h: Harness) -> None:
    a, b = h.store("a"), h.store("b", h.spec(4))
    far, near = h.rank(a, FAR), h.rank(b, E)
    before = far.blocks(range(6))
    h.put(a, far, "p", list(range(6)))
    h.put(b, near, "own", [0, 1, 2, 3])
    found = find(b, E, look_up("p", 6))
    assert h.get(b, near, found, list(range(10, 16))).media == {Medium.PEER: 6}
    assert near.blocks(range(10, 16)) == before
    assert b.look_up(E, look_up("own", 4)).num_blocks == 4, "nothing of its own was lost for it"


def test_a_disk_slot_is_not_lent(h: Harness) -> None:
    a, b = h.store("a", h.spec(0, 16)), h.store("b")
    far = h.rank(a, FAR)
    h.rank(b, E)
    h.put(a, far, "p", [0, 1])
    assert a.look_up(FAR, look_up("p", 2)).media == (Medium.DISK,) * 2
    assert find(b, E, look_up("p", 2)).num_blocks == 0


def test_no_more_than_half_of_a_host_tier_is_lent(h: Harness) -> None:
    a, b = h.store("a", h.spec(8)), h.store("b")
    far = h.rank(a, FAR)
    h.rank(b, E)
    h.put(a, far, "p", [0, 1, 2])
    h.put(a, far, "q", [3, 4])
    one = find(b, E, look_up("p", 3, "one"))
    assert one.num_blocks == 3
    assert find(b, E, look_up("q", 2, "two")).num_blocks == 0
    release(b, one)
    eventually(lambda: a.status().leases == 0)
    assert find(b, E, look_up("q", 2, "two")).num_blocks == 2


def test_a_released_lease_goes_back_at_once(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raykv.actors.peer_tier.LOOK_S", 1000.0)
    a, b, _, found = a_hit(h)
    release(b, found)
    eventually(lambda: a.status().leases == 0)


def test_the_leases_of_an_engine_that_leaves_go_back(h: Harness) -> None:
    a, b, near, _ = a_hit(h)
    b.detach(E, near.attach.rank)
    eventually(lambda: a.status().leases == 0)


def test_without_checksums_nothing_is_lent(h: Harness) -> None:
    a, b = h.store("a", h.spec(checksum=False)), h.store("b")
    far = h.rank(a, FAR)
    h.rank(b, E)
    h.put(a, far, "p", [0, 1])
    assert find(b, E, look_up("p", 2)).num_blocks == 0


# -- peers that die, hang or lie ----------------------------------------------------------------------------


def a_hit(h: Harness, blocks: int = 4) -> tuple[NodeStore, NodeStore, KVRank, LookedUp]:
    a, b = h.store("a"), h.store("b")
    far, near = h.rank(a, FAR), h.rank(b, E)
    h.put(a, far, "p", list(range(blocks)))
    near.wipe(range(24))
    found = find(b, E, look_up("p", blocks))
    assert found.num_blocks == blocks
    return a, b, near, found


def refused(h: Harness, b: NodeStore, near: KVRank, found: LookedUp) -> str:
    """The load fails, leaves nothing bad in the store and touches no block that it was not given."""
    untouched = near.blocks(range(14, 24))
    ids = list(range(10, 10 + found.num_blocks))
    done = h.get(b, near, found, ids)
    assert not done.ok and set(done.bad_blocks) <= set(ids)
    assert near.blocks(range(14, 24)) == untouched
    good = len(ids) - len(done.bad_blocks)
    eventually(lambda: (b.status().tiers[0].used, b.status().tiers[0].writing) == (good, 0))
    b.check_integrity()
    return done.error


def host_slots(store: NodeStore) -> Any:
    assert store._stock is not None
    rows = store._stock.tiers.rows(0)
    assert rows is not None
    return rows


def lies(h: Harness, change: dict[str, Any]) -> None:
    """What node "a" lends from now on is changed on its way."""
    h.nodes.callers["a"].change = lambda result: (
        dataclasses.replace(result, **change) if isinstance(result, Lent) and result.num_blocks else result
    )


def test_a_flipped_byte_is_never_loaded(h: Harness) -> None:
    a, b, near, found = a_hit(h)
    host_slots(a)[:, 77] += 1
    assert "other bytes" in refused(h, b, near, found)
    assert near.blocks([10]) == [bytes(SLOT)]
    assert find(b, E, look_up("p", 4, "next")).num_blocks == 0, "it is left alone for a while"


def test_one_flipped_block_is_not_copied_with_its_neighbours(h: Harness) -> None:
    a, b, near, found = a_hit(h)
    assert b._stock is not None and found.lease is not None
    part = b._stock.parts.get(b._stock.lease_in(found.lease))
    assert part is not None
    host_slots(a)[part.slots[2], 5] += 1
    done = h.get(b, near, found, [10, 11, 12, 13])
    assert not done.ok and 12 in done.bad_blocks and "other bytes" in done.error
    assert near.blocks([12]) == [bytes(SLOT)]
    status = b.status().peer
    assert status is not None and status.bad_blocks == 1
    eventually(lambda: b.status().tiers[0].writing == 0)
    assert b.status().tiers[0].used == 4 - len(done.bad_blocks)


def test_it_reads_by_an_agent_without_a_thread_and_lends_by_another(
    h: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, near, found = a_hit(h)
    readers, read = [], nixl_transport.NixlTransport.read

    def noted(transport: nixl_transport.NixlTransport, *args: Any) -> nixl_transport.Transfer:
        readers.append(transport)
        return read(transport, *args)

    monkeypatch.setattr(nixl_transport.NixlTransport, "read", noted)
    assert h.get(b, near, found, [10, 11, 12, 13]).ok
    (lent,) = [a.lend(args[0]) for method, args in h.nodes.callers["a"].calls if method == "lend"]
    assert [one.progress for one in readers] == [False]
    assert lent.memory is not None and a._works is not None and a._works.peers is not None
    assert lent.memory.metadata == a._works.peers._lending.metadata and a._works.peers._lending.progress


def test_memory_that_one_agent_refuses_is_the_others_neither(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    a = h.store("a")
    h.rank(a, FAR)
    assert a._works is not None and a._works.peers is not None
    tier, register = a._works.peers, nixl_transport.NixlTransport.register
    before = tier._lending.metadata

    def refuses(transport: nixl_transport.NixlTransport, regions: Any) -> None:
        if not transport.progress:
            raise nixl_transport.TransportError("no more memory")
        register(transport, regions)

    monkeypatch.setattr(nixl_transport.NixlTransport, "register", refuses)
    more = torch.zeros(8192, dtype=torch.uint8)
    with pytest.raises(nixl_transport.TransportError, match="no more"):
        tier.host_grew(0, [(more.data_ptr(), more.nbytes)])
    assert len(tier._lending.metadata) == len(before), "it names no more memory than before"


@pytest.mark.parametrize("name", ["slots", "seals"])
def test_a_block_in_anothers_place_is_never_loaded(h: Harness, name: str) -> None:
    a, b, near, _ = a_hit(h, 2)
    (lent,) = [a.lend(args[0]) for method, args in h.nodes.callers["a"].calls if method == "lend"]
    value: bytes = getattr(lent, name)
    lies(h, {name: value[len(value) // 2 :] + value[: len(value) // 2]})
    assert "other bytes" in refused(h, b, near, find(b, E, look_up("p", 2, "next")))


@pytest.mark.parametrize(
    "change",
    [
        {"slots": b""},
        {"seals": b"12345678"},
        {"slots": b"\xff" * 16},
        {"num_blocks": 5},
        {"num_blocks": 3},
        {"num_blocks": -1},
        {"memory": None},
    ],
)
def test_an_answer_that_makes_no_sense_is_a_miss(h: Harness, change: dict[str, Any]) -> None:
    a, b = h.store("a"), h.store("b")
    far = h.rank(a, FAR)
    h.rank(b, E)
    h.put(a, far, "p", [0, 1, 2, 3])
    lies(h, change)
    assert find(b, E, look_up("p", 4)).num_blocks == 0
    assert b.status().leases == 0
    eventually(lambda: a.status().leases == 0)


def test_a_lease_that_is_over_is_not_used(h: Harness) -> None:
    a, b = h.store("a"), h.store("b")
    far, near = h.rank(a, FAR), h.rank(b, E)
    h.put(a, far, "p", [0, 1])
    lies(h, {"duration_s": 0.0})
    assert "over" in refused(h, b, near, find(b, E, look_up("p", 2)))


def test_a_lease_ends_by_itself_at_the_lender(h: Harness) -> None:
    a, b = h.store("a"), h.store("b", h.spec(lease_s=0.2))
    far = h.rank(a, FAR)
    h.rank(b, E)
    h.put(a, far, "p", [0, 1])
    assert find(b, E, look_up("p", 2)).num_blocks == 2
    h.nodes.callers["a"].dead = True  # so nothing can be given back
    eventually(lambda: a.status().leases == 0)
    a.check_integrity()


def test_a_dead_peer_is_a_failed_load(h: Harness) -> None:
    a, b, near, found = a_hit(h)
    h.nodes.callers["a"].dead = True
    a.shutdown(remove_host=True)
    assert "failed" in refused(h, b, near, found)


def test_the_next_life_of_a_peer_is_another_one(h: Harness) -> None:
    a, b, near, found = a_hit(h)
    release(b, found)
    a.shutdown(remove_host=False)
    again = h.store("a")
    h.rank(again, EngineId("far again"))
    assert again.life != a.life
    before = sorted(bytes(row) for row in host_slots(again)[:4].numpy())
    found = find(b, E, look_up("p", 4, "next"))
    assert h.get(b, near, found, [4, 5, 6, 7]).media == {Medium.PEER: 4}
    assert sorted(near.blocks([4, 5, 6, 7])) == before


def test_a_peer_that_hangs_costs_a_look_up_its_limit_and_gets_its_lease_back(h: Harness) -> None:
    a, b = h.store("a"), h.store("b")
    far, near = h.rank(a, FAR), h.rank(b, E)
    h.put(a, far, "p", [0, 1, 2])
    h.put(b, near, "p", [0])
    caller = h.nodes.callers["a"]
    caller.hung = threading.Event()
    found = find(b, E, look_up("p", 3), limit_s=0.3)
    assert (found.num_blocks, found.media) == (1, (Medium.HOST,))
    assert h.get(b, near, found, [5]).ok, "what is here is still leased"
    caller.hung.set()
    eventually(lambda: caller.count("give_back") == 1 and a.status().leases == 0)
    assert caller.count("lend") == 1


def hold(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Every transfer looks as if it ran until the event is set: what a peer does that stands still."""
    released, poll = threading.Event(), nixl_transport.Transfer.poll

    def held(transfer: nixl_transport.Transfer) -> TransferState:
        return poll(transfer) if released.is_set() else TransferState.RUNNING

    monkeypatch.setattr(nixl_transport.Transfer, "poll", held)
    monkeypatch.setattr("raykv.actors.peer_loads.PATIENCE_S", 0.2)
    return released


def test_a_read_that_does_not_end_keeps_its_memory(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    _, b, near, found = a_hit(h)
    released = hold(monkeypatch)
    done = h.get(b, near, found, [10, 11, 12, 13])
    assert (done.ok, set(done.bad_blocks)) == (False, {10, 11, 12, 13}) and "hangs" in done.error
    assert near.blocks([10, 11]) == [bytes(SLOT)] * 2
    assert b.status().tiers[0].writing == 4
    b.check_integrity()
    released.set()
    eventually(lambda: b.status().tiers[0].writing == 0)
    assert b.status().tiers[0].used == 0


def test_a_read_that_does_not_begin_costs_its_limit_and_keeps_its_memory(
    h: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, b, near, found = a_hit(h)
    begins, read = threading.Event(), nixl_transport.NixlTransport.read

    def stuck(transport: nixl_transport.NixlTransport, *args: Any) -> nixl_transport.Transfer:
        assert begins.wait(PATIENCE)
        return read(transport, *args)

    monkeypatch.setattr(nixl_transport.NixlTransport, "read", stuck)
    monkeypatch.setattr("raykv.actors.peer_loads.PATIENCE_S", 0.2)
    done = h.get(b, near, found, [10, 11, 12, 13])
    assert not done.ok and "did not begin" in done.error
    assert b.status().tiers[0].writing == 4, "it may begin yet"
    begins.set()
    eventually(lambda: b.status().tiers[0].writing == 0)
    assert b.status().tiers[0].used == 0 and near.blocks([10, 11]) == [bytes(SLOT)] * 2


def test_a_store_closes_with_a_read_that_does_not_end(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    _, b, near, found = a_hit(h)
    released = hold(monkeypatch)
    assert not h.get(b, near, found, [10, 11, 12, 13]).ok
    b.shutdown(remove_host=True)
    released.set()


def test_nobody_is_asked_without_a_directory(h: Harness) -> None:
    _, b, _, _ = a_hit(h)
    h.nodes.directory_up = False
    assert not b.look_ups(E, [look_up("p", 9, "next")])[0].more


def told(store: str, blocks: int, name: str) -> LookUp:
    return dataclasses.replace(look_up("p", 4, name), hand_over=HandOver(blocks, store))


def test_a_store_that_is_named_needs_no_directory(h: Harness) -> None:
    a, b = h.store("a"), h.store("b")
    far, near = h.rank(a, FAR), h.rank(b, E)
    h.nodes.directory_up = False
    asked = told("a", 4, "early")
    (have,) = b.look_ups(E, [asked])
    assert b.reach(E, asked, have, PATIENCE) == have, "nothing is there yet"
    before = far.blocks(range(4))
    h.put(a, far, "p", list(range(4)))
    again = told("a", 4, "early+1")
    found = b.reach(E, again, have, PATIENCE)
    assert (found.num_blocks, found.media) == (4, (Medium.PEER,) * 4)
    assert h.get(b, near, found, [10, 11, 12, 13]).ok and near.blocks(range(10, 14)) == before
    release(b, found)
    eventually(lambda: a.status().leases == 0)


@pytest.mark.parametrize("name", ["nowhere", "b", "a"])
def test_a_wrong_name_leaves_the_directory(h: Harness, name: str) -> None:
    """`a` has nothing, `b` asks, and nobody knows `nowhere`; `c` has it."""
    a, b, c = h.store("a"), h.store("b"), h.store("c")
    h.rank(a, EngineId("idle"))
    far = h.rank(c, FAR)
    h.rank(b, E)
    h.put(c, far, "p", list(range(4)))
    asked = told(name, 9, "r")
    (have,) = b.look_ups(E, [asked])
    found = b.reach(E, asked, have, PATIENCE)
    assert found.media == (Medium.PEER,) * 4 and c.status().leases == 1
    assert h.nodes.callers["a"].count("lend") <= 1
    release(b, found)


def test_names_that_fail_are_not_kept_for_ever(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_reach, "MOST_FAILING", 10)
    b = h.store("b")
    h.rank(b, E)
    h.nodes.directory_up = False
    for number in range(25):
        asked = told(f"nowhere{number}", 4, f"r{number}")
        assert not b.reach(E, asked, b.look_ups(E, [asked])[0], PATIENCE).num_blocks
    assert b._peers is not None
    peers = b._peers.reacher._peers
    assert len(peers._backoff._records) <= 10 and not peers.may("nowhere24")


def test_a_store_without_a_peer_tier_lends_nothing(h: Harness) -> None:
    store = NodeStore(h.spec(), "test", shm=h.nodes.folder)
    h.stores.append(store)
    rank = h.rank(store, E)
    h.put(store, rank, "p", [0])
    assert not store.look_ups(E, [look_up("p", 2)])[0].more
    ask = Lend(StoreLife("x"), 0, (rank.attach.fingerprint,), (0,), look_up("p", 1).hashes, 0, 1.0)
    assert store.lend(ask).lease is None
