"""Hit rates of the eviction policies on a generated trace, by the capacity of the tier.

    python -m benchmarks.eviction_trace [--json FILE] [--prompts 4000] [--seed 0]

The trace has the shape that published traces of chat services have, and none of their data: most prompts are turns of
conversations (a system prompt of a few kinds, the history, some new blocks), whose popularity is Zipf's and whose
turns come in bursts; between them come long prompts that are asked once (documents, batch jobs). A prompt's blocks are
a chain: a block counts as a hit only if all blocks before it hit, and what is missing is saved then.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from raykv.core.eviction import make_policy
from raykv.core.slot_table import SlotTable
from raykv.store_messages import KEY_NBYTES, Eviction

CAPACITIES = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Shares of all distinct blocks of the trace."""
SCANS = (0.0, 0.1, 0.3)
"""Shares of the prompts that are asked once."""


def trace(prompts: int, scans: float, seed: int) -> Iterator[list[bytes]]:
    """The block keys of each prompt, in order."""
    dice = random.Random(seed)
    count = 0
    conversations = prompts // 6
    zipf = list(accumulate(1 / rank**0.9 for rank in range(1, conversations + 1)))
    systems = [[_key(10**9 + kind * 100 + n) for n in range(dice.randint(2, 8))] for kind in range(6)]
    histories: dict[int, list[bytes]] = {}
    burst: list[int] = []
    order = list(range(conversations))
    dice.shuffle(order)
    for _ in range(prompts):
        if dice.random() < scans:
            length = dice.randint(10, 60)
            yield [_key(count + n) for n in range(length)]
            count += length
            continue
        if burst and dice.random() < 0.6:
            who = dice.choice(burst)
        else:
            who = order[dice.choices(range(conversations), cum_weights=zipf)[0]]
            burst = [*burst[-15:], who]
        history = histories.setdefault(who, list(systems[who % len(systems)]))
        grown = dice.randint(1, 6)
        history += [_key(count + n) for n in range(grown)]
        count += grown
        yield list(history)
        if len(history) > 80:  # the conversation starts anew
            del histories[who]


def _key(number: int) -> bytes:
    return number.to_bytes(KEY_NBYTES, "big")


def replay(prompts: list[list[bytes]], eviction: Eviction, slots: int) -> tuple[int, int]:
    """(blocks that hit, blocks asked for), with a tier of so many slots."""
    table = SlotTable(slots, make_policy(eviction, slots))
    hits = asked = 0
    for blocks in prompts:
        found = []
        for block in blocks:
            slot = table.find(block)
            if slot is None:
                break
            found.append(slot)
        for slot in reversed(found):  # as StoreBook does: the tail of a prompt is the coldest
            table.use(slot)
            table.pin(slot)
        asked += len(blocks)
        hits += len(found)
        missing = [block for block in blocks[len(found) :] if not table.holds(block)]
        table.evict(table.evictable(len(missing) - table.free))
        for slot in reversed(table.reserve(missing[: table.free]) or []):
            table.publish(slot)
        for slot in found:
            table.unpin(slot)
    table.check_integrity()
    return hits, asked


def measure(prompts: int, seed: int) -> list[dict[str, Any]]:
    rows = []
    for scans in SCANS:
        asked = list(trace(prompts, scans, seed))
        distinct = len({block for blocks in asked for block in blocks})
        for share in CAPACITIES:
            slots = max(16, int(distinct * share))
            row: dict[str, Any] = {"scans": scans, "capacity": share, "slots": slots, "blocks": distinct}
            for eviction in Eviction:
                hits, all_blocks = replay(asked, eviction, slots)
                row[eviction.value] = hits / all_blocks
            rows.append(row)
    return rows


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        title="Share of prompt blocks found, by policy",
        caption="capacity: slots as a share of all distinct blocks; scans: share of prompts that are asked once",
        box=box.ROUNDED,
        title_justify="left",
    )
    for name in ("scans", "capacity", "slots", *(eviction.value for eviction in Eviction), "S3-FIFO - LRU"):
        table.add_column(name, justify="right")
    for last, row in zip([None, *rows], rows, strict=False):
        if last is not None and last["scans"] != row["scans"]:
            table.add_section()
        gain = row["s3fifo"] - row["lru"]
        cells = [f"{row['scans']:.0%}", f"{row['capacity']:.0%}", str(row["slots"])]
        rates = [f"{row[eviction.value]:.1%}" for eviction in Eviction]
        table.add_row(*cells, *rates, f"[{'green' if gain > 0 else 'red'}]{gain * 100:+.1f} points[/]")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    rows = measure(options.prompts, options.seed)
    if options.json is not None:
        options.json.write_text(json.dumps({"prompts": options.prompts, "seed": options.seed, "rows": rows}, indent=2))
    show(rows, Console())


if __name__ == "__main__":
    main()
