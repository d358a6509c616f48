"""The way of one request: prefill on one engine, decode on another, and what happens when one of them fails.

- A prefill engine that fails: another one, once; then the decode engine computes the prompt itself.
- A decode engine that fails before the client has got a byte: another one, once. It gets parameters of its own: the
  first engine may have read the prefill engine's blocks, and the first read frees them. Only parameters that surely
  nobody has seen are used again. (By the tiers they are a hint, and good for any number of engines.)
- After the first byte nothing is tried again: the stream ends with one error.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from raykv.cluster_messages import EngineInfo, EngineRole
from raykv.config.cluster_spec import Transport
from raykv.config.router import RouterOptions
from raykv.core.routing import RoutingTable
from raykv.router.answers import Headers, Refusal, response_headers
from raykv.router.prompts import Prompt
from raykv.router.upstream import MAX_ANSWER_NBYTES, EngineFault, Slow, Unsent, Upstream

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PREFILLS = (EngineRole.PREFILL,)
DECODES = (EngineRole.DECODE, EngineRole.BOTH)
TRIES = 2
UNSOUND = frozenset({500, 502, 503, 504})
"""An engine that answers so has made no tokens. vLLM says 500 when its core is dead, until its server ends as well."""
WHOLE_NBYTES = 16 << 20
"""An answer that is no stream is sent on when it is complete, so that a death in its middle is not the client's. Of a
larger one the rest follows as it comes."""


@dataclass
class Request:
    """A client's request, read to its end."""

    method: str
    target: str
    """Path and query."""
    headers: list[tuple[str, str]]
    body: bytes
    prompt: Prompt | None = None
    """None: it asks for no tokens."""
    own_headers: Headers = field(default_factory=list)
    """What the router adds to the answer."""


class Flow:
    """Sends requests on their way. One event loop; many requests at once."""

    def __init__(
        self, options: RouterOptions, table: RoutingTable, upstream: Upstream, renew: Callable[[], Awaitable[None]]
    ) -> None:
        """`renew`: brings the table up to date now, where it can, and does not raise. It may take seconds."""
        self._options = options
        self._table = table
        self._upstream = upstream
        self._renew = renew
        self.counts: Counter[str] = Counter()
        """Hops, and what became of them."""

    async def run(self, request: Request, send: Send) -> None:
        """Answer the request. Raises Refusal, and only if nothing was sent to the client yet."""
        prefix = request.prompt.prefix if request.prompt else ()
        hop = request.prompt is not None and not request.prompt.alone
        tried: set[str] = set()
        params: dict[str, Any] | None = None
        for last in (False, True):
            engine = await self._decode_engine(prefix, tried)
            with self._in_hand(engine):
                if hop and params is None and engine.role is EngineRole.DECODE:
                    assert request.prompt is not None
                    hop, params = await self._prefill(request, request.prompt)
                body = request.prompt.for_decode(params) if request.prompt else request.body
                try:
                    if await self._decode(engine, request, body, send, last or not self._another(tried, engine)):
                        return
                    fault = None
                except EngineFault as error:
                    fault = error
                    self._table.failed(engine, time.monotonic())
            self.counts["decode engine failed"] += 1
            tried.add(engine.name)
            if not isinstance(fault, Unsent) and self._read_once:
                params = None
            if isinstance(fault, Slow):
                raise Refusal(504, f"{fault}. The router gave the request up.")
            if last and fault is not None:
                raise Refusal(502, f"{fault}. No other engine could take the request over.")

    @property
    def _read_once(self) -> bool:
        """Whether a prefill is of use to one decode engine only."""
        return self._options.transport is Transport.NIXL

    async def _decode_engine(self, prefix: tuple[bytes, ...], tried: set[str]) -> EngineInfo:
        """One that was not tried, if need be of a list that is fetched now; if there is none, one that was: its
        connection may have been stale."""
        engine = self._table.choose(DECODES, prefix, time.monotonic(), tried)
        if engine is None:  # the list may be of before a change: one engine has gone, the other has come
            await self._renew()
            now = time.monotonic()
            engine = self._table.choose(DECODES, prefix, now, tried) or self._table.choose(DECODES, prefix, now)
        if engine is None:
            raise Refusal(503, self.nobody())
        return engine

    def _another(self, tried: set[str], engine: EngineInfo) -> bool:
        return self._table.choose(DECODES, (), time.monotonic(), tried | {engine.name}) is not None

    def nobody(self) -> str:
        """Why no engine can answer."""
        engines = self._table.engines
        if not engines:
            return "No engine is running. Start engines, or wait until the first one is up (`raykv status` lists them)."
        states = ", ".join(f"{e.name}: {e.role}, {'ready' if e.ready else 'not ready'}" for e in engines[:20])
        return f"No engine that decodes is ready ({states}). Try again, or look at `raykv status`."

    @contextmanager
    def _in_hand(self, engine: EngineInfo) -> Iterator[None]:
        self._table.begin(engine)
        try:
            yield
        finally:
            self._table.end(engine)

    # ------------------------------------------------------------------ prefill

    async def _prefill(self, request: Request, prompt: Prompt) -> tuple[bool, dict[str, Any] | None]:
        """Have the prompt computed: whether it is worth doing again, and the parameters for the decode engine.

        Never raises but for cancellation: without a prefill the decode engine computes the prompt.
        """
        try:
            body = prompt.for_prefill(self._options.transport)
        except RecursionError:  # nested deeper than Python writes it: the engine's to judge
            return False, None
        tried: set[str] = set()
        for _ in range(TRIES):
            # One that failed lately is left alone: the decode engine can do without.
            engine = self._table.choose(PREFILLS, prompt.prefix, time.monotonic(), tried, even_avoided=False)
            if engine is None:
                break
            tried.add(engine.name)
            with self._in_hand(engine):
                try:
                    status, answer = await self._ask(engine, request, body)
                except EngineFault:
                    status, answer = 0, b""
                if status == 0 or status in UNSOUND:
                    self._table.failed(engine, time.monotonic())
                    self.counts["prefill engine failed"] += 1
                    continue
                if status != 200:
                    break  # the request is at fault: the decode engine says how
                self._table.worked(engine, prompt.prefix)
            self.counts["prefills"] += 1
            return self._read_once, prompt.params_from(_object(answer), self._options.transport)
        self.counts["prefills given up"] += 1
        return False, None

    async def _ask(self, engine: EngineInfo, request: Request, body: bytes) -> tuple[int, bytes]:
        """Status and body of a prefill engine's answer. Raises EngineFault."""
        path = request.target.partition("?")[0]
        limit = self._options.prefill_timeout_s
        try:
            async with (
                asyncio.timeout(limit),
                self._upstream.answer(engine, "POST", path, request.headers, body) as response,
            ):
                return response.status, await self._upstream.whole(engine, response, MAX_ANSWER_NBYTES)
        except TimeoutError as error:
            raise Slow(f"engine {engine.name} did not prefill within {limit:g} s") from error

    # ------------------------------------------------------------------ decode

    async def _decode(self, engine: EngineInfo, request: Request, body: bytes, send: Send, final: bool) -> bool:
        """Answer from this engine; False: it is unsound, nothing was sent, and another may be tried (not if `final`).

        Raises EngineFault if it failed before anything was sent.
        """
        headers = request.headers
        async with self._upstream.answer(engine, request.method, request.target, headers, body) as response:
            if response.status in UNSOUND:
                self._table.failed(engine, time.monotonic())
                if not final:
                    return False
            relay = Relay(self._upstream, engine, response)
            await relay.first()
            if response.status not in UNSOUND:
                seen = request.prompt is not None and response.status == 200
                self._table.worked(engine, request.prompt.prefix if request.prompt and seen else ())
            await relay.send_all(send, request.own_headers)
            if relay.cut_off:
                self._table.failed(engine, time.monotonic())
                self.counts["streams cut off"] += 1
        return True


