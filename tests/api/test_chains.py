"""Changes of an engine's chain, good and bad."""

from __future__ import annotations

from typing import Any

import pytest

from raykv.api import Cluster, NotDoneError, NotFoundError, OperationError, Progress
from raykv.errors import HostTimeout
from tests.api.cases import CHILD, caller, desk
from tests.support.fake_operators import (
    FakeDesk,
    FakeWorld,
)


def children(kv: Cluster, engine: str = "engine-a") -> list[tuple[str, str]]:
    return [(child.name, child.state) for child in kv.engine(engine).children]


def test_a_chain_is_changed(kv: Cluster) -> None:
    heard: list[Progress] = []
    done = kv.pause_child("nixl", engine="engine-a", tell=heard.append)
    assert done.said == "nixl was paused in engine engine-a." and children(kv)[0] == ("nixl", "paused")
    assert [one.detail for one in heard] == ["jobs are settled", "done"] and heard[-1].ended
    assert kv.resume_child("nixl").ok and children(kv)[0] == ("nixl", "up")
    assert kv.restart_child("nixl").ok and kv.engine("engine-a").children[0].incarnation == 2
    added = kv.add_child(CHILD, before="nixl")
    assert added.chain == ("ExampleConnector", "nixl", "tiers", "files")
    assert [name for name, _ in children(kv)] == list(added.chain)
    order = ["files", "tiers", "nixl", "ExampleConnector"]
    assert "asks its 4 children in the order files, tiers" in kv.reorder_children(order).said
    assert [name for name, _ in children(kv)] == order
    assert kv.remove_child("files").chain == ("tiers", "nixl", "ExampleConnector")
    assert children(kv, "engine-b") == [("nixl", "up"), ("tiers", "up"), ("files", "up")]


def test_an_order_that_is_refused_or_fails(kv: Cluster, world: FakeWorld) -> None:
    desk(world).refuse = "The child nixl is the only one that can load: add another first."
    with pytest.raises(OperationError, match=r"the only one that can load") as error:
        kv.remove_child("nixl")
    assert not isinstance(error.value, NotDoneError)
    desk(world).refuse, desk(world).fail = "", "2 sends of nixl are not settled after 60 s."
    with pytest.raises(NotDoneError, match=r"not settled"):
        kv.remove_child("nixl")


def test_an_order_that_lasts(kv: Cluster, world: FakeWorld) -> None:
    desk(world).steps = 10**9
    done = kv.remove_child("nixl", wait_s=0.01)
    assert done.running and "goes on: jobs are settled" in done.said
    assert kv.pause_child("nixl", wait_s=0).running
    desk(world).steps = 1
    again = kv.remove_child("nixl", number=done.number)
    assert again.ok and desk(world).applied == [done.number]
    assert kv.remove_child("nixl", number=done.number).ok and desk(world).applied == [done.number]


def test_a_lost_answer_orders_nothing_twice(kv: Cluster, world: FakeWorld) -> None:
    caller(world, "raykv-desk-engine-a").lose["order"] = 3
    assert kv.restart_child("nixl").ok
    assert kv.engine("engine-a").children[0].incarnation == 2


def test_a_desk_that_is_silent(kv: Cluster, world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    of = caller(world, "raykv-desk-engine-a")

    def silent(self: FakeDesk, order: Any) -> Any:
        raise HostTimeout("the desk did not answer")

    monkeypatch.setattr(FakeDesk, "order", silent)
    with pytest.raises(NotDoneError, match=r"Whether pause nixl was done is not known.*number='pause-"):
        kv.pause_child("nixl", wait_s=0.01)
    of.dead = True
    with pytest.raises(NotFoundError, match=r"There is no engine"):
        kv.pause_child("nixl", engine="engine-a")
