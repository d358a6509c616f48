"""What the Directory costs: memory for a block, time for a look-up, and how fast it takes what stores publish.

    python -m benchmarks.directory [--blocks N ...] [--large] [--json]

The book alone, in a fresh process for each size: four stores publish all blocks in batches of 10,000, then prefixes of
1000 blocks are looked up. Then a real Directory over Ray with as many blocks: the same look-up from another process,
beside the round trip of a call that does nothing, in turns; once more while a store publishes without a pause.
`--large` adds 10^7 blocks (about 1 GB for some minutes).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from raykv.core.block_marks import pack_keys
from raykv.core.directory_book import DirectoryBook
from raykv.core.prefix import block_key
from raykv.directory_messages import Locate, Publish
from raykv.store_messages import HASH_NBYTES
from raykv.types import StoreLife

PREFIX = 1000
ASKED = 500
STORES = 4
BATCH = 10_000
SIZES = (100_000, 1_000_000)
LARGE = 10_000_000
FINGERPRINT = bytes(16)
LIFE = StoreLife("bench")
PATIENCE = 60.0


def hashes_of(batch: int) -> bytes:
    """The block hashes of a batch: made when needed, since to keep them would hide what the index takes."""
    return random.Random(batch).randbytes(BATCH * HASH_NBYTES)


def batches(blocks: int) -> Iterator[Publish]:
    for number in range(blocks // BATCH):
        hashes = hashes_of(number)
        keys = (block_key(FINGERPRINT, 0, hashes[i : i + HASH_NBYTES]) for i in range(0, len(hashes), HASH_NBYTES))
        store = number % STORES
        yield Publish(f"node{store}", f"store{store}", LIFE, 0, number // STORES, pack_keys(keys))


def questions(blocks: int) -> list[Locate]:
    """Prefixes that one store holds, for blocks of one batch are of one store."""
    dice = random.Random(-1)
    asked = []
    for _ in range(ASKED):
        first = dice.randrange(BATCH - PREFIX) * HASH_NBYTES
        hashes = hashes_of(dice.randrange(blocks // BATCH))[first : first + PREFIX * HASH_NBYTES]
        asked.append(Locate((FINGERPRINT,), (0,), hashes, "elsewhere"))
    return asked


def rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def summary(taken: list[float]) -> dict[str, float]:
    return {"median_s": median(taken), "p99_s": quantiles(taken, n=100)[98]}


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def the_book(blocks: int) -> dict[str, Any]:
    """In this process, which should have done nothing else."""
    pack_keys([bytes(64)])
    book, spent, slowest, before = DirectoryBook(), 0.0, 0.0, rss()
    for batch in batches(blocks):
        taken = timed(lambda batch=batch: book.publish(batch, 0.0))
        spent, slowest = spent + taken, max(slowest, taken)
    nbytes, index, asked = rss() - before, book.nbytes, questions(blocks)
    cpu, look_ups = time.process_time(), []
    for one in asked:
        look_ups.append(timed(lambda one=one: book.locate(one)))
    cpu = time.process_time() - cpu
    assert all(book.locate(one)[0].blocks == PREFIX for one in asked[:20]), "the benchmark's own book lost a block"
    forget = timed(lambda: book.forget_nodes(["node0"]))
    steps = []
    while True:
        begun = time.perf_counter()
        more = book.sweep(1)
        steps.append(time.perf_counter() - begun)
        if not more:
            break
    return {
        "blocks": blocks,
        "index_nbytes": index,
        "rss_nbytes_per_block": nbytes / blocks,
        "published_keys_per_s": blocks / spent,
        "slowest_batch_s": slowest,
        "look_up": summary(look_ups),
        "look_up_cpu_s": cpu / ASKED,
        "forget_s": forget,
        "sweep_s": sum(steps),
        "sweep_step_s": max(steps),
    }


def fresh(blocks: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.directory", "--one", str(blocks)]
    answer: dict[str, Any] = json.loads(subprocess.check_output(command))
    return answer


def over_ray(blocks: int) -> dict[str, Any]:
    from raykv.actors import cluster, directory_handle
    from tests.support.ray_cluster import RayCluster

    ray_cluster = RayCluster()
    try:
        cluster.connect(ray_cluster.address)
        handle = directory_handle.open_directory()
        spent = []
        for batch in batches(blocks):
            begun = time.perf_counter()
            assert not handle.call("publish", batch, timeout=PATIENCE).again
            spent.append(time.perf_counter() - begun)
        asked = questions(blocks)
        idle = in_turns(handle, asked)
        stop = threading.Event()
        writer = threading.Thread(target=publish_on, args=(handle, stop))
        writer.start()
        try:
            busy = in_turns(handle, asked)
        finally:
            stop.set()
            writer.join()
        status = handle.call("status", timeout=PATIENCE)
        return {
            "blocks": blocks,
            "churned_index_nbytes_per_block": status.index_nbytes / status.keys,
            "publish": summary(spent),
            "published_keys_per_s": blocks / sum(spent),
            "idle": idle,
            "busy": busy,
        }
    finally:
        directory_handle.shutdown_directory()
        cluster.disconnect()
        ray_cluster.stop()


def in_turns(handle: Any, asked: list[Locate]) -> dict[str, Any]:
    nothing, found = [], []
    for one in asked:
        nothing.append(timed(lambda: handle.call("leave", "", "", LIFE, timeout=PATIENCE)))
        begun = time.perf_counter()
        located = handle.call("locate", one, timeout=PATIENCE)
        found.append(time.perf_counter() - begun)
        assert located.holders[0].blocks == PREFIX, "the benchmark's own Directory lost a block"
    return {
        "round_trip": summary(nothing),
        "look_up": summary(found),
        "look_ups_per_s": len(found) / sum(found),
        "ratio": median(found) / median(nothing),
    }


def publish_on(handle: Any, stop: threading.Event) -> None:
    """A store whose 10,000 blocks come and go, one batch after the other."""
    keys = pack_keys(block_key(FINGERPRINT, 1, random.Random(-i - 2).randbytes(HASH_NBYTES)) for i in range(BATCH))
    number = 0
    while not stop.is_set():
        added, removed = (keys, b"") if number % 2 == 0 else (b"", keys)
        handle.call("publish", Publish("busy", "busy", LIFE, 0, number, added, removed), timeout=PATIENCE)
        number += 1


def show(result: dict[str, Any], console: Console) -> None:
    def ms(one: dict[str, float]) -> str:
        return f"{one['median_s'] * 1e3:.2f} / {one['p99_s'] * 1e3:.2f} ms"

    table = Table(title=f"the Directory's book alone; look-ups of {PREFIX} blocks, median / p99")
    for title in (
        "blocks",
        "index",
        "memory a block",
        "look-up",
        "CPU a look-up",
        "publish",
        "forget",
        "sweep (a step)",
    ):
        table.add_column(title, justify="right")
    for one in result["book"]:
        table.add_row(
            f"{one['blocks']:,}",
            f"{one['index_nbytes'] / 2**20:.0f} MiB",
            f"{one['rss_nbytes_per_block']:.0f} bytes",
            ms(one["look_up"]),
            f"{one['look_up_cpu_s'] * 1e3:.2f} ms",
            f"{one['published_keys_per_s'] / 1e6:.2f} M keys/s",
            f"{one['forget_s'] * 1e6:.0f} us",
            f"{one['sweep_s']:.2f} s ({one['sweep_step_s'] * 1e3:.1f} ms)",
        )
    console.print(table)
    table = Table(title=f"over Ray; look-ups of {PREFIX} blocks, median / p99")
    for title in ("blocks", "", "nothing", "look-up", "look-up / nothing", "look-ups, one asker"):
        table.add_column(title, justify="right")
    for one in result["over_ray"]:
        for title, key in (("idle", "idle"), ("a store publishes", "busy")):
            found = one[key]
            table.add_row(
                f"{one['blocks']:,}",
                title,
                ms(found["round_trip"]),
                ms(found["look_up"]),
                f"{found['ratio']:.2f}",
                f"{found['look_ups_per_s']:.0f}/s",
            )
    console.print(table)
    for one in result["over_ray"]:
        console.print(
            f"{one['blocks']:,} blocks were published over Ray at {one['published_keys_per_s'] / 1e6:.2f} M keys/s; "
            f"a batch of {BATCH:,} took {ms(one['publish'])}; with comings and goings the index takes "
            f"{one['churned_index_nbytes_per_block']:.0f} bytes a block"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.directory", description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=list(SIZES), help=f"multiples of {BATCH}")
    parser.add_argument("--large", action="store_true", help=f"also with {LARGE:,} blocks")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(the_book(options.one)))
        return
    sizes = options.blocks + [LARGE] * options.large
    result = {"book": [fresh(blocks) for blocks in sizes], "over_ray": [over_ray(blocks) for blocks in sizes]}
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(result, Console())


if __name__ == "__main__":
    main()
