"""What RayKV's metrics cost where it is felt: a look-up in a store, and the scheduler half's hooks in a step.

    python -m benchmarks.metrics [--rounds N] [--json]

Three modes in turns, in one run: `off` (nothing is counted), `counted` (as without Ray), `reported` (a thread hands
all figures to Ray besides, 50 times as often as it does in earnest). The store is in this process and holds one prompt
of 1000 blocks; a look-up finds all of it, or nothing of another one. The steps are vLLM's own scheduler's over fake
workers, with two children that load and save.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.timed import SCHEDULER_HOOKS
from raykv.actors.node_store import NodeStore
from raykv.observe.engine import EngineMeter, engine_samples
from raykv.observe.reporter import EVERY_S, Read, Reporter
from raykv.observe.store import store_samples
from raykv.store_messages import HASH_NBYTES, LookUp, Medium, Settle, StoreSpec, TierSpec
from raykv.types import JobId, RequestId

MODES = ("off", "counted", "reported")
BLOCKS = 1000
ASKED = 50
"""Look-ups of one kind in a round."""
REQUESTS = 12
"""Of a round of steps."""
OFTEN_S = EVERY_S / 50

Times = dict[str, list[float]]


class Nothing:
    """In place of the store's meter of look-ups."""

    def took(self, seconds: float) -> None:
        pass

    def looked_up(self, fingerprint: bytes, hashes: bytes, found: int) -> None:
        pass

    def held(self, published: Any) -> None:
        pass


@contextmanager
def reporting(read: Read) -> Iterator[None]:
    from raykv.actors import ray_metrics

    reporter: Reporter = ray_metrics.start("bench", read, OFTEN_S)
    try:
        yield
    finally:
        reporter.close()


def modes(read: Read, switch: Callable[[bool], None], work: Callable[[str], None], rounds: int) -> None:
    """Each mode's `work` in turns, in another order each round. `switch`: whether anything is counted."""
    for number in range(rounds):
        for mode in MODES[number % 3 :] + MODES[: number % 3]:
            switch(mode != "off")
            if mode == "reported":
                with reporting(read):
                    work(mode)
            else:
                work(mode)


# -- look-ups -------------------------------------------------------------------------------------------------


def look_ups(folder: Path, rounds: int) -> dict[str, Times]:
    from tests.support.kv_rank import E, KVRank, look_up, save_job

    spec = StoreSpec(f"bench{os.getpid()}", (TierSpec(Medium.HOST, 2 * BLOCKS * 4096),), slot_nbytes=4096)
    store, rank = NodeStore(spec, "bench", shm=folder), KVRank(blocks=BLOCKS, layers=1, width=8)
    found: dict[str, Times] = {kind: {mode: [] for mode in MODES} for kind in ("hit", "miss")}
    try:
        store.attach(rank.attach)
        store.save(store.life, E, rank.attach.rank, [save_job(1, "p", list(range(BLOCKS)))])
        store.settle(E, Settle(commits=(JobId(1),)))
        wanted = {"hit": look_up("p", BLOCKS), "miss": LookUp(RequestId("m"), os.urandom(BLOCKS * HASH_NBYTES))}
        meter = store._look_ups.meter

        def switch(on: bool) -> None:
            store._look_ups.meter = meter if on else Nothing()  # type: ignore[assignment]

        def work(mode: str) -> None:
            for kind, asked in wanted.items():
                for _ in range(ASKED):
                    begun = time.perf_counter()
                    (answer,) = store.look_ups(E, [asked])
                    found[kind][mode].append(time.perf_counter() - begun)
                    if (answer.num_blocks == BLOCKS) != (kind == "hit"):
                        raise RuntimeError(f"a look-up meant as a {kind} found {answer.num_blocks} blocks")
                    if answer.lease is not None:
                        store.settle(E, Settle(releases=(answer.lease,)))

        modes(lambda: store_samples("bench", "node", 0.0, store.metrics()), switch, work, rounds)
    finally:
        switch(True)
        store.shutdown(remove_host=True)
        rank.close()
    return found


# -- hooks ----------------------------------------------------------------------------------------------------


class Hooks:
    """Times all hooks of a connector's scheduler half: `steps` has the seconds of each step."""

    def __init__(self, connector: Any) -> None:
        self.steps: list[float] = []
        self._now = 0.0
        self._depth = 0
        for name in (*SCHEDULER_HOOKS, "get_kv_connector_stats"):
            setattr(connector, name, self._timed(name, getattr(connector, name)))

    def _timed(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            begun = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._now += time.perf_counter() - begun
                if name == "build_connector_meta":
                    self.steps.append(self._now)
                    self._now = 0.0

        return outer


def hooks(rounds: int) -> Times:
    from raykv.connector import desk_setup
    from raykv.engine_messages import EngineView
    from raykv.errors import ClusterError
    from raykv.types import EngineId
    from tests.support.fake_config import child
    from tests.support.fake_worker import Bench

    def no_desk(*_: Any) -> Any:
        raise ClusterError("a benchmark has no desk")

    desk_setup._open = no_desk
    found: Times = {mode: [] for mode in MODES}
    with Bench([child("x", hit=32), child("y")]) as bench:
        desk = bench.connector._desk
        if desk is not None:
            desk.close()
        half, timed = bench.half, Hooks(bench.connector)
        take, meter = half.take_stats, EngineMeter()

        def read() -> Any:
            stories = half.loads.stories
            for story in stories.take():
                meter.add(story)
            view = EngineView(
                EngineId("bench"), "m", ("m",), "kv_both", 1, "node", "h", 0.0, 16, 4096, 1, "compose",
                tuple(half.views()), tokens=dict(stories.tokens), running=stories.running,
            )  # fmt: skip
            return engine_samples(view, meter)

        def switch(on: bool) -> None:
            half.take_stats = take if on else lambda: half.loads.step_ended()
            half.also_tell(meter.missed)

        def work(mode: str) -> None:
            timed.steps.clear()
            for number in range(REQUESTS):
                bench.add(200, seed=number)
            bench.run()
            found[mode] += timed.steps

        modes(read, switch, work, rounds)
        switch(True)
    return found


# -- the answer -------------------------------------------------------------------------------------------------


def summary(taken: list[float]) -> dict[str, float]:
    first, _, third = quantiles(taken, n=4)
    return {"median_s": median(taken), "q1_s": first, "q3_s": third, "count": len(taken)}


def run(rounds: int) -> dict[str, Any]:
    from raykv.actors import cluster
    from tests.support.ray_cluster import RayCluster

    ray_cluster = RayCluster(num_cpus=2)
    try:
        cluster.connect(ray_cluster.address)
        with tempfile.TemporaryDirectory() as folder:
            found = look_ups(Path(folder), rounds)
        result: dict[str, Mapping[str, list[float]]] = {f"look-up, {kind}": times for kind, times in found.items()}
        result["hooks of a step"] = hooks(rounds)
        return {what: {mode: summary(taken) for mode, taken in times.items()} for what, times in result.items()}
    finally:
        cluster.disconnect()
        ray_cluster.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.metrics", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    result = run(options.rounds)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    table = Table(title="cost of metrics: median (quartiles), microseconds")
    for column in ("", *MODES):
        table.add_column(column, justify="right" if column else "left")
    for what, by_mode in result.items():
        cells = (
            f"{1e6 * one['median_s']:.1f} ({1e6 * one['q1_s']:.1f} to {1e6 * one['q3_s']:.1f})"
            for one in (by_mode[mode] for mode in MODES)
        )
        table.add_row(what, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
