"""A real vLLM engine in a process group of its own, driven from a test without importing vllm.

    with Engine(model, kv_transfer_config={...}) as engine:
        result = engine.generate([5, 6, 7], max_tokens=8)

Every method waits for the engine to be up. Whatever happens, leaving the `with` ends the whole group.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.process import ProcessGroup, tail

START_TIMEOUT_S = 240.0  # 30 to 40 s on an idle machine of two cores
CALL_TIMEOUT_S = 120.0

_names = itertools.count()


class EngineError(RuntimeError):
    """The engine did not start, died, or refused a call. `log` is all it printed."""

    def __init__(self, message: str, log: Path) -> None:
        self.log = log.read_text(errors="replace") if log.exists() else ""
        super().__init__(f"{message}\n--- end of {log.name} ---\n{tail(log)}")


@dataclass(frozen=True)
class Result:
    """One finished request."""

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: str | None
    kv_transfer_params: dict[str, Any] | None
    num_prompt_tokens: int
    num_cached_tokens: int | None
    """Prompt tokens that were not computed: local prefix cache and connector together."""
    num_local_tokens: int | None
    num_external_tokens: int | None
    ttft_s: float | None
    total_s: float


class Pending:
    """A request under way."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.future: Future[Any] = Future()
        self.first_token = threading.Event()

    @property
    def done(self) -> bool:
        return self.future.done()

    def result(self, timeout_s: float = CALL_TIMEOUT_S) -> Result:
        return Result(**self.future.result(timeout_s))


