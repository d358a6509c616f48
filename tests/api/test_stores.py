"""Operations at stores, good and bad: bad input to any operation changes nothing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest

from raykv.admin_messages import ModelView, tenant_tag
from raykv.api import Cluster, NotDoneError, NotFoundError, OperationError, Progress
from raykv.errors import RayKVError
from raykv.store_messages import Medium
from tests.api.cases import CHILD, HASHES, LEFT, RIGHT, TOKENS, caller, desk, shown, state, store
from tests.support.fake_operators import (
    NODES,
    OTHER_PRINT,
    PRINT,
    FakeStore,
    FakeWorld,
    hashes_of,
)


def test_pin_and_unpin(kv: Cluster, world: FakeWorld) -> None:
    store(world).put(HASHES[:2], Medium.HOST)
    done = kv.pin(TOKENS, "10m", note="the system prompt")
    assert done.ok and done.blocks == 2 and done.said.startswith("default@a1a1a1a1a1a1: 2 blocks are pinned")
    [pin] = kv.pins()
    assert (pin.number, pin.blocks, pin.note) == (done.number, 2, "the system prompt")
    assert 0 < pin.expires - time.time() <= 600 and not store(world, RIGHT).pinned
    assert kv.lookup(TOKENS).blocks[0].places[0].pinned_until == pin.expires
    assert kv.pin(TOKENS, "1h", number=done.number).blocks == 2 and list(kv.pins()) == [pin]  # a repeat
    with pytest.raises(NotFoundError, match=r"None of the prompt's blocks is held by default@a1a1a1a1a1a1"):
        kv.pin(TOKENS, "10m", cache_salt="alice")
    assert kv.unpin(done.number).blocks == 2 and not kv.pins()
    with pytest.raises(NotFoundError, match=r"There is no pin"):
        kv.unpin(done.number)


def test_pin_in_all_stores_of_a_name(kv: Cluster, world: FakeWorld) -> None:
    store(world, RIGHT).put(HASHES, Medium.HOST)
    done = kv.pin(TOKENS, 60, store="default")
    assert [(part.where, part.blocks) for part in done.parts] == [
        ("default@a1a1a1a1a1a1", 0),
        ("default@b2b2b2b2b2b2", 3),
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda kv: kv.pin(TOKENS, "-1m"), "time_limit is"),
        (lambda kv: kv.pin(TOKENS, 0), "time_limit is 0"),
        (lambda kv: kv.pin(TOKENS, "10m", note="x" * 201), "note has 201"),
        (lambda kv: kv.pin(TOKENS, "10m", number=""), "number is"),
        (lambda kv: kv.pin([1, 2], "10m"), "less than one block"),
        (lambda kv: kv.pin(TOKENS, "10m", store="nope"), "There is no store"),
        (lambda kv: kv.prefetch(TOKENS, "hots"), "There is no medium"),
        (lambda kv: kv.prefetch(TOKENS, "fs"), "has no tier .fs.. It has: host, disk"),
        (lambda kv: kv.prefetch(TOKENS, node="nowhere"), "There is no node"),
        (lambda kv: kv.prefetch(TOKENS, node="left", store="default@b2"), "Name the node once"),
        (lambda kv: kv.prefetch(TOKENS, wait_s=-1), "wait_s is -1"),
        (lambda kv: kv.clear(), "everything=True"),
        (lambda kv: kv.clear(model="tinny"), "Did you mean .tiny"),
        (lambda kv: kv.clear(tier="peers"), "There is no medium"),
        (lambda kv: kv.clear(tier="fs"), "no tier in these stores called"),
        (lambda kv: kv.clear(tenant="tag:1"), "hexadecimal"),
        (lambda kv: kv.set_quota("alice", "-5GiB"), "quota is"),
        (lambda kv: kv.set_quota("alice", -1), "quota is -1"),
        (lambda kv: kv.set_quota("", "1GiB"), "Blocks without a tenant have no quota"),
        (lambda kv: kv.set_quota(7, "1GiB"), "tenant is 7. It must be a text"),  # type: ignore[arg-type]
        (lambda kv: kv.clear(everything="yes"), "everything is .* It must be True or False"),  # type: ignore[arg-type]
        (lambda kv: kv.set_quota("alice", 5, store="@nowhere"), "There is no store"),
        (lambda kv: kv.unpin("nope"), "There is no pin"),
        (lambda kv: kv.add_tier("fs", "1MiB"), "path is missing"),
        (lambda kv: kv.add_tier("fs", "1MiB", path="relative"), "must be absolute"),
        (lambda kv: kv.add_tier("host", "1MiB", path="/x"), "host memory has no folder"),
        (lambda kv: kv.add_tier("host", "1MiB"), "has a tier .host. already"),
        (lambda kv: kv.add_tier("fs", "0", path="/x"), "capacity is"),
        (lambda kv: kv.add_tier("fs", "1MiB", path="/x", after="peer"), "has no tier .peer"),
        (lambda kv: kv.add_tier("peer", "1MiB"), "other nodes' stores"),
        (lambda kv: kv.resize_tier("host", -1), "capacity is -1"),
        (lambda kv: kv.resize_tier("fs", "1GiB"), "has no tier"),
        (lambda kv: kv.drain_tier("ram"), "There is no medium"),
        (lambda kv: kv.remove_tier("fs"), "has no tier"),
        (lambda kv: kv.verify(store="nope"), "There is no store"),
        (lambda kv: kv.operation("nope"), "There is no operation"),
        (lambda kv: kv.drain_node("nowhere"), "There is no node"),
        (lambda kv: kv.drain_node("left", wait_s=0), "wait_s is 0"),
        (lambda kv: kv.pause_child("nixle"), "Did you mean .nixl"),
        (lambda kv: kv.pause_child("nixl", engine="nope"), "There is no engine"),
        (lambda kv: kv.remove_child(""), "no child of engine engine-a"),
        (lambda kv: kv.reorder_children(["nixl"]), "without tiers, files"),
        (lambda kv: kv.reorder_children(["nixl", "nixl", "tiers", "files"]), "nixl more than once"),
        (lambda kv: kv.reorder_children("nixl"), "must be a list"),
        (lambda kv: kv.add_child({"kv_conector": "x"}), "kv_connector"),
        (lambda kv: kv.add_child("{"), "is no JSON"),
        (lambda kv: kv.add_child("[]"), "must be an object"),
        (lambda kv: kv.add_child(CHILD, before="nope"), "no child of engine"),
        (
            lambda kv: kv.add_child({**CHILD, "kv_connector_extra_config": {"raykv": {"name": "nixl"}}}),
            "has a child .nixl. already",
        ),
        (lambda kv: kv.explain("nope"), "There is no request"),
        (lambda kv: kv.explain(""), "There is no request"),
    ],
)
def test_bad_input_is_one_sentence_and_changes_nothing(
    kv: Cluster, world: FakeWorld, change: Callable[[Cluster], object], says: str
) -> None:
    store(world).put(HASHES, Medium.HOST)
    before = [state(world, name) for name in (LEFT, RIGHT)]
    with pytest.raises(RayKVError, match=says) as error:
        change(kv)
    assert "\n" not in str(error.value)
    assert [state(world, name) for name in (LEFT, RIGHT)] == before
    assert not desk(world).orders and all(fact.state == "alive" for fact in world.facts)


def test_prefetch_with_progress(kv: Cluster, world: FakeWorld) -> None:
    store(world).put(HASHES, Medium.DISK)
    heard: list[Progress] = []
    done = kv.prefetch(TOKENS, "host", tell=heard.append)
    assert done.ok and kv.lookup(TOKENS).blocks[2].places[0].media == ("host", "disk")
    assert [one.done for one in heard] == sorted(one.done for one in heard) and heard[-1].ended
    assert (heard[0].done, heard[-1].done, heard[-1].total) == (0, 3, 3)


def test_prefetch_into_another_nodes_store(kv: Cluster, world: FakeWorld) -> None:
    store(world, RIGHT).put(HASHES, Medium.DISK)
    assert [part.where for part in kv.prefetch(TOKENS, node="right").parts] == ["default@b2b2b2b2b2b2"]
    assert all(Medium.HOST in media for media, _ in store(world, RIGHT).blocks.values())


def test_windows_are_said_where_no_engine_does(kv: Cluster, world: FakeWorld) -> None:
    """The store of another node learns from the order what the engine's own store knows."""
    left, right = store(world), store(world, RIGHT)
    left.models[PRINT] = dataclasses.replace(left.models[PRINT], windows=(0, 3))
    for one in (left, right):
        one.put(HASHES, Medium.DISK)
    right.models.clear()
    number = kv.prefetch(TOKENS, node="right").number
    assert right.ops[number][0].windows == (0, 3)
    assert left.ops[kv.prefetch(TOKENS).number][0].windows == ()


