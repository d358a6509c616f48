"""Find the blocks in a layer's KV tensor and copy them as bytes.

Backends lay a layer out differently: [blocks, heads, tokens, 2*size], [2, blocks, tokens, heads, size],
padded pages, several layers interleaved in one storage. What they share is a block dimension. `blocks_view`
turns any of them into **planes**: byte matrices [num_blocks, nbytes] over the same memory, one row per
block. A block's bytes are its rows of all planes, in order; that order depends on the tensor's shape and
strides alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_MAX_PLANES = 1024  # more means the bytes of a block are scattered: copying by plane would crawl


def blocks_view(tensor: torch.Tensor, num_blocks: int, block_dim: int | None = None) -> list[torch.Tensor]:
    """Planes of `tensor`: uint8 views of shape [num_blocks, nbytes], each row contiguous.

    The block dimension is the first of size `num_blocks`, or else of a multiple of it (a block of the
    scheduler may be several of the kernel's). Name it with `block_dim` where that is ambiguous. Raises
    ValueError if there is none.
    """
    dim = _find_block_dim(tensor.shape, num_blocks) if block_dim is None else block_dim
    per_block, rest = divmod(tensor.shape[dim], num_blocks)
    if rest or per_block == 0:
        raise ValueError(f"Dimension {dim} of {tuple(tensor.shape)} does not hold {num_blocks} blocks.")
    block_stride = tensor.stride(dim) * per_block
    inside = [(tensor.stride(d), tensor.shape[d]) for d in range(tensor.dim()) if d != dim]
    inside.append((tensor.stride(dim), per_block))
    run, outer = _collapse([(stride, size) for stride, size in inside if size > 1])
    if num_blocks > 1 and block_stride < run:
        raise ValueError(f"Blocks overlap in a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}.")
    offsets = _offsets(outer, tensor)
    return [
        tensor.as_strided((num_blocks, run), (block_stride, 1), tensor.storage_offset() + offset).view(torch.uint8)
        for offset in offsets
    ]


@dataclass(frozen=True, eq=False)
class LayerLayout:
    """The planes of one layer (of all its tensors, where it has several) and how many bytes a block has in
    them.
    """

    num_blocks: int
    planes: tuple[torch.Tensor, ...]
    block_nbytes: int

    @classmethod
    def of(cls, layer: torch.Tensor | Sequence[torch.Tensor], num_blocks: int) -> LayerLayout:
        """Address `layer`; it keeps views of its memory. Raises ValueError if the blocks can't be found."""
        tensors = [layer] if isinstance(layer, torch.Tensor) else list(layer)
        planes = tuple(plane for tensor in tensors for plane in blocks_view(tensor, num_blocks))
        return cls(num_blocks, planes, sum(plane.shape[1] for plane in planes))


def read_blocks(planes: Sequence[torch.Tensor], block_ids: torch.Tensor, out: torch.Tensor) -> None:
    """Gather: row i of `out` (uint8, [len(block_ids), block_nbytes], rows may be padded) becomes block
    `block_ids[i]`.

    `block_ids` is int64 on the planes' device, and so is `out`, which must not overlap the planes. On CUDA
    this only launches work on the current stream.
    """
    for plane, part in _columns(planes, block_ids, out):
        torch.index_select(plane, 0, block_ids, out=part)


def write_blocks(planes: Sequence[torch.Tensor], block_ids: torch.Tensor, source: torch.Tensor) -> None:
    """Scatter, the reverse of `read_blocks`. `block_ids` must not repeat. An id out of range is an error
    (on CUDA an assertion on the device, which ends its context: check ids before).
    """
    for plane, part in _columns(planes, block_ids, source):
        plane.index_copy_(0, block_ids, part)


def copy_blocks(
    source: Sequence[torch.Tensor],
    source_ids: torch.Tensor,
    target: Sequence[torch.Tensor],
    target_ids: torch.Tensor,
) -> None:
    """Copy blocks between two sets of planes with equal block sizes, through one temporary buffer.

    The sets may be the same memory: all is read before anything is written. They must be on one device.
    """
    nbytes = sum(plane.shape[1] for plane in source)
    if nbytes != sum(plane.shape[1] for plane in target) or len(source_ids) != len(target_ids):
        raise ValueError("Source and target must have blocks of the same size and as many ids.")
    buffer = torch.empty((len(source_ids), nbytes), dtype=torch.uint8, device=source_ids.device)
    read_blocks(source, source_ids, buffer)
    write_blocks(target, target_ids, buffer)


def _find_block_dim(shape: Sequence[int], num_blocks: int) -> int:
    exact = [dim for dim, size in enumerate(shape) if size == num_blocks]
    multiple = [dim for dim, size in enumerate(shape[:2]) if size > num_blocks and size % num_blocks == 0]
    if not exact and not multiple:
        raise ValueError(f"No dimension of {tuple(shape)} holds {num_blocks} blocks.")
    # A wrong guess is wrong tokens, so two that could be meant are an error. They come with few blocks only:
    # [2, 2, ...] (keys and values, or blocks?), or kernel blocks in front of as many heads as blocks.
    keys_or_blocks = num_blocks == 2 and exact[:2] == [0, 1]
    kernel_or_heads = bool(exact and multiple and multiple[0] < exact[0])
    if keys_or_blocks or kernel_or_heads:
        raise ValueError(f"Which dimension of {tuple(shape)} holds the {num_blocks} blocks? Pass block_dim.")
    return (exact or multiple)[0]


def _collapse(dims: list[tuple[int, int]]) -> tuple[int, list[tuple[int, int]]]:
    """Merge dimensions of (stride, size) into one contiguous run of elements; return it and what is left
    outside.
    """
    run, outer = 1, []
    for stride, size in sorted(dims):
        if stride == run:
            run *= size
        elif stride > run:
            outer.append((stride, size))
        else:
            raise ValueError("Elements of a block overlap: an expanded tensor has no blocks of its own.")
    return run, outer


def _offsets(outer: list[tuple[int, int]], tensor: torch.Tensor) -> list[int]:
    if math.prod(size for _, size in outer) > _MAX_PLANES:
        raise ValueError(
            f"A block's bytes are scattered in a tensor of shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}: more than {_MAX_PLANES} pieces."
        )
    offsets = [0]
    for stride, size in sorted(outer, reverse=True):
        offsets = [offset + stride * index for offset in offsets for index in range(size)]
    return offsets


def _columns(
    planes: Sequence[torch.Tensor], block_ids: torch.Tensor, buffer: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair each plane with its columns of the buffer, both seen in the widest words that fit."""
    nbytes = sum(plane.shape[1] for plane in planes)
    if buffer.dtype != torch.uint8 or tuple(buffer.shape) != (len(block_ids), nbytes):
        raise ValueError(
            f"The buffer must be uint8 [{len(block_ids)}, {nbytes}], not {buffer.dtype} {list(buffer.shape)}."
        )
    pairs, start = [], 0
    for plane in planes:
        part = buffer[:, start : start + plane.shape[1]]
        start += plane.shape[1]
        pairs.append(_widest(plane, part))
    return pairs


def _widest(plane: torch.Tensor, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # index_copy_ on uint8 runs at 2 GB/s on a CPU, on int64 at 10 to 13 (measured, rows of 16 and 128 KiB).
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(_fits(tensor, dtype.itemsize) for tensor in (plane, part)):
            return plane.view(dtype), part.view(dtype)
    return plane, part


def _fits(tensor: torch.Tensor, width: int) -> bool:
    return not (tensor.shape[1] % width or tensor.stride(0) % width or tensor.storage_offset() % width)
