"""`raykv bench`: how fast this machine moves the bytes of a tier, beside what it can do at all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import click

from raykv.api.shown import table
from raykv.api.words import nbytes, show_nbytes
from raykv.cli.base import command, out
from raykv.errors import ConfigError

ROUNDS = 3
LEAST = 64 << 20


@command("bench")
@click.option("--size", default="256MiB", show_default=True, help="Bytes moved per figure; twice that is taken.")
@click.option("--block", default="1MiB", show_default=True, help="Bytes of a block, a multiple of 4KiB.")
@click.option("--disk", "folder", help="Also measure a disk tier in this folder.")
def bench_command(size: str, block: str, folder: str | None) -> dict[str, Any]:
    """Measure copies into a host tier's memory against memcpy, and a disk tier against plain I/O. Seconds.

    One thread; starts no cluster and touches none. What a GPU's KV cache adds, `python -m benchmarks.storage` of the
    source tree measures.
    """
    whole, one = nbytes(size, "--size", LEAST), nbytes(block, "--block")
    if one % 4096 or one > whole // 4:
        raise ConfigError(f"--block is {block}. It must be a multiple of 4KiB, and at most a quarter of --size.")
    count = whole // one
    figures = list(_host(count, one))
    if folder is not None:
        figures += list(_disk(folder, count, one))
    rows = [(f["what"], f"{f['gbs']:.2f} GB/s", f"{f['ratio']:.2f}", f["against"]) for f in figures]
    out.print(table(("", "speed#", "ratio#", "against"), rows, f"{count} blocks of {show_nbytes(one)}, shuffled"))
    return {"block": one, "blocks": count, "figures": figures}


def _seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """The median of some rounds, after one that is not counted: page faults are not what is measured."""
    work()
    taken = []
    for _ in range(ROUNDS):
        begun = clock()
        work()
        taken.append(clock() - begun)
    return median(taken)


def _figure(what: str, against: str, moved: int, seconds: float, limit: float) -> dict[str, Any]:
    return {"what": what, "against": against, "gbs": moved / seconds / 1e9, "ratio": limit / seconds}


def _host(count: int, block: int) -> Iterator[dict[str, Any]]:
    """From one half of a pool to the other, so that both are memory as a store's is.

    The thread's own processor time counts, so that other processes take none of it.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported, which is now
    from raykv.storage.checksum import checksum
    from raykv.storage.host_pool import HostPool

    pool = HostPool.open(f"/dev/shm/raykv-bench-{os.getpid()}", 2 * count, block)
    try:
        slots, base = pool.slots, pool.slots.data_ptr()
        pairs = list(
            zip(random.sample(range(count), count), random.sample(range(count, 2 * count), count), strict=True)
        )
        memcpy = ctypes.CDLL(None).memcpy
        memcpy.argtypes, memcpy.restype = (ctypes.c_size_t,) * 3, None

        def copied() -> None:
            for source, target in pairs:
                slots[target].copy_(slots[source])

        def checked() -> None:
            for source, target in pairs:
                slots[target].copy_(slots[source])
                checksum(slots[target])

        def plainly() -> None:
            for source, target in pairs:
                memcpy(base + target * block, base + source * block, block)

        limit, moved = _seconds(plainly, time.thread_time), count * block
        yield _figure("memcpy", "-", moved, limit, limit)
        yield _figure("host tier", "memcpy", moved, _seconds(copied, time.thread_time), limit)
        yield _figure("host tier, with checksums", "memcpy", moved, _seconds(checked, time.thread_time), limit)
    finally:
        pool.close(remove=True)


def _disk(folder: str, count: int, block: int) -> Iterator[dict[str, Any]]:
    from raykv.storage.disk_pool import DiskPool, aligned_buffer

    if not os.path.isdir(folder):
        raise ConfigError(f"--disk is {folder!r}, which is no folder. Name one on the disk that is to be measured.")
    with tempfile.TemporaryDirectory(prefix="raykv-bench-", dir=folder) as place, contextlib.ExitStack() as stack:
        pool = DiskPool.open(os.path.join(place, "pool"), count, block)
        stack.callback(pool.close, True)
        fd = os.open(os.path.join(place, "plain"), os.O_RDWR | os.O_CREAT | (os.O_DIRECT if pool.direct else 0), 0o600)
        stack.callback(os.close, fd)
        os.posix_fallocate(fd, 0, count * block)
        data = aligned_buffer(block).fill_(1)
        view, order, moved = memoryview(data.numpy()), random.sample(range(count), count), count * block
        works: list[tuple[str, Callable[[int], object], Callable[[int], object]]] = [
            ("write", lambda slot: os.pwrite(fd, view, slot * block), lambda slot: pool.write(slot, data)),
            ("read", lambda slot: os.preadv(fd, [view], slot * block), lambda slot: pool.read(slot, block, data)),
        ]
        for name, plainly, ours in works:
            limit = _seconds(lambda do=plainly: [do(slot) for slot in order])  # type: ignore[misc]
            took = _seconds(lambda do=ours: [do(slot) for slot in order])  # type: ignore[misc]
            yield _figure(f"disk, plain {name}", "-", moved, limit, limit)
            yield _figure(f"disk tier, {name}", f"plain {name}", moved, took, limit)
