"""How fast bytes move between a KV cache, the host pool and the disk pool, beside what the machine itself can do.

    python -m benchmarks.storage [--disk FOLDER] [--json] [--mib N] [--rounds N]

One thread. Every figure of a round is taken right after that round's memcpy (or the disk's plain sequential I/O, in
blocks of 8 MiB past the page cache) and divided by it; the table shows the median of these ratios, the lowest and the
highest. Blocks are shuffled; slots are shuffled, or in order as a pool that fills up hands them out.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from raykv.kvcache.blocks import LayerLayout
from raykv.kvcache.slot_copy import SlotMover
from raykv.storage.checksum import checksum
from raykv.storage.disk_pool import DiskPool, aligned_buffer
from raykv.storage.host_pool import HostPool

KIB, MIB = 1 << 10, 1 << 20
# planes, bytes of a row, slots shuffled?
SHAPES = (
    (1, 128 * KIB, True),
    (1, 1024 * KIB, True),
    (8, 16 * KIB, True),
    (8, 16 * KIB, False),
    (32, 4 * KIB, True),
    (32, 4 * KIB, False),
    (16, 64 * KIB, True),
    (64, 16 * KIB, True),
    (64, 16 * KIB, False),
    (64, 64 * KIB, True),
)


@dataclass(frozen=True)
class Line:
    """One line of the table: ratios to `limit`, whose own median is `limit_gbs` (10^9 bytes a second)."""

    what: str
    shape: str
    limit: str
    limit_gbs: float
    ratios: tuple[float, ...]


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(
    limit: str, by: Callable[[], object], works: dict[str, Callable[[], object]], shape: str, nbytes: int, rounds: int
) -> list[Line]:
    for work in (by, *works.values()):
        work()  # page faults are not what is measured
    base: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        base.append(seconds(by))
        for name, work in works.items():
            ratios[name].append(base[-1] / seconds(work))
    return [Line(name, shape, limit, nbytes / median(base) / 1e9, tuple(got)) for name, got in ratios.items()]


def memory(planes: int, row: int, shuffled: bool, nbytes: int, rounds: int) -> list[Line]:
    blocks, block = nbytes // (planes * row), planes * row
    nbytes = blocks * block
    layouts = [LayerLayout.of(torch.ones((blocks, row), dtype=torch.uint8), blocks) for _ in range(planes)]
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    pool = HostPool.open(f"/dev/shm/raykv-bench-{os.getpid()}", blocks, block)
    try:
        move = SlotMover(layouts, pool.slots, checksum)
        ids, slots = random.sample(range(blocks), blocks), list(range(blocks))
        if shuffled:
            random.shuffle(slots)
        sums = move.save(ids, slots, checksums=True)
        works: dict[str, Callable[[], object]] = {
            "KV cache → host": lambda: move.save(ids, slots),
            "KV cache → host, checksums": lambda: move.save(ids, slots, checksums=True),
            "host → KV cache": lambda: move.load(slots, ids),
            "host → KV cache, checksums": lambda: move.load(slots, ids, expect=sums),
        }
        shape = f"{block // KIB} KiB = {planes} x {row // KIB}, slots {'shuffled' if shuffled else 'in order'}"
        copy = lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)  # noqa: E731
        assert move.load(slots, ids, expect=sums) == []
        return compare("memcpy", copy, works, shape, nbytes, rounds)
    finally:
        pool.close(remove=True)


def disk(folder: str, block: int, nbytes: int, rounds: int) -> list[Line]:
    slots = nbytes // block
    pool = DiskPool.open(os.path.join(folder, "pool"), slots, block)
    plain = os.open(os.path.join(folder, "plain"), os.O_RDWR | os.O_CREAT | (os.O_DIRECT if pool.direct else 0), 0o600)
    try:
        os.posix_fallocate(plain, 0, nbytes)
        big, data = aligned_buffer(8 * MIB).fill_(1), aligned_buffer(block).fill_(1)
        view = memoryview(big.numpy())
        order = random.sample(range(slots), slots)
        steps = range(0, nbytes, len(view))
        lines = compare(
            "disk, sequential write",
            lambda: [os.pwrite(plain, view, at) for at in steps],
            {"host → disk": lambda: [pool.write(slot, data) for slot in order]},
            f"{block // KIB} KiB, slots shuffled",
            nbytes,
            rounds,
        )
        lines += compare(
            "disk, sequential read",
            lambda: [os.preadv(plain, [view], at) for at in steps],
            {"disk → host": lambda: [pool.read(slot, block, data) for slot in order]},
            f"{block // KIB} KiB, slots shuffled",
            nbytes,
            rounds,
        )
        return lines
    finally:
        os.close(plain)
        pool.close(remove=True)


def show(lines: list[Line]) -> None:
    table = Table("", "block", "against", "ratio", title="Where a tier's bytes live", title_justify="left")
    for line in lines:
        low, high = min(line.ratios), max(line.ratios)
        ratio = f"{median(line.ratios):.2f}  [dim]{low:.2f} to {high:.2f}[/]"
        table.add_row(line.what, line.shape, f"{line.limit}, {line.limit_gbs:.1f} GB/s", ratio)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--disk", help="a folder on the disk to measure; default: the temporary one")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--mib", type=int, default=64, help="bytes moved per figure, in MiB")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    nbytes = arguments.mib * MIB
    lines = [line for shape in SHAPES for line in memory(*shape, nbytes, arguments.rounds)]
    with tempfile.TemporaryDirectory(prefix="raykv-bench-", dir=arguments.disk) as folder:
        for block in (128 * KIB, 1024 * KIB, 4096 * KIB):
            lines += disk(folder, block, nbytes // 8 // MIB * 8 * MIB, arguments.rounds)
    if arguments.json:
        print(json.dumps([asdict(line) for line in lines]))
    else:
        show(lines)


if __name__ == "__main__":
    main()
