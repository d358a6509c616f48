"""A prefetch from other nodes, with real bytes over real NIXL: what came is right, a bad peer costs only its own."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raykv.actors import peer_prefetch, store_adopt
from raykv.actors.node_store import NodeStore
from raykv.admin_messages import Operation, OperationKind, OperationState, Selection
from raykv.errors import StoreError
from raykv.peer_messages import Lend, Lent
from raykv.store_messages import Cascade, LoadJob, LookedUp, Medium, PeerStatus, TierSpec
from raykv.types import EngineId, JobId, LeaseId
from tests.actors.test_peer_tier import FAR, PATIENCE, SLOT, Harness, hold, host_slots, lies
from tests.support.kv_rank import E, KVRank, hashes, look_up
from tests.support.waiting import eventually

pytestmark = pytest.mark.process


@pytest.fixture
def h(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    harness.close()


def order(prompt: str, count: int, *ranks: KVRank, number: str = "1", **options: Any) -> Operation:
    prints = tuple(rank.attach.fingerprint.hex() for rank in ranks)
    selection = Selection(prints, hashes=b"".join(hashes(prompt, count)))
    return Operation(number, OperationKind.PREFETCH, selection, **options)


def done(store: NodeStore, operation: Operation) -> OperationState:
    store.begin(operation)
    eventually(lambda: not store.operation(operation.number).running)
    state = store.operation(operation.number)
    assert not state.error
    return state


def own(store: NodeStore, count: int) -> LookedUp:
    """What this store has itself, without anybody being asked."""
    return store.look_ups(E, [look_up("p", count, "own")])[0]


def pair(h: Harness, blocks: int = 4, **options: Any) -> tuple[NodeStore, NodeStore, KVRank, KVRank]:
    """Node "a" holds the first blocks of prompt "p"; an engine of the same model is at node "b"."""
    a, b = h.store("a"), h.store("b", h.spec(**options))
    far, near = h.rank(a, FAR), h.rank(b, E)
    h.put(a, far, "p", list(range(blocks)))
    return a, b, far, near


def test_what_came_is_loaded_when_the_other_node_is_gone(h: Harness) -> None:
    a, b, far, near = pair(h, 6)
    before = far.blocks(range(6))
    state = done(b, order("p", 6, near))
    assert (state.done, state.total) == (6, 6)
    assert state.result == "0 blocks were copied up, 0 were there already; 6 blocks came from other nodes."
    eventually(lambda: a.status().leases == 0)
    assert b.status().peer == PeerStatus(lent_blocks=0, lent_now=0, read_blocks=6, bad_blocks=0)
    h.nodes.callers["a"].dead = True
    a.shutdown(remove_host=True)
    near.wipe(range(24))
    found = own(b, 6)
    assert found.media == (Medium.HOST,) * 6
    assert h.get(b, near, found, list(range(10, 16))).ok and near.blocks(range(10, 16)) == before


def test_only_what_is_missing_is_fetched(h: Harness) -> None:
    a, b, far, near = pair(h, 6)
    mine, theirs = near.blocks([0, 1]), far.blocks(range(6))
    h.put(b, near, "p", [0, 1])
    state = done(b, order("p", 8, near))
    assert (state.done, state.total) == (6, 6)
    assert "2 were there already; 4 blocks came from other nodes; 2 are in no other node's host tier" in state.result
    assert a.status().peer == PeerStatus(lent_blocks=4, lent_now=0, read_blocks=0, bad_blocks=0)
    found = own(b, 8)
    assert found.num_blocks == 6 and h.get(b, near, found, list(range(10, 16))).ok
    assert near.blocks(range(10, 16)) == mine + theirs[2:]
    state = done(b, order("p", 6, near, number="2"))
    assert state.result == "0 blocks were copied up, 6 were there already.", "nobody had to be asked"


def test_in_pieces_smaller_than_what_a_peer_lends_at_once(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of its tier, by and by, in leases of a few blocks and reads of two."""
    monkeypatch.setattr(peer_prefetch, "READ_BLOCKS", 2)
    a, b = h.store("a", h.spec(16)), h.store("b")
    far, near = h.rank(a, FAR), h.rank(b, E)
    before = far.blocks(range(12))
    h.put(a, far, "p", list(range(12)))
    assert done(b, order("p", 12, near)).done == 12  # of 16 slots 8 are lent at most
    lends = [args[0] for name, args in h.nodes.callers["a"].calls if name == "lend"]
    assert [len(lend.hashes) // 32 for lend in lends] == [12, 6, 6]
    assert h.get(b, near, own(b, 12), list(range(12))).ok and near.blocks(range(12)) == before
    eventually(lambda: a.status().leases == 0)


def test_all_ranks_and_two_holders(h: Harness) -> None:
    """`a` has the beginning, `c` what follows; both for two ranks."""
    a, b, c = h.store("a"), h.store("b"), h.store("c")
    parts = {store: [h.rank(store, EngineId(f"far {i}"), rank, 2) for rank in (0, 1)] for i, store in enumerate((a, c))}
    near = [h.rank(b, E, rank, 2) for rank in (0, 1)]
    for rank in (0, 1):
        h.put(a, parts[a][rank], "p", [0, 1, 2])
    for rank in (0, 1):
        h.put(c, parts[c][rank], "p", list(range(5)))
    c.forget(Selection(hashes=b"".join(hashes("p", 2))))
    before = [parts[a][rank].blocks([0, 1, 2]) + parts[c][rank].blocks([3, 4]) for rank in (0, 1)]
    state = done(b, order("p", 5, *near))
    assert (state.done, state.total) == (10, 10) and "10 blocks came" in state.result
    found = own(b, 5)
    for rank in (0, 1):
        assert h.get(b, near[rank], found, list(range(5))).ok and near[rank].blocks(range(5)) == before[rank]


def test_windows(h: Harness) -> None:
    a, b = h.store("a"), h.store("b")
    far, near = h.rank(a, FAR, windows=(0, 2)), h.rank(b, E, windows=(0, 2))
    full, window = far.blocks(range(5)), far.blocks([3, 4], 1)
    h.put(a, far, "p", list(range(5)), list(range(5)))
    h.put(b, near, "p", [0, 1], [0, 1])
    mine = near.blocks([0, 1])
    state = done(b, order("p", 5, near))
    assert state.done == 4 + 5, "3 of the first group and 2 of the window came; 4 were here"
    (lend,) = [args[0] for name, args in h.nodes.callers["a"].calls if name == "lend"]
    assert lend.first == 2
    found = own(b, 5)
    assert found.num_blocks == 5
    job = LoadJob(JobId(0), found.lease or LeaseId(0), ((0, 1, 2, 3, 4), (3, 4)), ((8, 9, 10, 11, 12), (13, 14)))
    assert h.run(b, near, job).ok
    assert near.blocks(range(8, 13)) == mine + full[2:] and near.blocks([13, 14], 1) == window


def test_without_an_engine_the_windows_must_be_said(h: Harness) -> None:
    a, b, far, near = pair(h)
    before = far.blocks(range(4))
    b.detach(E, near.attach.rank)
    state = done(b, order("p", 4, far))
    assert f"not asked: no engine of the model {far.attach.fingerprint.hex()} is attached" in state.result
    assert h.nodes.callers["a"].calls == []
    assert done(b, order("p", 4, far, number="2", windows=(0,))).done == 4
    b.attach(near.attach)
    assert h.get(b, near, own(b, 4), [7, 8, 9, 10]).ok and near.blocks([7, 8, 9, 10]) == before
    assert [model.windows for model in b.view().models] == [(0,)]
    eventually(lambda: a.status().leases == 0)


def test_blocks_go_on_to_a_slower_tier_so_more_find_room(h: Harness) -> None:
    a = h.store("a", h.spec(40))
    b = h.store("b", h.spec(16, 64, cascade=Cascade.WRITE))
    far, near = h.rank(a, FAR), h.rank(b, E)
    h.put(a, far, "p", list(range(14)))
    h.put(b, near, "own", list(range(10)))
    before = far.blocks(range(14))
    state = done(b, order("p", 14, near))
    assert "14 blocks came" in state.result
    assert b.look_ups(E, [look_up("own", 10)])[0].num_blocks == 10, "none of this node's is lost"
    eventually(lambda: b.status().tiers[1].used == 24)
    assert h.get(b, near, own(b, 14), list(range(14))).ok and near.blocks(range(14)) == before


def test_what_finds_no_room_stays_away(h: Harness) -> None:
    a, b, far, near = pair(h, 6, host=8)
    before = far.blocks(range(6))
    h.put(b, near, "own", list(range(5)))
    state = done(b, order("p", 6, near))
    assert "3 blocks came from other nodes; 3 that they have found no room here" in state.result
    assert (state.done, state.total) == (3, 3)
    assert b.look_ups(E, [look_up("own", 5)])[0].num_blocks == 5
    found = own(b, 6)
    assert found.num_blocks == 3 and h.get(b, near, found, [20, 21, 22]).ok
    assert near.blocks([20, 21, 22]) == before[:3], "the first ones of the prompt"
    eventually(lambda: a.status().leases == 0)


# -- peers that die, hang or lie ----------------------------------------------------------------------------


def cost(h: Harness, b: NodeStore, near: KVRank, blocks: int = 4) -> str:
    """Nothing came, nothing is left in a slot, and the result says so."""
    state = done(b, order("p", blocks, near))
    assert f"; 0 blocks came from other nodes; the store a failed, which cost {blocks} blocks (" in state.result
    assert own(b, blocks).num_blocks == 0
    b.check_integrity()
    return state.result


def test_bytes_that_are_not_what_was_said_are_not_kept(h: Harness) -> None:
    a, b, _, near = pair(h)
    host_slots(a)[:, 77] += 1
    assert "4 of its blocks had other bytes than it said" in cost(h, b, near)
    assert (b.status().tiers[0].used, b.status().tiers[0].writing) == (0, 0)
    status = b.status().peer
    assert status is not None and (status.read_blocks, status.bad_blocks) == (0, 4)
    eventually(lambda: a.status().leases == 0)


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": b""},
        {"sizes": b"123"},
        {"sizes": b"\xff" * 16},
        {"sizes": bytes(16)},
        {"sizes": (SLOT - 64).to_bytes(4, "little") * 4},
        {"slots": b"\xff" * 16},
        {"num_blocks": 9},
        {"memory": None},
    ],
)
def test_an_answer_that_makes_no_sense_costs_its_blocks(h: Harness, change: dict[str, Any]) -> None:
    a, b, _, near = pair(h)
    lies(h, change)
    cost(h, b, near)
    eventually(lambda: a.status().leases == 0)


