"""SlotMover against copies by hand, over odd layouts; what it must not touch, and what it must refuse."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raykv.kvcache import slot_copy, slot_movers
from raykv.kvcache.blocks import LayerLayout
from raykv.kvcache.slot_copy import SlotMover
from raykv.storage.row_copy import RowCopy, row_copy

pytestmark = pytest.mark.process

BLOCKS, SLOTS, HEADERS = 7, 9, 4096
FILL = torch.Generator().manual_seed(0)


def plane(nbytes: int, gap: int = 0, offset: int = 0) -> torch.Tensor:
    """Rows of `nbytes` with `gap` bytes between, `offset` bytes into a storage."""
    step = nbytes + gap
    memory = torch.randint(0, 256, (BLOCKS * step + offset,), dtype=torch.uint8, generator=FILL)
    return memory.as_strided((BLOCKS, nbytes), (step, 1), offset)


def layer(*planes: torch.Tensor) -> LayerLayout:
    return LayerLayout(BLOCKS, planes, sum(p.shape[1] for p in planes))


SPACED = torch.randint(0, 127, (20, BLOCKS, 32), generator=FILL).unbind(0)
LAYOUTS = {
    "one plane": [layer(plane(256))],
    "one long row": [layer(plane(65536))],
    "keys and values": [layer(plane(64), plane(64))],
    "many planes of 16-byte words": [layer(*(plane(64) for _ in range(9)))],
    "many planes of 8-byte words": [layer(*(plane(24) for _ in range(9)))],
    "many planes of odd sizes": [layer(*(plane(7, gap=2, offset=i) for i in range(9)))],
    "different strides": [layer(*(plane(64, gap=16 * i, offset=32 * i) for i in range(6)))],
    "layers of different sizes": [layer(*(plane(64) for _ in range(6))), layer(plane(48)), layer(*[plane(32)] * 1)],
    "two windows": [layer(*(plane(64) for _ in range(6))), layer(*(plane(40) for _ in range(5)))],
    "an odd row before a window": [layer(plane(13)), layer(*(plane(64) for _ in range(6)))],
    "planes in series": [LayerLayout.of(rows, BLOCKS) for rows in SPACED[:6]],
    "planes in series, backwards": [LayerLayout.of(rows, BLOCKS) for rows in SPACED[5::-1]],
    "two series and one alone": [LayerLayout.of(SPACED[i], BLOCKS) for i in (0, 2, 4, 5, 6, 7, 19)],
    "one storage, interleaved": [
        LayerLayout.of(torch.randint(0, 127, (BLOCKS, 6, 32), generator=FILL)[:, i], BLOCKS) for i in range(6)
    ],
}


def mover(
    layouts: Sequence[LayerLayout], way: RowCopy | None = None, padding: int = 0
) -> tuple[SlotMover, torch.Tensor]:
    nbytes = sum(each.block_nbytes for each in layouts)
    slot_nbytes = nbytes + padding if padding else nbytes
    # A pool lies behind its headers, in one storage with them.
    memory = torch.full((HEADERS + SLOTS * slot_nbytes,), 238, dtype=torch.uint8)
    pool = memory[HEADERS:].view(SLOTS, slot_nbytes)
    return SlotMover(layouts, pool, zlib.crc32, way), pool


def block(layouts: Sequence[LayerLayout], number: int) -> torch.Tensor:
    return torch.cat([p[number] for each in layouts for p in each.planes])


def everything(layouts: Sequence[LayerLayout]) -> list[torch.Tensor]:
    """All memory under the planes, gaps too."""
    planes = [p for each in layouts for p in each.planes]
    return [torch.empty(0, dtype=torch.uint8).set_(p.untyped_storage()).clone() for p in planes]


pairs = st.lists(st.integers(0, BLOCKS - 1), unique=True).flatmap(
    lambda ids: st.tuples(
        st.just(ids), st.permutations(range(SLOTS)).map(lambda s: list(s)[: len(ids)]) | st.just(list(range(len(ids))))
    )
)


@pytest.fixture(params=["compiled", "by memcpy"])
def way(request: pytest.FixtureRequest) -> RowCopy | None:
    """Either way of moving rows."""
    if request.param == "by memcpy":
        return None
    compiled = row_copy()
    assert compiled is not None
    return compiled


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pair=pairs, padding=st.sampled_from([0, 1, 16, 100]))
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_round_trip_and_nothing_else_is_touched(
    way: RowCopy | None, name: str, pair: tuple[list[int], list[int]], padding: int
) -> None:
    layouts, (ids, slots) = LAYOUTS[name], pair
    move, pool = mover(layouts, way, padding)
    before = everything(layouts)
    assert move.save(ids, slots) == []
    nbytes = move.block_nbytes
    for number, slot in zip(ids, slots, strict=True):
        assert torch.equal(pool[slot, :nbytes], block(layouts, number))
    assert pool[:, nbytes:].eq(238).all(), "padding"
    assert torch.empty(0, dtype=torch.uint8).set_(pool.untyped_storage())[:HEADERS].eq(238).all(), "headers"
    assert pool[[s for s in range(SLOTS) if s not in slots]].eq(238).all(), "other slots"
    assert all(map(torch.equal, before, everything(layouts)))

    for number in ids:
        for each in layouts:
            for p in each.planes:
                p[number] = 0
    assert move.load(slots, ids) == []
    assert all(map(torch.equal, before, everything(layouts)))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("slots", [[2, 3, 4, 5], [8, 0, 3, 2]])
def test_a_bad_slot_is_named_and_not_copied(way: RowCopy | None, name: str, slots: list[int]) -> None:
    layouts, ids = LAYOUTS[name], [6, 1, 0, 3]
    move, pool = mover(layouts, way, padding=16)
    sums = move.save(ids, slots, checksums=True)
    assert sums == [zlib.crc32(block(layouts, number).numpy()) for number in ids]
    assert move.load(slots, ids, expect=sums) == []
    pool[slots[1], move.block_nbytes - 1] ^= 1
    pool[slots[3], 0] ^= 128
    pool[slots[2], move.block_nbytes :] = 0  # padding is nobody's
    before = everything(layouts)
    for number in (6, 0):
        for each in layouts:
            for p in each.planes:
                p[number] = 0
    assert move.load(slots, ids, expect=sums) == [1, 3]
    assert all(map(torch.equal, before, everything(layouts))), "the good ones are back, the bad ones untouched"


@pytest.mark.parametrize(
    ("ids", "slots"), [([0, BLOCKS], [0, 1]), ([-1, 0], [0, 1]), ([0, 1], [0, SLOTS]), ([0, 1], [0, -1])]
)
@pytest.mark.parametrize("name", ["one plane", "many planes of 16-byte words"])
def test_an_id_out_of_range_is_an_error_before_anything_is_copied(name: str, ids: list[int], slots: list[int]) -> None:
    layouts = LAYOUTS[name]
    move, pool = mover(layouts)
    before = everything(layouts)
    with pytest.raises(IndexError):
        move.save(ids, slots)
    with pytest.raises(IndexError):
        move.load(slots, ids)
    assert pool.eq(238).all() and all(map(torch.equal, before, everything(layouts)))


def test_what_is_compared_in_turns_is_all_compared(way: RowCopy | None, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = LAYOUTS["many planes of 16-byte words"]
    monkeypatch.setattr(slot_copy, "_RUN_NBYTES", 3 * layouts[0].block_nbytes)
    move, pool = mover(layouts, way)
    ids, slots = [3, 2, 6, 0, 1, 5], [4, 5, 6, 7, 1, 3]
    sums = move.save(ids, slots, checksums=True)
    assert sums == [zlib.crc32(block(layouts, number).numpy()) for number in ids]
    before = everything(layouts)
    for bad in (4, 6, 3):
        pool[bad, 0] ^= 1
    for each in layouts:
        for p in each.planes:
            p[[2, 0, 1]] = 0
    assert move.load(slots, ids, expect=sums) == [0, 2, 5]
    assert all(map(torch.equal, before, everything(layouts)))


def test_the_caller_may_say_what_is_sound(way: RowCopy | None) -> None:
    """By place and checksum; what is not sound is not copied."""
    layouts = LAYOUTS["many planes of 16-byte words"]
    move, pool = mover(layouts, way)
    ids, slots = [3, 2, 6], [4, 5, 1]
    sums = move.save(ids, slots, checksums=True)
    before = everything(layouts)
    pool[5, 0] ^= 1
    for each in layouts:
        for p in each.planes:
            p[[3, 6]] = 0
    found: dict[int, int] = {}

    def sound(place: int, checksum: int) -> bool:
        found[place] = checksum
        return checksum == sums[place]

    assert move.load(slots, ids, sound=sound) == [1]
    assert (found[0], found[2], found[1] != sums[1]) == (sums[0], sums[2], True)
    assert all(map(torch.equal, before, everything(layouts)))


def test_the_way_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mover, run over CPU memory."""
    layouts = LAYOUTS["layers of different sizes"]
    planes = [p for each in layouts for p in each.planes]
    move, pool = mover(layouts, padding=8)
    gpu = slot_movers.Gpu(planes, pool)
    gpu.run = 2
    move._mover = gpu
    before, ids, slots = everything(layouts), [3, 2, 6], [8, 0, 4]
    sums = move.save(ids, slots, checksums=True)
    assert [bytes(pool[s, : move.block_nbytes].numpy()) for s in slots] == [
        bytes(block(layouts, number).numpy()) for number in ids
    ]
    for p in planes:
        p[ids] = 0
    assert move.load(slots, ids, expect=sums) == []
    assert all(map(torch.equal, before, everything(layouts)))
    assert move.save([], []) == [] and move.load([], []) == []


def test_what_can_not_be_is_an_error() -> None:
    layouts = LAYOUTS["one plane"]
    move, _ = mover(layouts)
    with pytest.raises(ValueError):
        move.save([1], [1, 2])
    with pytest.raises(ValueError):
        move.load([1], [1], expect=[])
    with pytest.raises(ValueError, match="does not fit"):
        SlotMover(layouts, torch.zeros(SLOTS, 255, dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8"):
        SlotMover(layouts, torch.zeros(SLOTS, 256))
    with pytest.raises(ValueError, match="as many blocks"):
        SlotMover([*layouts, LayerLayout(3, (torch.zeros(3, 8, dtype=torch.uint8),), 8)], torch.zeros(SLOTS, 300))