def test_a_tier_or_a_store_that_takes_nothing(kv: Cluster, world: FakeWorld) -> None:
    store(world).off[Medium.HOST] = "it is draining"
    with pytest.raises(OperationError, match=r"The tier host of default@a1a1a1a1a1a1 is off: it is draining"):
        kv.prefetch(TOKENS, "host")
    store(world).off.clear()
    store(world).draining.add(Medium.HOST)
    with pytest.raises(OperationError, match=r"The tier host of default@a1a1a1a1a1a1 is draining"):
        kv.prefetch(TOKENS, "host")
    store(world).draining.clear()
    store(world).drained = "3 moved"
    with pytest.raises(OperationError, match=r"is drained"):
        kv.prefetch(TOKENS, "host")


def test_clear_by_what_is_given(kv: Cluster, world: FakeWorld) -> None:
    alice = tenant_tag("alice").hex()
    salted = hashes_of(tuple(TOKENS), "alice")

    def fill() -> None:
        for name in (LEFT, RIGHT):
            store(world, name).blocks.clear()
            store(world, name).put(HASHES, Medium.HOST, Medium.DISK)
        store(world).put(salted, Medium.HOST, tenant=alice)
        store(world).put([b"x" * 32], Medium.HOST, fingerprint=OTHER_PRINT)

    fill()
    assert kv.clear(tenant="alice").blocks == 3 and len(store(world).blocks) == 4
    fill()
    assert kv.clear(tenant="alice", prefix=TOKENS).blocks == 3 and len(store(world).blocks) == 4
    fill()
    assert kv.clear(prefix=TOKENS, store="@left").blocks == 3 and len(store(world, RIGHT).blocks) == 3
    fill()
    assert kv.clear(model="tiny").blocks == 9 and len(store(world).blocks) == 1
    fill()
    assert kv.clear(tier="disk").blocks == 6 and kv.lookup(TOKENS).blocks[0].places[0].media == ("host",)
    fill()
    store(world).models[OTHER_PRINT] = ModelView(OTHER_PRINT, "big", "", 1, 4096)
    assert kv.clear(model="big").blocks == 1
    fill()
    pinned = kv.pin(TOKENS, "1m")
    assert kv.clear(everything=True).blocks == 7 and len(store(world).blocks) == 3  # what is pinned stays
    kv.unpin(pinned.number)
    assert kv.clear(everything=True).blocks == 3