def test_a_dead_peer_costs_what_it_alone_had(h: Harness) -> None:
    _, b, _, near = pair(h)
    c = h.store("c")
    other = h.rank(c, EngineId("other"))
    before = other.blocks([0, 1])
    h.put(c, other, "p", [0, 1])
    h.nodes.callers["a"].dead = True
    state = done(b, order("p", 4, near))
    assert "2 blocks came from other nodes; the store a failed, which cost 2 blocks (the peer is gone)" in state.result
    found = own(b, 4)
    assert found.num_blocks == 2 and h.get(b, near, found, [8, 9]).ok and near.blocks([8, 9]) == before


def test_a_peer_that_ends_after_it_lent(h: Harness) -> None:
    a, b, _, near = pair(h)

    def ended(result: Any) -> Any:
        if isinstance(result, Lent):
            h.nodes.callers["a"].dead = True
            a.shutdown(remove_host=True)
        return result

    h.nodes.callers["a"].change = ended
    assert done(b, order("p", 4, near)).done == 0
    assert own(b, 4).num_blocks == 0
    eventually(lambda: b.status().tiers[0].writing == 0)


def test_a_peer_that_does_not_answer(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_prefetch, "LEND_S", 0.2)
    a, b, _, near = pair(h)
    caller = h.nodes.callers["a"]
    caller.hung = threading.Event()
    assert "it did not answer in time" in cost(h, b, near)
    caller.hung.set()
    eventually(lambda: caller.count("give_back") == 1 and a.status().leases == 0)