class CutOff(Exception):
    """An answer that is no stream broke off after its beginning was sent: the client's connection has to break, too."""


class Relay:
    """One engine's answer on its way to the client."""

    def __init__(self, upstream: Upstream, engine: EngineInfo, response: aiohttp.ClientResponse) -> None:
        self._upstream = upstream
        self._engine = engine
        self._response = response
        self._first = b""
        self._is_stream = response.headers.get("Content-Type", "").startswith("text/event-stream")
        self.cut_off = False

    async def first(self) -> None:
        """Wait for what the client gets first: of a stream one piece, else the whole. Raises EngineFault."""
        if self._is_stream:
            self._first = await self._next()
        else:
            self._first = await self._upstream.whole(self._engine, self._response, WHOLE_NBYTES)

    async def send_all(self, send: Send, own_headers: Headers) -> None:
        """Send the head, and the body piece by piece. Raises CutOff."""
        headers = response_headers(self._response.raw_headers) + own_headers
        await send({"type": "http.response.start", "status": self._response.status, "headers": headers})
        if self._is_stream:
            await self._send_events(send)
            return
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            while piece := await self._next():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except EngineFault as error:
            raise CutOff(str(error)) from error
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        """Only whole events are sent, so that an error never becomes a part of one that was cut."""
        rest = b""
        try:
            piece = self._first
            while piece:
                whole, rest = _events(rest + piece)
                if whole:
                    await send({"type": "http.response.body", "body": whole, "more_body": True})
                piece = await self._next()
        except EngineFault as error:
            self.cut_off = True
            rest = Refusal(502, f"{error}. The stream ends here.", "InternalServerError").event()
        await send({"type": "http.response.body", "body": rest, "more_body": False})

    async def _next(self) -> bytes:
        return await self._upstream.piece(self._engine, self._response)


def _events(data: bytes) -> tuple[bytes, bytes]:
    """The whole events of a stream, and the beginning of the next one."""
    ends = [place + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (place := data.rfind(mark)) >= 0]
    end = max(ends, default=0)
    return data[:end], data[end:]


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
