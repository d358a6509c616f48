"""Single cases of the pins; `test_safety` has them in any order and together with the ledger."""

from __future__ import annotations

import pytest

from raykv.core.pins import PinTable
from raykv.errors import IntegrityError
from raykv.types import RequestId, StepId
from tests.support.block_pool import Block, BlockPool

R, OTHER = RequestId("r"), RequestId("other")
A, B = 0, 1


def fence(**steps: int) -> dict[int, StepId]:
    return {{"a": A, "b": B}[name]: StepId(step) for name, step in steps.items()}


class Table:
    """A PinTable whose answers are carried out at once, as its docstring asks."""

    def __init__(self, blocks: int = 6) -> None:
        self.pins, self.pool = PinTable(), BlockPool(blocks)

    def give(self, request: RequestId, count: int, group: int = 0) -> list[Block]:
        blocks = self.pool.new(count)
        self.pin(request, blocks, group)
        return blocks

    def pin(self, request: RequestId, blocks: list[Block], group: int = 0) -> None:
        self.pool.touch(self.pins.grow(request, group, blocks))
        self.pins.check_integrity()

    def release(self, **steps: int) -> list[int]:
        freed = self.pins.release(fence(**steps))
        self.pool.free_blocks(freed)
        self.pins.check_integrity()
        return [block.block_id for block in freed]


def test_a_pin_outlives_its_request_until_every_host_is_through() -> None:
    table = Table()
    blocks = table.give(R, 3)
    table.pins.close(R, fence(a=4, b=2))
    table.pool.free_blocks(blocks)
    assert table.pool.num_free == 3
    assert table.release(a=3, b=2) == []
    assert table.release(a=3, b=9) == [], "each child has its own steps"
    assert table.pins.closing == 1
    assert table.release(a=4, b=2) == [2, 1, 0], "the tail is reused first"
    assert (table.pool.num_free, table.pins.closing, table.pins.pinned()) == (6, 0, {})


def test_a_child_that_has_passed_the_fence_is_not_asked_again() -> None:
    table = Table()
    table.pool.free_blocks(table.give(R, 1))
    table.pins.close(R, fence(a=4, b=2))
    assert table.release(a=4, b=1) == []
    assert table.release(a=3, b=2) == [0]


def test_an_open_send_holds_behind_the_fence() -> None:
    table = Table()
    table.pool.free_blocks(table.give(R, 2))
    table.pins.close(R, fence(a=1), [A, B])
    assert table.release(a=5) == []
    table.pins.send_settled(R, A)
    table.pins.send_settled(R, A)
    table.pins.send_settled(OTHER, B)
    assert table.release(a=5) == []
    table.pins.send_settled(R, B)
    assert table.release(a=5) == [1, 0]


def test_an_open_set_is_never_released() -> None:
    table = Table()
    table.pool.free_blocks(table.give(R, 2))
    assert table.release(a=99, b=99) == []
    assert table.pins.open_but({}) == [R] and table.pins.open_but({R: 1}) == []


def test_a_shared_block_comes_free_with_its_last_holder() -> None:
    table = Table(blocks=2)
    blocks = table.give(R, 2)
    table.pool.touch(blocks[:1])  # a prefix hit of another request
    table.pin(OTHER, blocks[:1])
    table.pins.close(R, fence(a=1))
    table.pool.free_blocks(blocks)
    assert table.release(a=1) == [1, 0]
    assert table.pool.num_free == 1
    table.pins.close(OTHER, fence(a=2))
    assert table.release(a=2) == [0]
    assert table.pool.num_free == 1, "the other request itself"
    table.pool.free_blocks(blocks[:1])
    assert table.pool.num_free == 2


def test_a_preempted_request_that_came_back_has_a_second_set() -> None:
    table = Table()
    table.pool.free_blocks(table.give(R, 2))
    table.pins.close(R, fence(a=1))
    table.pool.free_blocks(table.give(R, 2))
    table.pins.close(R, fence(a=2))
    table.pins.close(R, fence(a=7))  # nothing is open: nothing happens
    assert table.pins.closing == 2
    assert table.release(a=1) == [1, 0]
    assert table.release(a=2) == [3, 2]


def test_trim_closes_what_the_window_has_left() -> None:
    table = Table()
    kept, window = table.give(R, 1, group=0), table.give(R, 3, group=1)
    table.pins.trim(R, 1, fence(a=1))
    assert table.pins.closing == 0, "the request holds all of them"
    table.pool.free_blocks(window[:2])
    table.pins.trim(R, 1, fence(a=1))
    table.pins.trim(R, 0, fence(a=1))
    assert table.release(a=0) == []
    assert table.release(a=1) == [2, 1]
    table.pins.close(R, fence(a=2))
    table.pool.free_blocks([*kept, *window[2:]])
    assert sorted(table.release(a=2)) == [0, 3]
    table.pins.trim(R, 1, fence(a=3))  # an unknown request is fine
    assert table.pins.closing == 0


def test_frees_soon_is_true_for_blocks_that_wait_for_hosts_only() -> None:
    table = Table()
    blocks = table.give(R, 1)
    assert not table.pins.frees_soon()
    table.pins.close(R, fence(a=1))
    assert not table.pins.frees_soon(), "the request holds it too"
    table.pool.free_blocks(blocks)
    assert table.pins.frees_soon()
    table.release(a=1)
    assert not table.pins.frees_soon()
    table.pool.free_blocks(table.give(R, 1))
    table.pins.close(R, fence(a=2), [B])
    assert not table.pins.frees_soon(), "a peer may take as long as it likes"
    table.pins.send_settled(R, B)
    assert table.pins.frees_soon()


def test_nothing_to_pin_is_nothing() -> None:
    table = Table()
    assert list(table.pins.grow(R, 0, [])) == []
    assert not table.pins.is_open(R)
    table.pins.close(R, fence(a=1), [A])
    assert table.pins.closing == 0


def test_check_integrity_sees_a_wrong_count() -> None:
    table = Table()
    table.give(R, 1)
    table.pins._count[5] += 1
    with pytest.raises(IntegrityError):
        table.pins.check_integrity()