def test_a_read_that_does_not_end(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_adopt, "PATIENCE_S", 0.1)
    _, b, _, near = pair(h)
    released = hold(monkeypatch)
    assert "it is too slow, or hangs" in cost(h, b, near)
    assert b.status().tiers[0].writing == 4, "until NIXL says that it has ended"
    released.set()
    eventually(lambda: b.status().tiers[0].writing == 0)
    assert b.status().tiers[0].used == 0


def test_a_lease_that_is_over_is_not_used(h: Harness) -> None:
    a, b, _, near = pair(h)
    lies(h, {"duration_s": 0.0})
    state = done(b, order("p", 4, near))
    assert "0 blocks came" in state.result and own(b, 4).num_blocks == 0
    eventually(lambda: a.status().leases == 0)


@pytest.mark.parametrize("closed", [False, True])
def test_copies_of_engines_go_first(h: Harness, monkeypatch: pytest.MonkeyPatch, closed: bool) -> None:
    """And an order ends with its store; what was leased goes back."""
    monkeypatch.setattr(peer_prefetch, "GIVE_WAY_S", PATIENCE)
    a, b, _, near = pair(h)
    assert b._peers is not None
    prefetcher, asked = b._peers.prefetcher, list[bool]()
    busy = prefetcher._busy
    prefetcher._busy = lambda: asked.append(busy()) or asked[-1]  # type: ignore[func-returns-value]
    with b._sessions.use(E, near.attach.rank):
        b.begin(order("p", 4, near))
        eventually(lambda: len(asked) > 3)
        assert all(asked) and a.status().leases == 1 and b.operation("1").running and own(b, 4).num_blocks == 0
        if closed:
            b._admin.operations_of.book.close()
    eventually(lambda: not b.operation("1").running)
    assert (b.operation("1").error, own(b, 4).num_blocks) == ("", 0 if closed else 4)
    eventually(lambda: a.status().leases == 0)


