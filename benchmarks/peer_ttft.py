"""From which prompt length a prefix in another node's host tier is there sooner than it is computed.

    python -m benchmarks.peer_ttft [--json] [--rounds N] [--tokens N ...] [--model PATH]

Two vLLM engines on two Ray nodes of this machine, each with a store that has a host and a peer tier. For each length a
prompt of random tokens is sent to the one engine, and, once its store has published it, to the other; then a prompt
that nobody has seen. One output token, so that a request's time is its time to first token. Figures are medians; the
break-even is the shortest length from which on the peer's way was the quicker one.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

TOKENS = (64, 128, 256, 512, 1024, 2048)
BLOCK = 32
VOCABULARY = (1000, 40000)


@dataclass(frozen=True)
class Line:
    """One length. Seconds, one for each round; `loaded`: tokens that came from the peer, of all rounds together."""

    tokens: int
    peer_s: tuple[float, ...]
    computed_s: tuple[float, ...]
    loaded: int

    @property
    def ratio(self) -> float:
        """Of the medians: below 1 the peer is quicker."""
        return median(self.peer_s) / median(self.computed_s)


def spec(model: Path) -> Any:
    from raykv.launch.spec_file import spec_from
    from tests.support.real_cluster import ENVIRONMENT, OPTIONS, VLLM

    engine = {"role": "both", "resources": {"num_cpus": 1}}
    environment = {**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1"}
    return spec_from(
        json.dumps(
            {
                "model": str(model),
                "command": VLLM,
                "vllm": {**OPTIONS, "block_size": BLOCK},
                "environment": environment,
                "engines": [
                    {"name": name, "environment": {"VLLM_CPU_OMP_THREADS_BIND": core}, **engine}
                    for name, core in (("a", "0"), ("b", "1"))
                ],
                "stores": [
                    {
                        "name": "default",
                        "tiers": [{"medium": "host", "capacity": "1GiB"}, {"medium": "peer"}],
                        "lookup_timeout_s": 10,
                    }
                ],
                "startup_timeout_s": 300,
            }
        )
    )


def complete(url: str, model: str, prompt: list[int]) -> float:
    """Seconds of a request for one token."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.read()
    return time.perf_counter() - started


def external(url: str) -> int:
    """Prompt tokens that came from outside of the engine, since its start."""
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    wanted = 'source="external_kv_transfer"'
    return sum(
        int(float(line.rsplit(" ", 1)[1]))
        for line in lines
        if line.startswith("vllm:prompt_tokens_by_source_total") and wanted in line
    )


def published() -> int:
    """Blocks that the Directory knows."""
    from raykv.actors import observer

    row = observer.look(None).directory
    return int(row.figures["keys"]) if row is not None and row.figures else 0


def wait_published(blocks: int) -> None:
    deadline = time.monotonic() + 60
    while published() < blocks:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the Directory knows {published()} blocks, not {blocks}")
        time.sleep(0.2)


def measure(urls: dict[str, str], model: str, tokens: int, rounds: int) -> Line:
    draw = random.Random(tokens)
    prompt = lambda: [draw.randrange(*VOCABULARY) for _ in range(tokens + 1)]  # noqa: E731
    peer, computed = [], []
    before = external(urls["b"])
    known = published()
    for _ in range(rounds):
        shared, fresh = prompt(), prompt()
        complete(urls["a"], model, shared)
        known += tokens // BLOCK
        wait_published(known)
        peer.append(complete(urls["b"], model, shared))
        computed.append(complete(urls["b"], model, fresh))
        known += tokens // BLOCK
        wait_published(known)  # its saves must not run into the next measurement
    return Line(tokens, tuple(peer), tuple(computed), external(urls["b"]) - before)


def break_even(lines: list[Line]) -> int | None:
    """The shortest length from which on the peer's way is the quicker one; None: there is none."""
    found = None
    for line in reversed(lines):
        if line.ratio >= 1:
            break
        found = line.tokens
    return found


def run(model: Path, lengths: list[int], rounds: int) -> list[Line]:
    from raykv.actors import controller_handle
    from raykv.launch import up as launch
    from tests.support.sim_cluster import SimCluster

    sim = SimCluster([{"num_cpus": 1, "object_store_memory": 80 << 20}] * 2)
    try:
        launch.up(spec(model), lambda line: print(f"{line.kind} {line.name}: {line.state}", flush=True))
        controller = controller_handle.find()
        assert controller is not None
        urls = {row.name.split("-")[0]: str(row.url) for row in controller.status(60.0).engines}
        name = json.load(urllib.request.urlopen(urls["a"] + "/v1/models", timeout=60))["data"][0]["id"]
        measure(urls, name, 96, 2)  # connections, and what only first requests pay
        return [measure(urls, name, tokens, rounds) for tokens in lengths]
    finally:
        launch.down(lambda _: None)
        sim.stop()


def main() -> None:
    from examples.model import small_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS), help="prompt lengths")
    parser.add_argument("--model", type=Path, help="a model's folder; default: SmolLM2, 135 M parameters")
    options = parser.parse_args()
    lines = run(options.model or small_model(), sorted(options.tokens), options.rounds)
    if options.json:
        print(json.dumps({"lines": [asdict(line) for line in lines], "break_even": break_even(lines)}, indent=2))
        return
    print("  tokens  from the peer            computed                 ratio  loaded")
    for line in lines:
        cells = [
            f"{1e3 * median(s):7.0f} ms ({1e3 * min(s):.0f} to {1e3 * max(s):.0f})"
            for s in (line.peer_s, line.computed_s)
        ]
        print(f"{line.tokens:>8}  {cells[0]:<24} {cells[1]:<24} {line.ratio:>5.2f}  {line.loaded}")
    found = break_even(lines)
    print(f"break-even: {found} tokens" if found else "break-even: none of these lengths")


if __name__ == "__main__":
    main()
