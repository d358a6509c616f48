"""What `raykv up` runs with real engines, asked through its router or engine by engine."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from raykv.cluster_messages import ClusterStatus, EngineRow
from raykv.config.cluster_spec import ClusterSpec
from raykv.launch import up as launch
from raykv.launch.spec_file import spec_from
from tests.support.process import free_ports
from tests.support.waiting import eventually

VLLM = [sys.executable, "-m", "tests.support.quiet_vllm", "serve"]
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 4096,
    "max_num_batched_tokens": 4096,
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
BLOCK = OPTIONS["block_size"]
ANSWER_S = 300.0
"""A bound for a hang. How long an answer takes on an idle machine is no matter of these tests."""


def tiers_for(transport: str, folder: Path, disk: Path | None = None) -> list[dict[str, Any]]:
    """`folder`: what all nodes share; `disk`: what is another disk on each."""
    found: list[dict[str, Any]] = [{"medium": "host", "capacity": "256MiB"}]
    if disk is not None:
        found.append({"medium": "disk", "path": str(disk), "capacity": "256MiB"})
    if transport == "fs":
        found.append({"medium": "fs", "path": str(folder), "capacity": "1GiB"})
    else:
        found.append({"medium": "peer"})
    return found


def spec(
    model: Path,
    transport: str,
    tiers: Sequence[dict[str, Any]],
    decode: int = 1,
    cores: tuple[str, str] = ("0", "1"),
    **options: Any,
) -> ClusterSpec:
    """One prefill engine, `decode` engines that decode. `cores`: of the prefill engine, of the others, as vLLM binds
    its ranks. `options`: further ones of vLLM's."""
    prefill, others = ({"VLLM_CPU_OMP_THREADS_BIND": bound} for bound in cores)
    engine = {"resources": {"num_cpus": 1}, "transport": transport}
    store = {"name": "default", "tiers": list(tiers), "cascade": "write"}
    raw = {
        "model": str(model),
        "command": VLLM,
        "vllm": {**OPTIONS, **options},
        "environment": ENVIRONMENT,
        "engines": [
            {"name": "p", "role": "prefill", "environment": prefill, **engine},
            {"name": "d", "role": "decode", "environment": others, "replicas": decode, **engine},
        ],
        "stores": [{**store, "lookup_timeout_s": 10, "timeout_s": 60, "load_timeout_s": 60}],
        "router": {"port": free_ports(1)[0], "min_prompt_chars": 0, "prefill_timeout_s": 120},
        "startup_timeout_s": 900,
    }
    return spec_from(json.dumps(raw))


until = partial(eventually, patience_s=900.0)


@dataclass(frozen=True)
class Answer:
    """`tokens`: all of them, or those before an error. `error`: the one that was told, in OpenAI's shape; `broken`: how
    the answer ended otherwise, without a word."""

    tokens: list[int]
    error: str = ""
    broken: str = ""


def ask(
    url: str,
    model: str,
    prompt: Sequence[int],
    max_tokens: int,
    stream: bool = False,
    so_far: list[int] | None = None,
) -> Answer:
    """One request, greedy, `max_tokens` tokens. `so_far` gets those of a stream as they come."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    tokens = [] if so_far is None else so_far
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            if not stream:
                return Answer(list(json.load(answer)["choices"][0]["token_ids"]))
            return _streamed(answer, tokens)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return Answer(tokens, f"{error.code}: {json.loads(text)['error']['message']}")
        return Answer(tokens, broken=f"{error.code}: {text[:200]}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Answer(tokens, broken=f"{type(error).__name__}: {error}")


def _streamed(answer: Any, tokens: list[int]) -> Answer:
    """Events up to [DONE]; an error is the last one before it."""
    error = ""
    for line in answer:
        event = line.decode().strip().removeprefix("data: ")
        if not event:
            continue
        if event == "[DONE]":
            return Answer(tokens, error)
        if error:
            return Answer(tokens, broken=f"after its error came {event[:200]}")
        content = json.loads(event)
        if "error" in content:
            error = f"stream: {content['error']['message']}"
        else:
            tokens += content["choices"][0]["token_ids"] or []
    return Answer(tokens, broken=f"the stream ended without [DONE] {error}")


class RealCluster:
    """Up from the construction on. `down` is the caller's."""

    def __init__(self, wanted: ClusterSpec) -> None:
        self.lines: list[launch.Progress] = []
        up = launch.up(wanted, self.lines.append)
        assert up.router is not None
        self.router = up.router
        self.first = {row.name: row for row in up.status.engines}
        with urllib.request.urlopen(self.router + "/v1/models", timeout=60) as answer:
            self.model = str(json.load(answer)["data"][0]["id"])

    def down(self) -> None:
        """End all of it."""
        launch.down(self.lines.append)

    @property
    def controller(self) -> Any:
        """Its handle."""
        from raykv.actors import controller_handle

        found = controller_handle.find()
        assert found is not None
        return found

    def status(self) -> ClusterStatus:
        """As the Controller sees it."""
        return self.controller.status(60.0)

    def ready(self) -> dict[str, EngineRow] | None:
        """The engines, if all is as it is wanted; None if not, or if nobody says so."""
        with contextlib.suppress(Exception):
            status = self.status()
            if status.ready:
                return {row.name: row for row in status.engines}
        return None

    def rows(self) -> dict[str, EngineRow]:
        """The engines by name."""
        return {row.name: row for row in self.status().engines}

    def complete(self, prompt: Sequence[int], max_tokens: int, engine: str = "") -> list[int]:
        """The tokens, through the router or of one engine."""
        answer = ask(self.rows()[engine].url if engine else self.router, self.model, prompt, max_tokens)
        assert not answer.error and not answer.broken, answer
        return answer.tokens

    def metric(self, engine: str, name: str, **labels: str) -> float:
        """The sum over a metric's series of one engine."""
        with urllib.request.urlopen(self.rows()[engine].url + "/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.split("{")[0].split(" ")[0] == name
            and all(f'{key}="{value}"' in line for key, value in labels.items())
        )

    def computed(self, engine: str) -> float:
        """Prompt tokens that it computed itself since its start."""
        return self.metric(engine, "vllm:prompt_tokens_by_source_total", source="local_compute")

    def seen(self, engine: str) -> float:
        """Prompt tokens of its requests since its start, wherever their KV came from."""
        return self.metric(engine, "vllm:prompt_tokens_total")

    def external(self, engine: str) -> float:
        """Prompt tokens whose KV it was brought since its start."""
        return self.metric(engine, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")

    def store(self, node: str) -> Any:
        """The handle of a node's store."""
        import ray

        from raykv.actors import store_handle

        name = store_handle.store_name("default", node)
        return store_handle.StoreHandle(name, ray.get_actor(name, "raykv"))

    def settle(self) -> None:
        """Until no store writes and the Directory hears of nothing new: what was computed is there for all."""
        from raykv.actors import directory_handle

        quiet, last = 0, None
        deadline = time.monotonic() + 60
        while quiet < 5:  # a store publishes every 0.1 s
            statuses = [self.store(row.node).call("status", timeout=30) for row in self.status().stores]
            tiers = [(tier.used, tier.writing) for status in statuses for tier in status.tiers]
            directory = directory_handle.find_directory()
            figures = tiers, directory.call("status", timeout=30).keys if directory is not None else 0
            quiet = quiet + 1 if figures == last and not any(writing for _, writing in tiers) else 0
            last = figures
            assert time.monotonic() < deadline, f"the stores do not come to rest: {figures}"
            time.sleep(0.2)
