"""Engines that speak vLLM's HTTP and NIXL's parameters, on real sockets, and fail in the ways that engines fail.

An engine's tokens name it (`d0.0 d0.1 ...`), so that an answer made by two engines is seen.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvicorn
from aiohttp import web

from raykv.cluster_messages import EngineInfo, EngineRole
from raykv.config.router import RouterOptions
from raykv.router.asgi import RouterApp
from raykv.router.engine_list import StaticEngines
from tests.support.process import free_ports

TOKENS = 5
Behaviour = Callable[["FakeEngine", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    path: str
    headers: Any
    """By name, in any case."""
    raw: bytes
    body: dict[str, Any]


@dataclass
class FakeEngine:
    """`behave` answers a request for tokens; the default is a sound engine's."""

    name: str
    role: EngineRole
    behave: Behaviour | None = None
    seen: list[Seen] = field(default_factory=list)
    aborted: int = 0
    """Requests whose client left before their end."""
    pulled: list[str] = field(default_factory=list)
    """Remote request ids in the order in which they were read; each may be read once."""
    port: int = 0
    _prefills: int = 0

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(self.name, self.role, f"http://127.0.0.1:{self.port}", f"node-{self.name}", ready=True)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        try:
            body = json.loads(raw)
        except ValueError:
            body = {}
        body = body if isinstance(body, dict) else {}
        self.seen.append(Seen(request.path_qs, request.headers.copy(), raw, body))
        try:
            return await (self.behave or sound)(self, request, body)
        except asyncio.CancelledError:
            self.aborted += 1
            raise

    def prefilled(self, body: dict[str, Any]) -> dict[str, Any]:
        """A prefill engine's answer."""
        self._prefills += 1
        answer = {"id": "cmpl-x", "choices": [{"text": "x"}], "kv_transfer_params": None}
        asked = body.get("kv_transfer_params") or {}
        if asked.get("do_remote_decode") and "remote_engine_id" not in asked:
            answer["kv_transfer_params"] = {"raykv_tiers": {"store": f"store of {self.name}", "tokens": 64}}
        elif asked.get("do_remote_decode"):
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_request_id": f"{self.name}-{self._prefills}",
                "remote_block_ids": [[1, 2, 3]],
                "remote_host": "127.0.0.1",
                "remote_port": 5600,
            }
        if body.get("return_token_ids"):
            answer["prompt_token_ids"] = [7, 8, 9]
        return answer

    def decoded(self, body: dict[str, Any]) -> dict[str, Any]:
        """A decode engine's answer, which tells what it pulled."""
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_prefill"):
            self.pulled.append(params["remote_request_id"])
        text = "".join(self.token(i) for i in range(TOKENS))
        return {"id": "cmpl-1", "choices": [{"index": 0, "text": text, "logprobs": None}], "usage": {"total_tokens": 9}}

    def token(self, i: int) -> str:
        return f"{self.name}.{i} "

    def event(self, i: int) -> bytes:
        return b"data: " + json.dumps({"choices": [{"index": 0, "text": self.token(i)}]}).encode() + b"\n\n"


