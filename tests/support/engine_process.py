"""The engine's side of `tests.support.engine`: an AsyncLLM that answers JSON lines on an inherited socket.

vLLM spawns its EngineCore and its workers; multiprocessing imports this main module in each of them again. That
is how what is set below is set there too.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from vllm.v1.engine.core import EngineCore

from tests.support import probes, quiet_vllm  # noqa: F401 (its import is what it does)

EngineCore.raykv_call = probes.core_call


class Server:
    """Runs one request of the test process per task; `engine` is None until it is up."""

    def __init__(self, writer: asyncio.StreamWriter, config: dict[str, Any]) -> None:
        from tests.support.engine_stats import StatsRecorder

        self.writer = writer
        self.config = config
        self.recorder = StatsRecorder()
        self.engine: Any = None
        self.operations: dict[str, Callable[..., Awaitable[Any]]] = {
            "generate": self.generate,
            "abort": self.abort,
            "reset_prefix_cache": self.reset_prefix_cache,
            "stats": self.stats,
            "chat_tokens": self.chat_tokens,
            "call_core": self.call_core,
            "call_workers": self.call_workers,
            "serve_metrics": self.serve_metrics,
        }

    def send(self, **message: Any) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def start(self) -> None:
        from vllm.config import KVEventsConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        events = self.config.pop("kv_events_config", None)
        arguments = AsyncEngineArgs(**self.config, kv_events_config=KVEventsConfig(**events) if events else None)
        self.engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[self.recorder.bind])

    async def run(self, call: int, operation: str, arguments: dict[str, Any]) -> None:
        try:
            if operation == "generate":
                arguments["call"] = call
            self.send(call=call, result=await self.operations[operation](**arguments))
        except Exception as error:
            traceback.print_exc()
            self.send(call=call, error=f"{type(error).__name__}: {error}")

    async def generate(
        self, call: int, prompt: Any, request_id: str, sampling: dict[str, Any], cache_salt: str = ""
    ) -> Any:
        from vllm import SamplingParams

        inputs = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        if cache_salt:
            inputs["cache_salt"] = cache_salt
        begun = time.perf_counter()
        first: float | None = None
        last: Any = None
        async for output in self.engine.generate(inputs, SamplingParams(**sampling), request_id):
            if first is None and output.outputs[0].token_ids:
                first = time.perf_counter() - begun
                self.send(call=call, event="first_token")
            last = output
        prefill = self.recorder.take_prefill(request_id)
        return {
            "request_id": request_id,
            "token_ids": list(last.outputs[0].token_ids),
            "text": last.outputs[0].text,
            "finish_reason": last.outputs[0].finish_reason,
            "kv_transfer_params": last.kv_transfer_params,
            "num_prompt_tokens": len(last.prompt_token_ids or ()),
            "num_cached_tokens": last.num_cached_tokens,
            "num_local_tokens": prefill.num_local_cached_tokens if prefill else None,
            "num_external_tokens": prefill.num_external_cached_tokens if prefill else None,
            "ttft_s": first,
            "total_s": time.perf_counter() - begun,
        }

    async def abort(self, request_id: str) -> None:
        await self.engine.abort(request_id)

    async def reset_prefix_cache(self, connector: bool) -> bool:
        return bool(await self.engine.reset_prefix_cache(reset_connector=connector))

    async def stats(self) -> dict[str, Any]:
        return self.recorder.snapshot()

    async def serve_metrics(self) -> int:
        """The page that `vllm serve` has at /metrics, at the port that is returned."""
        from prometheus_client import start_http_server

        server, _ = start_http_server(0, "127.0.0.1")
        return int(server.server_port)

    async def chat_tokens(self, messages: list[dict[str, str]]) -> list[int]:
        tokenizer = self.engine.get_tokenizer()
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))

    async def call_core(self, target: str, arguments: list[Any]) -> Any:
        answer = await self.engine.engine_core.call_utility_async("raykv_call", target, json.dumps(arguments))
        return json.loads(answer)

    async def call_workers(self, target: str, arguments: list[Any]) -> Any:
        answers = await self.engine.collective_rpc("raykv_call", args=(target, json.dumps(arguments)))
        return [json.loads(answer) for answer in answers]


async def serve(connection: socket.socket, config: dict[str, Any]) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 26)
    server = Server(writer, config)
    try:
        await server.start()
    except Exception as error:
        traceback.print_exc()
        server.send(event="failed", error=f"{type(error).__name__}: {error}")
        await writer.drain()
        return
    server.send(event="ready")
    tasks: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        message = json.loads(line)
        if message["operation"] == "shutdown":
            break
        task = asyncio.create_task(server.run(message["call"], message["operation"], message["arguments"]))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    else:
        # The test process is gone without a word: nobody is left to end this group but itself.
        os.killpg(os.getpgid(0), signal.SIGKILL)
    server.engine.shutdown(timeout=10)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    config = json.loads(sys.argv[2])
    asyncio.run(serve(connection, config))
    sys.stdout.flush()
    os._exit(0)  # the interpreter's own end takes two seconds with torch, and there is nothing left to do


if __name__ == "__main__":
    main()