# -- nobody is asked --------------------------------------------------------------------------------------------


def test_who_is_not_asked_and_why(h: Harness) -> None:
    _, b, _, near = pair(h, disk=16)
    h.nodes.directory_up = False
    assert "; other nodes were not asked: no Directory is found" in done(b, order("p", 4, near)).result
    h.nodes.directory_up = True
    assert "not asked: that takes the hashes of a prompt and the f" in done(b, order("p", 4, number="2")).result
    tenant = order("p", 4, near, number="3")
    assert tenant.selection is not None
    tenant = dataclasses.replace(tenant, selection=dataclasses.replace(tenant.selection, tenant="00" * 8))
    assert "not asked: they don't say whose" in done(b, tenant).result
    assert h.nodes.callers["a"].calls == []
    for wrong in ((-1,), (True,), [0], (0.5,), (0,) * 256):
        with pytest.raises(StoreError, match="Windows are"):
            b.begin(order("p", 4, near, number="4", windows=wrong))
    with pytest.raises(StoreError, match="to the fastest tier, host, and not to disk"):
        b.begin(order("p", 4, near, number="4", tier=TierSpec(Medium.DISK, 0)))


def test_without_a_peer_tier(h: Harness) -> None:
    store = NodeStore(h.spec(8, 16), "test", shm=h.nodes.folder)
    h.stores.append(store)
    rank = h.rank(store, E)
    h.put(store, rank, "p", [0, 1])
    state = done(store, order("p", 4, rank))
    assert state.result == (
        "0 blocks were copied up, 2 were there already; other nodes were not asked: this store has no peer tier."
    )
    assert "not asked" not in done(store, order("p", 2, rank, number="2")).result, "all of it is here"


def test_without_a_host_tier(h: Harness) -> None:
    _, b, _, near = pair(h, host=0, disk=16)
    with pytest.raises(StoreError, match=r"one tier only.*a peer tier"):
        b.begin(order("p", 4, near))


def test_engines_do_not_ask_for_sizes(h: Harness) -> None:
    """What a load needs no more of than before."""
    a, b, far, _ = pair(h)
    ask = Lend(b.life, 0, (far.attach.fingerprint,), (0,), b"".join(hashes("p", 4)), 0, 5.0)
    assert a.lend(ask).sizes == b""
    assert a.lend(dataclasses.replace(ask, number=1, sizes=True)).sizes == SLOT.to_bytes(4, "little") * 4