async def sound(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if body.get("max_tokens") == 1 and engine.role is EngineRole.PREFILL:
        return web.json_response(engine.prefilled(body))
    answer = engine.decoded(body)
    if not body.get("stream"):
        return web.json_response(answer, headers={"X-Engine": engine.name})
    response = await begin_stream(request)
    for i in range(TOKENS):
        await response.write(engine.event(i))
    await response.write(b"data: [DONE]\n\n")
    return response


async def begin_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    return response


def says(status: int, message: str = "no") -> Behaviour:
    """An error of vLLM's."""

    async def behave(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": message, "type": "t", "code": status}}, status=status)

    return behave


async def says_nothing(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A prefill engine whose connector gives no parameters."""
    return web.json_response({"id": "cmpl-x", "choices": [{"text": "x"}], "kv_transfer_params": None})


async def dies(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Its process is gone with the request in hand."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hangs(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def dies_after_the_head(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A stream whose head is out, and no token."""
    engine.decoded(body)
    await begin_stream(request)
    return await dies(engine, request, body)


def dies_after(tokens: int, cut: bytes = b"") -> Behaviour:
    """In the middle of its stream, maybe in the middle of an event."""

    async def behave(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        engine.decoded(body)
        response = await begin_stream(request)
        for i in range(tokens):
            await response.write(engine.event(i))
        if cut:
            await response.write(cut)
        await asyncio.sleep(0.05)  # let it leave before the reset, which throws away what has not
        return await dies(engine, request, body)

    return behave


async def dies_in_its_answer(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """An answer that is no stream, of which half came."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"id": "half')
    await asyncio.sleep(0.05)
    return await dies(engine, request, body)


async def streams_for_ever(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin_stream(request)
    for i in range(10**9):
        await response.write(engine.event(i))
        await asyncio.sleep(0.01)
    raise AssertionError


def engine(name: str, behave: Behaviour | None = None) -> FakeEngine:
    """By the first letter of its name: p0 prefills, d0 decodes, b0 does both."""
    roles = {"p": EngineRole.PREFILL, "d": EngineRole.DECODE, "b": EngineRole.BOTH}
    return FakeEngine(name, roles[name[0]], behave)


@dataclass
class Door:
    """A router with its engines, and a client."""

    url: str
    app: RouterApp
    engines: dict[str, FakeEngine]
    client: aiohttp.ClientSession

    def __getitem__(self, name: str) -> FakeEngine:
        return self.engines[name]

    async def post(self, body: Any, path: str = "/v1/completions", **options: Any) -> tuple[int, Any]:
        """Status and JSON, or text, of the answer."""
        async with self.client.post(self.url + path, json=body, **options) as response:
            text = await response.text()
            return response.status, json.loads(text) if "json" in response.content_type else text

    async def stream(self, body: dict[str, Any]) -> tuple[int, list[Any]]:
        """Status and events of a stream, each of which must be whole; or the one JSON that came in its place."""
        async with self.client.post(self.url + "/v1/completions", json={**body, "stream": True}) as response:
            raw = (await response.read()).decode()
            if response.content_type != "text/event-stream":
                return response.status, [json.loads(raw)]
            assert raw.endswith("\n\n")
            events = [event.removeprefix("data: ") for event in raw.split("\n\n")[:-1]]
            return response.status, [event if event == "[DONE]" else json.loads(event) for event in events]

    async def until(self, met: Callable[[], Any]) -> None:
        await until(met)

    def check(self) -> None:
        """What must hold after every test: nothing in hand, nothing read twice."""
        self.app.table.check_integrity()
        for one in self.engines.values():
            assert self.app.table.in_hand(one.info) == 0, one.name
        pulled = [remote for one in self.engines.values() for remote in one.pulled]
        assert len(pulled) == len(set(pulled)), f"remote blocks were read twice: {pulled}"


@asynccontextmanager
async def serving(one: FakeEngine) -> AsyncIterator[None]:
    """The engine on a port of its own."""
    site = web.Application(client_max_size=1 << 30)
    site.router.add_route("*", "/{path:.*}", one.handle)
    runner = web.AppRunner(site, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    one.port = free_ports(1)[0]
    await web.TCPSite(runner, "127.0.0.1", one.port).start()
    try:
        yield
    finally:
        await runner.cleanup()


@asynccontextmanager
async def door(
    engines: Sequence[FakeEngine], absent: Sequence[FakeEngine] = (), source: Any = None, **options: Any
) -> AsyncIterator[Door]:
    """A router before these engines; on the ports of the `absent` ones nobody listens."""
    async with AsyncExitStack() as stack:
        for one in engines:
            await stack.enter_async_context(serving(one))
        for one in absent:
            one.port = free_ports(1)[0]
        everyone = [*engines, *absent]
        infos = tuple(one.info for one in everyone)
        chosen = RouterOptions(**{"min_prompt_chars": 0, "engines": infos, **options})
        app = RouterApp(chosen, source or StaticEngines(infos))
        port = free_ports(1)[0]
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="on"))
        running = asyncio.create_task(server.serve())
        client = await stack.enter_async_context(aiohttp.ClientSession())
        try:
            while not server.started:
                assert not running.done()
                await asyncio.sleep(0.005)
            found = Door(f"http://127.0.0.1:{port}", app, {one.name: one for one in everyone}, client)
            yield found
            await found.until(lambda: not any(app.table.in_hand(one.info) for one in everyone))
            found.check()
        finally:
            server.should_exit = True
            await running


async def until(met: Callable[[], Any]) -> None:
    """Wait; the test's own time limit ends what never comes."""
    while not met():
        await asyncio.sleep(0.005)


def drive(scenario: Coroutine[Any, Any, None], limit_s: float = 60) -> None:
    """Run a test's coroutine."""
    asyncio.run(asyncio.wait_for(scenario, limit_s))
