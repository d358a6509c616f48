"""What the scheduler half costs in a step: RayKV's MultiConnector against vLLM's, with the same two children.

    python -m benchmarks.hooks [--rounds N] [--running 1 8 64] [--json]

vLLM's own scheduler plans the steps of requests that decode; there are no workers, their outputs are made up. So all of
an engine's hooks in EngineCore are there, and nothing else that takes a core from them. The children are two of vLLM's
ExampleConnector. The connectors take turns within a round; times are of all hooks of a step together.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.timed import SCHEDULER_HOOKS
from raykv.connector import start_up
from raykv.connector.desk_link import DeskLink
from raykv.connector.metadata import RayMultiMetadata, RayMultiWorkerMeta
from raykv.types import Incarnation, Rank
from tests.support.configs import example_child, multi
from tests.support.fake_config import kv_cache_config, vllm_config

VARIANTS = {"vLLM": None, "RayKV": "raykv.connector"}
PROMPT, STEPS, SKIPPED = 100, 200, 5
BLOCK_SIZE = 16

Times = list[tuple[float, float]]
"""By step: wall and CPU seconds of all hooks."""


class Hooks:
    """Times all hooks of a connector's scheduler half."""

    def __init__(self, connector: Any) -> None:
        self.steps: Times = []
        self.by_hook: dict[str, float] = {}
        self._wall = self._cpu = 0.0
        self._depth = 0
        for name in (*SCHEDULER_HOOKS, "get_kv_connector_stats"):
            setattr(connector, name, self._timed(name, getattr(connector, name)))

    def _timed(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return inner(*args, **kwargs)
            self._depth += 1
            cpu, wall = time.thread_time(), time.perf_counter()
            try:
                found = inner(*args, **kwargs)
                return list(found) if name == "take_events" else found
            finally:
                wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
                self._depth -= 1
                self._wall, self._cpu = self._wall + wall, self._cpu + cpu
                self.by_hook[name] = self.by_hook.get(name, 0.0) + wall

        return outer

    def end_step(self) -> None:
        self.steps.append((self._wall, self._cpu))
        self._wall = self._cpu = 0.0


class Decoding:
    """A scheduler whose requests decode, one token a step, with the connector of `module` (None: vLLM's)."""

    def __init__(self, module: str | None, folders: Sequence[Path]) -> None:
        transfer = {**multi([example_child(folder) for folder in folders], module=module), "engine_id": "e"}
        config = vllm_config(
            transfer,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=8192,
            max_num_seqs=256,
            async_scheduling=False,
            disable_hybrid_kv_cache_manager=True,  # vLLM's MultiConnector wants it of an ExampleConnector
        )
        config.cache_config.num_gpu_blocks = 8192
        self._scheduler: Any = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=kv_cache_config(8192, BLOCK_SIZE),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=True,
        )
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._number = 0
        self.hooks = Hooks(self._scheduler.connector)

    def decode(self, running: int, steps: int) -> Times:
        """`steps` steps of as many requests; what begins and ends them is not among the times."""
        names = [self._add(steps) for _ in range(running)]
        for _ in range(SKIPPED):
            self._step()
        self.hooks.steps, self.hooks.by_hook = [], {}
        for _ in range(steps - 2 * SKIPPED):
            self._step()
        taken = self.hooks.steps
        self._scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        while self._scheduler.has_requests():
            self._step()
        return taken

    def _add(self, tokens: int) -> str:
        self._number += 1
        name = f"r{self._number}"
        prompt = [(self._number * 131 + i * 7) % 480 + 3 for i in range(PROMPT)]
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self._scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self._hasher))
        return name

    def _step(self) -> None:
        output = self._scheduler.schedule()
        scheduled = list(output.num_scheduled_tokens)
        made = ModelRunnerOutput(scheduled, {n: i for i, n in enumerate(scheduled)}, [[7] for _ in scheduled])
        made.kv_connector_output = KVConnectorOutput(
            kv_connector_worker_meta=_worker_meta(output.kv_connector_metadata)
        )
        self._scheduler.update_from_output(output, made)
        self.hooks.end_step()

    def close(self) -> None:
        self._scheduler.shutdown()


def _worker_meta(meta: Any) -> RayMultiWorkerMeta | None:
    """What a worker says whose hosts have done the step."""
    if not isinstance(meta, RayMultiMetadata) or not meta.plans:
        return None
    return RayMultiWorkerMeta(done={(index, Rank(0)): meta.step for index in meta.plans})


def run(rounds: int, running: Sequence[int], steps: int = STEPS) -> dict[str, dict[int, Times]]:
    """By connector and number of running requests."""
    init_none_hash(sha256)
    found: dict[str, dict[int, Times]] = {name: {count: [] for count in running} for name in VARIANTS}
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(start_up, "RayHostWatch", lambda *_, **__: SimpleNamespace(connect=_nothing, statuses=_alive))
        patch.setattr(DeskLink, "start", lambda link: None)
        engines = {}
        for name, module in VARIANTS.items():
            folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
            engines[name] = Decoding(module, folders)
            stack.callback(engines[name].close)
        for number in range(rounds):
            for count in running:
                for name in sorted(engines, reverse=bool(number % 2)):
                    gc.collect()
                    gc.freeze()  # as vLLM's EngineCore does
                    found[name][count] += engines[name].decode(count, steps)
    return found


def _nothing() -> None:
    """There is no cluster to join."""


def _alive(*_: Any) -> list[Any]:
    """Each child has its first host."""
    return [SimpleNamespace(incarnation=Incarnation(0), registered=True, handshake=None)]


def summary(times: Times) -> dict[str, float]:
    wall, cpu = [one[0] for one in times], [one[1] for one in times]
    first, _, third = quantiles(wall, n=4)
    return {"median_s": median(wall), "q1_s": first, "q3_s": third, "cpu_s": median(cpu), "count": len(times)}


def _cell(one: dict[str, float]) -> str:
    middle, first, third, cpu = (f"{1e6 * one[name]:.0f}" for name in ("median_s", "q1_s", "q3_s", "cpu_s"))
    return f"{middle} ({first} to {third}), {cpu}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hooks", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 64], help="requests that decode together")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    found = run(options.rounds, options.running)
    result = {name: {count: summary(times) for count, times in one.items()} for name, one in found.items()}
    if options.json:
        print(json.dumps(result))
        return
    table = Table(title="scheduler hooks of a decode step: median (quartiles), CPU; microseconds")
    for column in ("running requests", *VARIANTS, "RayKV / vLLM"):
        table.add_column(column, justify="right")
    for count in options.running:
        cells = [_cell(result[name][count]) for name in VARIANTS]
        ratio = result["RayKV"][count]["median_s"] / result["vLLM"][count]["median_s"]
        table.add_row(str(count), *cells, f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
