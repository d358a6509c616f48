"""The host tier of a store changes while others read from it, and while it reads from others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raykv.actors.node_store import NodeStore
from raykv.admin_messages import OperationKind
from raykv.core.prefix import block_key
from raykv.storage import host_pool
from raykv.store_messages import Medium, TierSpec
from tests.actors.test_peer_tier import FAR, SLOT, Harness, release
from tests.actors.test_tier_operations import do
from tests.support.kv_rank import E, KVRank, hashes, look_up
from tests.support.peer_stores import find

pytestmark = pytest.mark.process

PIECE = 8


@pytest.fixture
def h(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    monkeypatch.setattr(host_pool, "PIECE_NBYTES", PIECE * SLOT)
    harness = Harness(tmp_path)
    yield harness
    harness.close()


def resize(store: NodeStore, slots: int) -> None:
    do(store, OperationKind.RESIZE_TIER, TierSpec(Medium.HOST, slots * SLOT))


def reads(h: Harness, b: NodeStore, near: KVRank, prompt: str, right: list[bytes]) -> int:
    """How many blocks of the prompt b gets from a; each byte is compared, and b keeps none of them."""
    b.clear()
    found = find(b, E, look_up(prompt, len(right)))
    target = list(range(12, 12 + found.num_blocks))
    if target:
        near.wipe(target)
        done = h.get(b, near, found, target)
        assert done.ok and done.media == {Medium.PEER: len(target)}, done
        assert near.blocks(target) == right[: len(target)]
    release(b, found)
    return len(target)


def test_what_lies_in_new_slots_is_lent_and_what_was_there_still_is(h: Harness) -> None:
    a, b = h.store("a", h.spec(12)), h.store("b")
    far, near = h.rank(a, FAR), h.rank(b, E)
    right = far.blocks(range(4))
    h.put(a, far, "p", range(4))
    assert reads(h, b, near, "p", right) == 4
    resize(a, 40)
    for number in range(8):
        h.put(a, far, f"q{number}", range(4))
    assert max(_slots(a, far, f"q{number}") for number in range(8)) >= 16
    for prompt in ("p", *[f"q{number}" for number in range(8)]):
        assert reads(h, b, near, prompt, right) == 4, "b is told of the new memory before it reads there"
    resize(b, 64)
    assert reads(h, b, near, "p", right) == 4, "into slots that the reader has only now"
    resize(a, 5)
    assert reads(h, b, near, "p", right) in range(5)
    resize(a, 40)
    a.clear()
    for number in range(8):
        h.put(a, far, f"r{number}", range(4))
    assert [reads(h, b, near, f"r{number}", right) for number in range(8)] == [4] * 8, "pieces that came again"


def _slots(store: NodeStore, rank: KVRank, prompt: str) -> int:
    stock = store._stock
    assert stock is not None
    key = block_key(rank.attach.fingerprint, 0, hashes(prompt, 1)[0])
    place = stock.book.find(key)
    return place.slot if place is not None else -1


def test_a_host_tier_that_goes_is_not_lent_and_one_that_comes_is(h: Harness) -> None:
    a, b = h.store("a", h.spec(12, 24)), h.store("b")
    far, near = h.rank(a, FAR), h.rank(b, E)
    right = far.blocks(range(4))
    h.put(a, far, "p", range(4))
    assert reads(h, b, near, "p", right) == 4
    do(a, OperationKind.REMOVE_TIER, TierSpec(Medium.HOST, 0))
    assert reads(h, b, near, "p", right) == 0, "what lies on a disk is not lent"
    do(a, OperationKind.ADD_TIER, TierSpec(Medium.HOST, 20 * SLOT))
    h.put(a, far, "q", range(4))
    assert reads(h, b, near, "q", right) == 4


def test_blocks_of_a_tier_that_is_drained_are_lent_until_they_are_elsewhere(h: Harness) -> None:
    a, b = h.store("a", h.spec(12, 24)), h.store("b", h.spec(12, 24, folder="disk of b"))
    far, near = h.rank(a, FAR), h.rank(b, E)
    right = far.blocks(range(4))
    h.put(a, far, "p", range(4))
    do(b, OperationKind.DRAIN_TIER, TierSpec(Medium.HOST, 0))
    assert reads(h, b, near, "p", right) == 4, "through staging rows, as b's memory takes nothing"
    assert [tier.used for tier in b.status().tiers] == [0, 0]
    do(a, OperationKind.DRAIN_TIER, TierSpec(Medium.HOST, 0))
    h.put(a, far, "q", range(4))
    assert reads(h, b, near, "p", right) == reads(h, b, near, "q", right) == 0
