"""How fast a store answers, and what a block costs its index.

    python -m benchmarks.lookups [--blocks N] [--json]

The book alone, with `--blocks` blocks in one tier: look-ups of a prefix of 1000 blocks, found and leased, and of one
that is not there. Then a real store over Ray: the same look-up from another process, beside the round trip of a call
that does nothing, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from raykv.core.eviction import make_policy
from raykv.core.slot_table import SlotTable
from raykv.core.store_book import StoreBook, block_key
from raykv.store_messages import HASH_NBYTES, Cascade, Eviction, LookUp, Medium, SaveJob, Settle, StoreSpec, TierSpec
from raykv.types import EngineId, JobId, Rank, RequestId

PREFIX = 1000
ASKED = 300
FINGERPRINT = bytes(16)
ENGINE = EngineId("bench")


def rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def times(work: Callable[[int], object], count: int = ASKED) -> dict[str, float]:
    """Seconds: median and 99th percentile of `work(0)`, `work(1)`, ..."""
    taken = []
    for number in range(count):
        begun = time.perf_counter()
        work(number)
        taken.append(time.perf_counter() - begun)
    return summary(taken)


def summary(taken: list[float]) -> dict[str, float]:
    return {"median_s": median(taken), "p99_s": quantiles(taken, n=100)[98]}


def the_book(blocks: int) -> dict[str, Any]:
    dice = random.Random(1)
    hashes = [dice.randbytes(HASH_NBYTES) for _ in range(blocks)]
    before = rss()
    table = SlotTable(blocks, make_policy(Eviction.LRU, blocks))
    book = StoreBook([table], [Medium.HOST], Cascade.EVICT, lease_s=60.0)
    book.recovered(0, ((slot, block_key(FINGERPRINT, 0, one)) for slot, one in enumerate(hashes)))
    nbytes = rss() - before
    starts = [dice.randrange(blocks - PREFIX) for _ in range(ASKED)]
    strangers = [dice.randbytes(HASH_NBYTES) for _ in range(PREFIX)]

    def ask(wanted: list[bytes]) -> None:
        lease = book.look_up(ENGINE, RequestId("r"), [FINGERPRINT], [0], wanted, 0.0)
        if lease is not None:
            book.release(lease.id)

    return {
        "blocks": blocks,
        "nbytes_per_block": nbytes / blocks,
        "hit": times(lambda number: ask(hashes[starts[number] : starts[number] + PREFIX])),
        "miss": times(lambda number: ask(strangers)),
    }


def over_ray() -> dict[str, Any]:
    from raykv.actors import cluster, store_handle
    from tests.support.kv_rank import E as ENGINE_ID
    from tests.support.kv_rank import KVRank, hashes
    from tests.support.ray_cluster import RayCluster

    ray_cluster = RayCluster()
    try:
        cluster.connect(ray_cluster.address)
        handle = store_handle.open_store(StoreSpec(f"bench-{os.getpid()}", (TierSpec(Medium.HOST, 64 << 20),)))
        rank = KVRank(blocks=PREFIX + 1)
        life = handle.call("attach", rank.attach, timeout=60).store
        wanted = b"".join(hashes("prompt", PREFIX))
        job = SaveJob(JobId(0), (wanted,), (tuple(range(PREFIX)),))
        handle.call("save", life, ENGINE_ID, Rank(0), [job], timeout=60)
        handle.call("settle", ENGINE_ID, Settle(commits=(job.job,)), timeout=60)
        nothing, asked, blocks = [], [], 0
        for number in range(ASKED):
            begun = time.perf_counter()
            handle.call("settle", ENGINE_ID, Settle(), timeout=30)
            middle = time.perf_counter()
            answer = handle.call("look_up", ENGINE_ID, LookUp(RequestId(str(number)), wanted), timeout=30)
            asked.append(time.perf_counter() - middle)
            nothing.append(middle - begun)
            blocks += answer.num_blocks
            handle.call("settle", ENGINE_ID, Settle(releases=(answer.lease,)), timeout=30)
        assert blocks == ASKED * PREFIX, "the benchmark's own store lost a block"
        return {"round_trip": summary(nothing), "look_up": summary(asked), "ratio": median(asked) / median(nothing)}
    finally:
        cluster.disconnect()
        ray_cluster.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lookups", description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    result = {"book": the_book(options.blocks), "over_ray": over_ray()}
    if options.json:
        print(json.dumps(result, indent=1))
        return
    book, far = result["book"], result["over_ray"]
    table = Table(title=f"look-ups of {PREFIX} blocks; {book['blocks']:,} in the index")
    for column in ("", "median", "p99"):
        table.add_column(column, justify="left" if not column else "right")
    for what, one in (
        ("the book alone, all found", book["hit"]),
        ("the book alone, none found", book["miss"]),
        ("a store over Ray, all found", far["look_up"]),
        ("a Ray round trip that does nothing", far["round_trip"]),
    ):
        table.add_row(what, f"{one['median_s'] * 1e3:.2f} ms", f"{one['p99_s'] * 1e3:.2f} ms")
    console = Console()
    console.print(table)
    console.print(f"look-up / round trip: {far['ratio']:.2f}; index: {book['nbytes_per_block']:.0f} bytes a block")


if __name__ == "__main__":
    main()
