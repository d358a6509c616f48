"""How fast a store answers, and what a block costs its index.

    python -m benchmarks.lookups [--blocks N] [--json]

The book alone, with `--blocks` blocks in one tier: look-ups of a prefix of 1000 blocks, found and leased, that lies in
one run of slots, in runs of 16 and of 1 (as bad as it can be), and of one that is not there. Then a real store over
Ray that has found as many blocks again (4 KiB of /dev/shm for each): the same look-up from another process, beside the
round trip of a call that does nothing, in turns.
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
from raykv.store_messages import HASH_NBYTES, Cascade, Eviction, LookUp, Medium, Settle, StoreSpec, TierSpec
from raykv.types import EngineId, RequestId

PREFIX = 1000
ASKED = 300
SLOT_NBYTES = 4096
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
    for at in range(0, blocks, PREFIX):
        some = hashes[at : at + PREFIX]
        book.recovered(0, [(slot, block_key(FINGERPRINT, 0, one)) for slot, one in enumerate(some, at)])
    nbytes = rss() - before

    def prompts(run: int) -> list[bytes]:
        found = []
        for _ in range(ASKED):
            starts = [dice.randrange(blocks - run) for _ in range(0, PREFIX, run)]
            found.append(
                b"".join(one for start in starts for one in hashes[start : start + run])[: PREFIX * HASH_NBYTES]
            )
        return found

    def ask(wanted: bytes) -> None:
        lease = book.look_up(ENGINE, RequestId("r"), [FINGERPRINT], [0], wanted, 0.0)
        if lease is not None:
            book.release(lease.id)

    wanted = {run: prompts(run) for run in (PREFIX, 16, 1)}
    stranger = dice.randbytes(HASH_NBYTES * PREFIX)
    return {
        "blocks": blocks,
        "nbytes_per_block": nbytes / blocks,
        "hit": times(lambda number: ask(wanted[PREFIX][number])),
        "hit_in_runs_of_16": times(lambda number: ask(wanted[16][number])),
        "hit_in_runs_of_1": times(lambda number: ask(wanted[1][number])),
        "miss": times(lambda number: ask(stranger)),
    }


def over_ray(blocks: int) -> dict[str, Any]:
    from raykv.actors import cluster, store_files, store_handle
    from tests.support.kv_rank import E as ENGINE_ID
    from tests.support.kv_rank import KVRank
    from tests.support.ray_cluster import RayCluster

    name = f"bench-{os.getpid()}"
    path = store_files.host_path("raykv", name)
    rank = KVRank(blocks=2, layers=1, width=8)
    dice = random.Random(2)
    hashes = dice.randbytes(HASH_NBYTES * blocks)
    ray_cluster = RayCluster()
    try:
        fill(str(path), rank.attach.fingerprint, hashes)
        cluster.connect(ray_cluster.address)
        spec = StoreSpec(name, (TierSpec(Medium.HOST, blocks * SLOT_NBYTES),), slot_nbytes=SLOT_NBYTES)
        handle = store_handle.open_store(spec, timeout=300)
        life = handle.call("attach", rank.attach, timeout=300).store
        nothing, asked = [], []
        for number in range(ASKED):
            start = HASH_NBYTES * dice.randrange(blocks - PREFIX)
            wanted = LookUp(RequestId(str(number)), hashes[start : start + HASH_NBYTES * PREFIX])
            begun = time.perf_counter()
            handle.call("settle", ENGINE_ID, Settle(), timeout=30)
            middle = time.perf_counter()
            answer = handle.call("look_up", ENGINE_ID, wanted, timeout=30)
            asked.append(time.perf_counter() - middle)
            nothing.append(middle - begun)
            if (answer.store, answer.num_blocks) != (life, PREFIX):
                raise RuntimeError(  # a `raykv stop` of somebody else's removes a pool that no store has opened yet
                    f"look-up {number} found {answer.num_blocks} blocks: the store is another one, or lost {path}"
                )
            handle.call("settle", ENGINE_ID, Settle(releases=(answer.lease,)), timeout=30)
        return {"round_trip": summary(nothing), "look_up": summary(asked), "ratio": median(asked) / median(nothing)}
    finally:
        cluster.disconnect()
        ray_cluster.stop()
        path.unlink(missing_ok=True)


def fill(path: str, fingerprint: bytes, hashes: bytes) -> None:
    """What an earlier life of the store would have left: a full host tier, its bytes all zeros."""
    from raykv.storage.checksum import checksum
    from raykv.storage.host_pool import HostPool

    slots = len(hashes) // HASH_NBYTES
    pool, good = HostPool.open(path, slots, SLOT_NBYTES), checksum(bytes(SLOT_NBYTES))
    for slot in range(slots):
        key = block_key(fingerprint, 0, hashes[HASH_NBYTES * slot : HASH_NBYTES * (slot + 1)])
        pool.headers.publish(slot, key, SLOT_NBYTES, good)
    pool.close(remove=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lookups", description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    result = {"book": the_book(options.blocks), "over_ray": over_ray(options.blocks)}
    if options.json:
        print(json.dumps(result, indent=1))
        return
    book, far = result["book"], result["over_ray"]
    table = Table(title=f"look-ups of {PREFIX} blocks; {book['blocks']:,} in the index")
    for column in ("", "median", "p99"):
        table.add_column(column, justify="left" if not column else "right")
    for what, one in (
        ("the book alone, in one run", book["hit"]),
        ("the book alone, in runs of 16", book["hit_in_runs_of_16"]),
        ("the book alone, in runs of 1", book["hit_in_runs_of_1"]),
        ("the book alone, none found", book["miss"]),
        ("a store over Ray, in one run", far["look_up"]),
        ("a Ray round trip that does nothing", far["round_trip"]),
    ):
        table.add_row(what, f"{one['median_s'] * 1e3:.2f} ms", f"{one['p99_s'] * 1e3:.2f} ms")
    console = Console()
    console.print(table)
    console.print(f"look-up / round trip: {far['ratio']:.2f}; index: {book['nbytes_per_block']:.0f} bytes a block")


if __name__ == "__main__":
    main()
