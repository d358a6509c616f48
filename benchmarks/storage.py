"""How fast bytes move between a KV cache, the host pool and the disk pool, beside what the machine itself can do.

    python -m benchmarks.storage [--disk FOLDER] [--json] [--mib N] [--rounds N]

One thread. Every figure of a round is divided by that round's yardstick: for the host pool a memcpy of the same bytes
into the same slots, a call for each block, from blocks that lie in one piece; for the disk plain sequential I/O, in
blocks of 8 MiB past the page cache. A table shows the median of these ratios, the lowest and the highest. In memory
the thread's processor time counts, so that other processes take none of it.

A block is 128 KiB to 2 MiB, in pieces of 4 to 128 KiB, one in each plane (a layer's keys, or values, or both): mappings
of their own, as an engine's are. Their number of blocks is odd: where planes are a power of two apart, the pieces of a
block compete for the same sets of the caches, and all of this is a fifth slower. Blocks are shuffled, 64 to a job;
slots are in runs, as a pool hands them out, or shuffled, which costs a call for each block.

What limits it: every piece is a new stream for the memory, so that a loop of memcpys in C, without Python, has 0.85 to
1 of the yardstick for pieces of 4 and 16 KiB; torch's calls, 3 us each; and the checksum, which runs at 2 to 2.7 times
the yardstick's speed, so that a copy at 0.9 is one at 0.6 to 0.67 with it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import repeat
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from raykv.kvcache.blocks import LayerLayout
from raykv.kvcache.shm import move_to_shm
from raykv.kvcache.slot_copy import SlotMover
from raykv.storage.checksum import checksum
from raykv.storage.disk_pool import DiskPool, aligned_buffer
from raykv.storage.host_pool import HostPool
from raykv.storage.row_copy import row_copy

KIB, MIB = 1 << 10, 1 << 20
BLOCKS = (128 * KIB, 512 * KIB, 2048 * KIB)
PIECES = (4 * KIB, 16 * KIB, 64 * KIB, 128 * KIB)
JOB = 64  # blocks
WORKS = ("KV cache → host", "and checksums", "host → KV cache", "and checksums compared")


@dataclass(frozen=True)
class Line:
    """One line of the table: ratios to `limit`, whose own median is `limit_gbs` (10^9 bytes a second)."""

    what: str
    shape: str
    limit: str
    limit_gbs: float
    ratios: tuple[float, ...]


def seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    started = clock()
    work()
    return clock() - started


def compare(
    limit: str,
    by: Callable[[], object],
    works: dict[str, Callable[[], object]],
    shape: str,
    nbytes: int,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Line]:
    for work in (by, *works.values()):
        work()  # page faults are not what is measured
    base: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        base.append(seconds(by, clock))
        for name, work in works.items():
            ratios[name].append(base[-1] / seconds(work, clock))
    return [Line(name, shape, limit, nbytes / median(base) / 1e9, tuple(got)) for name, got in ratios.items()]


def memory(block: int, piece: int, shuffled: bool, nbytes: int, rounds: int) -> list[Line]:
    planes, blocks = block // piece, nbytes // block // 2 * 2 - 1
    nbytes = blocks * block
    layouts = [LayerLayout.of(shared((blocks, piece)), blocks) for _ in range(planes)]
    whole = shared((blocks, block))
    pool = HostPool.open(f"/dev/shm/raykv-bench-{os.getpid()}", 2 * blocks, block)
    memcpy = ctypes.PyDLL(None).memcpy
    memcpy.argtypes, memcpy.restype = (ctypes.c_size_t,) * 3, None
    try:
        move = SlotMover(layouts, pool.slots, checksum, row_copy())
        ids = random.sample(range(blocks), blocks)
        first = random.randrange(blocks)
        slots = random.sample(range(2 * blocks), blocks) if shuffled else list(range(first, first + blocks))
        jobs = [slice(start, start + JOB) for start in range(0, blocks, JOB)]
        sources = [whole.data_ptr() + i * block for i in ids]
        targets = [pool.slots.data_ptr() + slot * block for slot in slots]
        sums = [number for job in jobs for number in move.save(ids[job], slots[job], checksums=True)]
        works: dict[str, Callable[[], object]] = {
            WORKS[0]: lambda: [move.save(ids[job], slots[job]) for job in jobs],
            WORKS[1]: lambda: [move.save(ids[job], slots[job], checksums=True) for job in jobs],
            WORKS[2]: lambda: [move.load(slots[job], ids[job]) for job in jobs],
            WORKS[3]: lambda: [move.load(slots[job], ids[job], expect=sums[job]) for job in jobs],
        }
        shape = f"{block // KIB} KiB = {planes} x {piece // KIB}|{'shuffled' if shuffled else 'in runs'}"
        assert move.load(slots, ids, expect=sums) == []
        copy = lambda: deque(map(memcpy, targets, sources, repeat(block)), maxlen=0)  # noqa: E731
        # What a memcpy wrote is no block of these sums: they are saved again.
        works = {"": lambda: move.save(ids, slots), **works}
        return compare("memcpy", copy, works, shape, nbytes, rounds, time.thread_time)[1:]
    finally:
        pool.close(remove=True)


def shared(shape: tuple[int, int]) -> torch.Tensor:
    """Memory as an engine's KV cache has it once it is shared: a memfd of its own."""
    tensor = torch.ones(shape, dtype=torch.uint8)
    _, fd = move_to_shm(tensor.untyped_storage())
    os.close(fd)
    return tensor