def test_quotas(kv: Cluster, world: FakeWorld) -> None:
    assert kv.set_quota("alice", "1GiB", store="@left").ok
    assert store(world).quotas == {tenant_tag("alice").hex(): 1 << 30} and not store(world, RIGHT).quotas
    [quota] = kv.quotas()
    assert (quota.quota, quota.tenant) == (1 << 30, f"tag:{tenant_tag('alice').hex()}")
    kv.set_quota(quota.tenant, 0)
    assert store(world).quotas == store(world, RIGHT).quotas == {tenant_tag("alice").hex(): 0}
    kv.set_quota("alice", None)
    assert not kv.quotas()


# -- tiers ------------------------------------------------------------------------------------------------------------


def test_tiers_are_added_resized_drained_removed(kv: Cluster, world: FakeWorld) -> None:
    assert kv.add_tier("fs", "1MiB", path="/mnt/kv", after="disk").ok
    assert all(Medium.FS in store(world, name).tiers for name in (LEFT, RIGHT))
    assert kv.resize_tier("fs", "2MiB", store="@right").ok
    assert [tier.capacity for one in kv.stores if (tier := one.tier("fs"))] == [1 << 20, 2 << 20]
    assert kv.drain_tier("disk").ok and all(one.tier("disk").draining for one in kv.stores)  # type: ignore[union-attr]
    assert kv.add_tier("disk", "1MiB", path="/folder").ok  # takes blocks again
    assert not any(tier.draining for one in kv.stores for tier in one.tiers)
    done = kv.remove_tier("disk")
    assert done.ok and "2 of 2 stores" in done.said
    assert all([tier.medium for tier in one.tiers] == ["host", "fs"] for one in kv.stores)


