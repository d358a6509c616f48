import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.kvcache.blocks import LayerLayout, blocks_view, copy_blocks, read_blocks, write_blocks
from tests.support.examples import examples

BLOCKS = 11
FILL = torch.Generator().manual_seed(0)


def random(*shape, dtype=torch.float32):
    return torch.randint(0, 127, shape, generator=FILL).to(dtype)


def padded():
    return random(BLOCKS * 100, dtype=torch.int8).as_strided((BLOCKS, 60), (100, 1), 7)


# name -> (tensor, number of planes, function that takes one block of it)
LAYOUTS = {
    "blocks first": (random(BLOCKS, 2, 8, 32), 1, lambda t, b: t[b]),
    "keys and values first": (random(2, BLOCKS, 8, 2, 16), 2, lambda t, b: t[:, b]),
    "heads inside by stride": (random(BLOCKS, 8, 2, 32).permute(0, 2, 1, 3), 1, lambda t, b: t[b]),
    "blocks first in memory only": (random(BLOCKS, 2, 8, 32).transpose(0, 1), 1, lambda t, b: t[:, b]),
    "one layer of many": (random(BLOCKS, 3, 8, 32)[:, 1], 1, lambda t, b: t[b]),
    "heads outside": (random(4, BLOCKS, 8, 32).transpose(0, 1), 4, lambda t, b: t[b]),
    "padded page, odd offset": (padded(), 1, lambda t, b: t[b]),
    "half precision": (random(BLOCKS, 3, 5, dtype=torch.bfloat16), 1, lambda t, b: t[b]),
    "kernel blocks": (random(BLOCKS * 4, 2, 8), 1, lambda t, b: t[b * 4 : b * 4 + 4]),
    "kernel blocks after keys and values": (
        random(2, BLOCKS * 4, 8),
        2,
        lambda t, b: t[:, b * 4 : b * 4 + 4],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_planes_hold_exactly_the_bytes_of_each_block(name):
    tensor, planes_expected, take = LAYOUTS[name]
    planes = blocks_view(tensor, BLOCKS)
    assert len(planes) == planes_expected
    for block in range(BLOCKS):
        wanted = take(tensor, block)
        assert sum(p.shape[1] for p in planes) == wanted.numel() * wanted.element_size()
        before = tensor.clone()
        for plane in planes:
            assert plane.dtype == torch.uint8 and plane.shape[0] == BLOCKS and plane.stride(1) == 1
            plane[block] = 0
        assert not take(tensor, block).any()
        changed = tensor != before
        take(changed, block).fill_(False)
        assert not changed.any()  # and nobody else's
        tensor.copy_(before)


@given(data=st.data(), name=st.sampled_from(sorted(LAYOUTS)))
@settings(max_examples=examples(30), deadline=None)
def test_what_is_read_and_written_back_is_the_same(data, name):
    tensor, _, take = LAYOUTS[name]
    ids = data.draw(st.lists(st.integers(0, BLOCKS - 1), unique=True))
    targets = data.draw(st.permutations(range(BLOCKS)))[: len(ids)]
    original, target = tensor.clone(), tensor.clone().zero_()
    source_ids = torch.tensor(ids, dtype=torch.int64)
    layout, into = LayerLayout.of(tensor, BLOCKS), LayerLayout.of(target, BLOCKS)
    if [p.shape for p in layout.planes] != [p.shape for p in into.planes]:
        return  # a clone without the original's strides: its blocks have their bytes in another order
    copy_blocks(layout.planes, source_ids, into.planes, torch.tensor(targets, dtype=torch.int64))
    for source, aim in zip(ids, targets, strict=True):
        assert torch.equal(take(target, aim), take(original, source))
    for block in set(range(BLOCKS)) - set(targets):
        assert not take(target, block).any()
    assert torch.equal(tensor, original)


@given(st.permutations(range(BLOCKS)))
def test_copying_within_one_memory_reads_before_it_writes(order):
    tensor = random(BLOCKS, 4, 8)
    before = tensor.clone()
    planes = blocks_view(tensor, BLOCKS)
    copy_blocks(planes, torch.arange(BLOCKS), planes, torch.tensor(order))
    assert torch.equal(tensor[list(order)], before)


def test_slots_of_several_layers_are_filled_through_padded_columns():
    layers = [
        random(BLOCKS, 16),
        [random(BLOCKS, 3, dtype=torch.int8), random(BLOCKS, 5, dtype=torch.float64)],
    ]
    layouts = [LayerLayout.of(layer, BLOCKS) for layer in layers]
    assert [layout.block_nbytes for layout in layouts] == [64, 43]
    ids = torch.tensor([7, 0, 3])
    slots = torch.zeros(3, 128, dtype=torch.uint8)
    read_blocks(layouts[0].planes, ids, slots[:, :64])
    read_blocks(layouts[1].planes, ids, slots[:, 64:107])
    assert torch.equal(slots[1, :64].view(torch.float32), layers[0][0])
    expected = [layer.clone() for layer in (layers[0], *layers[1])]
    for layer in (layers[0], *layers[1]):
        layer[ids] = 0
    write_blocks(layouts[0].planes, ids, slots[:, :64])
    write_blocks(layouts[1].planes, ids, slots[:, 64:107])
    assert all(torch.equal(a, b) for a, b in zip((layers[0], *layers[1]), expected, strict=True))
    assert not slots[:, 107:].any()


def test_no_blocks_is_no_work():
    tensor = random(BLOCKS, 8)
    before, planes = tensor.clone(), blocks_view(tensor, BLOCKS)
    copy_blocks(planes, torch.tensor([], dtype=torch.int64), planes, torch.tensor([], dtype=torch.int64))
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("ids", [[BLOCKS], [-1]])
def test_an_id_out_of_range_is_an_error_and_writes_nothing(ids):
    tensor = random(BLOCKS, 8)
    before, planes = tensor.clone(), blocks_view(tensor, BLOCKS)
    buffer = torch.zeros(1, 32, dtype=torch.uint8)
    with pytest.raises((IndexError, RuntimeError)):
        read_blocks(planes, torch.tensor(ids), buffer)
    with pytest.raises((IndexError, RuntimeError)):
        write_blocks(planes, torch.tensor(ids), buffer)
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("shape", [(2, 2, 8), (32, 16, 8)])
def test_two_possible_block_dimensions_are_an_error_unless_named(shape):
    tensor = random(*shape)
    num_blocks = shape[1]
    with pytest.raises(ValueError, match="block_dim"):
        blocks_view(tensor, num_blocks)
    assert len(blocks_view(tensor, num_blocks, block_dim=1)) == shape[0]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(7, 8), "No dimension"),
        (torch.zeros(1, 8).expand(BLOCKS, 8), "overlap"),
        (torch.zeros(8, 1).expand(8, BLOCKS), "overlap"),
        (torch.zeros(BLOCKS, 1).expand(BLOCKS, 8), "overlap"),
        (torch.zeros(4096, BLOCKS), "scattered"),
        (torch.zeros(100).as_strided((BLOCKS, 10), (5, 1)), "overlap"),
    ],
)
def test_a_tensor_without_blocks_of_its_own_is_an_error(tensor, message):
    with pytest.raises(ValueError, match=message):
        blocks_view(tensor, BLOCKS)


def test_buffers_of_another_size_are_an_error():
    planes = blocks_view(random(BLOCKS, 8), BLOCKS)
    with pytest.raises(ValueError, match="uint8"):
        read_blocks(planes, torch.tensor([1]), torch.zeros(1, 8))
    with pytest.raises(ValueError, match="same size"):
        copy_blocks(planes, torch.tensor([1]), planes, torch.tensor([1, 2]))