class Engine:
    """Starts at once; `wait_ready` (or any call, or `with`) waits until it serves.

    Thread-safe. `env` overrides the defaults below; `extra_args` are fields of vLLM's AsyncEngineArgs.
    """

    def __init__(
        self,
        model: str | Path,
        kv_transfer_config: Mapping[str, Any] | None = None,
        *,
        block_size: int = 32,
        num_gpu_blocks_override: int | None = None,
        tensor_parallel_size: int = 1,
        max_model_len: int = 4096,
        cpus: str | None = None,
        env: Mapping[str, str] | None = None,
        extra_args: Mapping[str, Any] | None = None,
    ) -> None:
        config: dict[str, Any] = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": block_size,
            "tensor_parallel_size": tensor_parallel_size,
            "max_model_len": max_model_len,
            "worker_extension_cls": "tests.support.probes.WorkerProbe",
        }
        if num_gpu_blocks_override is not None:
            config["num_gpu_blocks_override"] = num_gpu_blocks_override
        if kv_transfer_config is not None:
            config["kv_transfer_config"] = dict(kv_transfer_config)
        config |= extra_args or {}
        self._sockets = tempfile.mkdtemp(prefix="rkv-")  # vLLM's: a kill leaves them
        environment = {
            "VLLM_RPC_BASE_PATH": self._sockets,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cpus or cpu_binding(tensor_parallel_size),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "PYTHONHASHSEED": "0",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        } | dict(env or {})
        mine, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tests.support.engine_process", str(theirs.fileno())]
            self.group = ProcessGroup(
                f"engine{next(_names)}", [*command, json.dumps(config)], environment, [theirs.fileno()]
            )
        self._socket = mine
        self._lock = threading.Lock()
        self._calls: dict[int, Pending] = {}
        self._numbers = itertools.count()
        self._ready: Future[float] = Future()
        self._begun = time.perf_counter()
        threading.Thread(target=self._read, name=f"read-{self.group.name}", daemon=True).start()

    # life

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> float:
        """Seconds the start took. Raises EngineError with the log's end if there is no start."""
        try:
            return self._ready.result(timeout_s)
        except TimeoutError:
            self.kill()
            raise EngineError(f"engine not up after {timeout_s:.0f} s", self.group.log) from None

    def __enter__(self) -> Engine:
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, timeout_s: float = 20.0) -> None:
        """vLLM's own shutdown first, so that connectors close too; then whatever is left is killed."""
        if self.group.alive:
            with contextlib.suppress(OSError):
                self._send(-1, "shutdown", {})
                self.group.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """SIGKILL, the whole group at once."""
        self.group.kill()
        shutil.rmtree(self._sockets, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def log(self) -> str:
        return self.group.log.read_text(errors="replace")

    # requests

    def submit(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 16,
        *,
        kv_transfer_params: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        ignore_eos: bool = True,
        cache_salt: str = "",
        **sampling: Any,
    ) -> Pending:
        """Greedy unless told otherwise; `sampling` are fields of vLLM's SamplingParams.

        A prompt of token ids gives no text back unless `detokenize=True`.
        """
        sampling = {
            "temperature": 0.0,
            "max_tokens": max_tokens,
            "ignore_eos": ignore_eos,
            "detokenize": isinstance(prompt, str),
        } | sampling
        if kv_transfer_params is not None:
            sampling["extra_args"] = {"kv_transfer_params": dict(kv_transfer_params)}
        number = next(self._numbers)
        request_id = request_id or f"r{number}"
        arguments = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "request_id": request_id,
            "sampling": sampling,
            "cache_salt": cache_salt,
        }
        return self._call("generate", arguments, number, request_id)

    def generate(self, prompt: str | Sequence[int], max_tokens: int = 16, **options: Any) -> Result:
        """`submit`, then wait."""
        timeout_s = options.pop("timeout_s", CALL_TIMEOUT_S)
        return self.submit(prompt, max_tokens, **options).result(timeout_s)

    def abort(self, request_id: str) -> None:
        self._ask("abort", request_id=request_id)

    def chat_tokens(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation as the model's prompt, by its own chat template."""
        return self._ask("chat_tokens", messages=messages)

    # a look inside

    def reset_prefix_cache(self, connector: bool = False) -> bool:
        """False while any block is still referenced: vLLM refuses then."""
        return self._ask("reset_prefix_cache", connector=connector)

    def forget(self, timeout_s: float = 15.0) -> None:
        """Empty vLLM's own prefix cache, waiting for blocks that are pinned for a save."""
        deadline = time.monotonic() + timeout_s
        while not self.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise EngineError(f"blocks still held after {timeout_s:.0f} s", self.group.log)
            time.sleep(0.05)

    def free_blocks(self) -> int:
        return self.call_core("tests.support.probes:blocks")["free"]

    def wait_free_blocks(self, expected: int, timeout_s: float = 15.0) -> None:
        """Until `expected` blocks are free: saves give theirs back a little after the request."""
        deadline = time.monotonic() + timeout_s
        while (free := self.free_blocks()) != expected:
            if time.monotonic() > deadline:
                raise AssertionError(f"{free} blocks are free, {expected} should be")
            time.sleep(0.05)

    def stats(self) -> dict[str, Any]:
        """vLLM's own figures since the start: counters, gauges, `metrics`, and `connector`, its stats."""
        return self._ask("stats")

    def serve_metrics(self) -> str:
        """host:port of a page with all that vLLM has at /metrics. Once."""
        return f"127.0.0.1:{self._ask('serve_metrics')}"

    def pids(self) -> dict[str, Any]:
        return {
            "frontend": self.group.pid,
            "engine_core": self.call_core("tests.support.probes:pid"),
            "workers": self.call_workers("tests.support.probes:pid"),
        }

    def call_core(self, target: str, *arguments: Any) -> Any:
        """Run `module:function` in the EngineCore with that object as first argument."""
        return self._ask("call_core", target=target, arguments=list(arguments))

    def call_workers(self, target: str, *arguments: Any) -> list[Any]:
        """Run `module:function` in every worker with the worker as first argument; one result per rank."""
        return self._ask("call_workers", target=target, arguments=list(arguments))

    # the wire

    def _ask(self, operation: str, **arguments: Any) -> Any:
        return self._call(operation, arguments, next(self._numbers), "").future.result(CALL_TIMEOUT_S)

    def _call(self, operation: str, arguments: dict[str, Any], number: int, request_id: str) -> Pending:
        self.wait_ready()
        pending = Pending(request_id)
        with self._lock:
            self._calls[number] = pending
        try:
            self._send(number, operation, arguments)
        except OSError:
            raise EngineError("the engine is gone", self.group.log) from None
        return pending

    def _send(self, number: int, operation: str, arguments: dict[str, Any]) -> None:
        line = json.dumps({"call": number, "operation": operation, "arguments": arguments}).encode() + b"\n"
        with self._lock:
            self._socket.sendall(line)

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._socket.makefile("rb") as lines:
            for line in lines:
                self._receive(json.loads(line))
        gone = EngineError("the engine ended", self.group.log)
        if not self._ready.done():
            self._ready.set_exception(gone)
        with self._lock:
            calls, self._calls = self._calls, {}
        for pending in calls.values():
            pending.future.set_exception(gone)

    def _receive(self, message: dict[str, Any]) -> None:
        event = message.get("event")
        if event == "ready":
            self._ready.set_result(time.perf_counter() - self._begun)
        elif event == "failed":
            self._ready.set_exception(EngineError(message["error"], self.group.log))
        elif event == "first_token":
            if pending := self._calls.get(message["call"]):
                pending.first_token.set()
        else:
            with self._lock:
                pending = self._calls.pop(message["call"], None)
            if pending is None:
                return
            if "error" in message:
                pending.future.set_exception(EngineError(message["error"], self.group.log))
            else:
                pending.future.set_result(message["result"])


def cpu_binding(ranks: int) -> str:
    """vLLM's CPU binding: the first four cores for one rank, one core each for several."""
    cores = sorted(os.sched_getaffinity(0))
    if ranks > 1:
        return "|".join(str(cores[i % len(cores)]) for i in range(ranks))
    return ",".join(str(core) for core in cores[:4])