def test_a_draining_tier_is_refused_by_its_store(kv: Cluster, world: FakeWorld) -> None:
    running = kv.drain_tier("disk", store="@left", wait_s=0)
    assert running.running and not running.ok
    with pytest.raises(OperationError, match=r"^default@a1a1a1a1a1a1: The tier disk is draining"):
        kv.resize_tier("disk", "1GiB", store="@left")
    assert [one.state.running for one in kv.operation(running.number)] == [True]
    again = kv.drain_tier("disk", store="@left", number=running.number)
    assert again.ok and again.number == running.number and len(store(world).ops) == 1


def test_what_one_store_refuses_is_partly_done(kv: Cluster, world: FakeWorld) -> None:
    store(world, RIGHT).draining.add(Medium.DISK)
    done = kv.resize_tier("disk", "2MiB")
    store(world, RIGHT).draining.clear()
    assert not done.ok and [bool(part.error) for part in done.parts] == [False, True]
    assert done.said.startswith("resize tier disk is done at 1 of 2 stores") and "is draining" in done.said
    assert "is draining" in shown(done)
    store(world).draining.add(Medium.DISK)
    with pytest.raises(OperationError, match=r"^default@a1a1a1a1a1a1: The tier disk is draining"):
        kv.resize_tier("disk", "3MiB")
    assert store(world, RIGHT).tiers[Medium.DISK].capacity == 256 * 4096  # the second was not asked
    store(world).draining.clear()


def test_nothing_is_done_by_halves_while_a_store_is_silent(kv: Cluster, world: FakeWorld) -> None:
    caller(world, RIGHT).silent = True
    for change in (lambda: kv.clear(everything=True), lambda: kv.resize_tier("disk", "2MiB"), kv.verify):
        with pytest.raises(OperationError, match=r"default@b2b2b2b2b2b2 does not answer"):
            change()
    assert not store(world).ops
    assert kv.resize_tier("disk", "2MiB", store="@left").ok


def test_stores_of_several_names(kv: Cluster, world: FakeWorld) -> None:
    world.add_store(FakeStore("big"), NODES[0])
    with pytest.raises(OperationError, match=r"There are 2 stores. Say which one is meant: big, default"):
        kv.resize_tier("disk", "2MiB")
    assert [part.where for part in kv.resize_tier("disk", "2MiB", store="big").parts] == ["big@a1a1a1a1a1a1"]


def test_a_store_that_is_restarted_meanwhile(kv: Cluster, world: FakeWorld) -> None:
    """Its new life knows nothing of the operation, and is told again under the same number."""
    store(world).steps = 3

    def tell(progress: Progress) -> None:
        if progress.done == 1 and not restarted:
            restarted.append(True)
            store(world).ops.clear()

    restarted: list[bool] = []
    assert kv.verify(store="@left", tell=tell).ok and restarted
    assert len(store(world).ops) == 1


@pytest.mark.parametrize("method", ["begin", "operation"])
def test_a_lost_answer_does_nothing_twice(kv: Cluster, world: FakeWorld, method: str) -> None:
    caller(world, LEFT).lose[method] = 1
    assert kv.resize_tier("disk", "2MiB", store="@left").ok
    assert len(store(world).ops) == 1


def test_an_operation_that_fails(kv: Cluster, world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: FakeStore, number: str) -> Any:
        from dataclasses import replace

        _, begun = self.ops[number]
        return replace(begun, running=False, ended=1.0, error="The disk is full: free space there.")

    monkeypatch.setattr(FakeStore, "operation", fails)
    with pytest.raises(NotDoneError, match=r"^default@a1a1a1a1a1a1: The disk is full"):
        kv.verify(store="@left")