def disk(folder: str, block: int, nbytes: int, rounds: int) -> list[Line]:
    slots = nbytes // block
    pool = DiskPool.open(os.path.join(folder, "pool"), slots, block)
    plain = os.open(os.path.join(folder, "plain"), os.O_RDWR | os.O_CREAT | (os.O_DIRECT if pool.direct else 0), 0o600)
    try:
        os.posix_fallocate(plain, 0, nbytes)
        big, data = aligned_buffer(8 * MIB).fill_(1), aligned_buffer(block).fill_(1)
        view, one = memoryview(big.numpy()), memoryview(data.numpy())
        order = random.sample(range(slots), slots)
        steps = range(0, nbytes, len(view))
        lines = compare(
            "disk, sequential write",
            lambda: [os.pwrite(plain, view, at) for at in steps],
            {
                "the same blocks, plain": lambda: [os.pwrite(plain, one, slot * block) for slot in order],
                "host → disk": lambda: [pool.write(slot, data) for slot in order],
            },
            f"{block // KIB} KiB, slots shuffled",
            nbytes,
            rounds,
        )
        lines += compare(
            "disk, sequential read",
            lambda: [os.preadv(plain, [view], at) for at in steps],
            {
                "the same blocks, plain": lambda: [os.preadv(plain, [one], slot * block) for slot in order],
                "disk → host": lambda: [pool.read(slot, block, data) for slot in order],
            },
            f"{block // KIB} KiB, slots shuffled",
            nbytes,
            rounds,
        )
        return lines
    finally:
        os.close(plain)
        pool.close(remove=True)


def show_memory(lines: list[Line]) -> None:
    table = Table("block", "slots", "memcpy", *WORKS, title="KV cache and host pool", title_justify="left")
    for start in range(0, len(lines), len(WORKS)):
        row = lines[start : start + len(WORKS)]
        table.add_row(*row[0].shape.split("|"), f"{row[0].limit_gbs:.1f} GB/s", *map(ratio, row))
    Console(width=140).print(table)


def show_disk(lines: list[Line]) -> None:
    table = Table("", "block", "against", "ratio", title="Host and disk pool", title_justify="left")
    for line in lines:
        table.add_row(line.what, line.shape, f"{line.limit}, {line.limit_gbs:.1f} GB/s", ratio(line))
    Console(width=140).print(table)


def ratio(line: Line) -> str:
    return f"{median(line.ratios):.2f}  [dim]{min(line.ratios):.2f} to {max(line.ratios):.2f}[/]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--disk", help="a folder on the disk to measure; default: the temporary one")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--mib", type=int, default=96, help="bytes moved per figure, in MiB")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    nbytes = arguments.mib * MIB
    lines = [
        line
        for block in BLOCKS
        for piece in PIECES
        for shuffled in (False, True)
        if piece <= block
        for line in memory(block, piece, shuffled, nbytes, arguments.rounds)
    ]
    disks: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="raykv-bench-", dir=arguments.disk) as folder:
        for block in BLOCKS:
            disks += disk(folder, block, nbytes // 8 // MIB * 8 * MIB, arguments.rounds)
    if arguments.json:
        print(json.dumps([asdict(line) for line in lines + disks]))
    else:
        show_memory(lines)
        show_disk(disks)


if __name__ == "__main__":
    main()
