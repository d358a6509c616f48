"""The router as an ASGI application.

Plain ASGI and no framework: nothing stands between the engine's bytes and the client's, and a client that leaves is
noticed in every phase, also while the prompt is computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

from raykv.config.router import RouterOptions
from raykv.core.residency import LearnedPrompts
from raykv.core.routing import RoutingTable
from raykv.router.answers import REQUEST_ID, Headers, Refusal, first, request_headers
from raykv.router.engine_list import EngineSource, Refresher
from raykv.router.flow import DECODES, Flow, Request, Send
from raykv.router.learner import Cluster, Learner
from raykv.router.paths import GENERATE, PASSED_ON, is_known
from raykv.router.prompts import read_prompt
from raykv.router.upstream import Upstream

logger = logging.getLogger("raykv")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGone(Exception):
    """There is nobody to answer to."""


class RouterApp:
    """Answers requests from `lifespan.startup` to `lifespan.shutdown`. One event loop."""

    def __init__(
        self, options: RouterOptions, source: EngineSource, names_requests: bool = True, cluster: Cluster | None = None
    ) -> None:
        """`names_requests`: answers carry X-Request-Id. False where the server does that, as Ray Serve's. `cluster`:
        whom to ask what stores hold; None: engines are chosen by text and load alone."""
        self._options = options
        self._names_requests = names_requests
        self.prompts = LearnedPrompts()
        self.table = RoutingTable(self.prompts, random.Random(), options.avoid_s)
        self._upstream = Upstream(options.connect_timeout_s, options.silence_timeout_s)
        self._learner = Learner(self.prompts, self.table, self._upstream, cluster) if cluster is not None else None
        self._refresher = Refresher(source, self.table, options.refresh_s)
        self._flow = Flow(options, self.table, self._upstream, self._refresher.look)
        self._answers: Counter[tuple[str, int]] = Counter()
        self._in_hand = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's entry."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003, "reason": "the router speaks HTTP only"})

    async def start(self) -> None:
        """What `lifespan.startup` does."""
        await self._upstream.__aenter__()
        await self._refresher.start()
        if self._learner is not None:
            self._learner.start()

    async def stop(self) -> None:
        """What `lifespan.shutdown` does."""
        if self._learner is not None:
            await self._learner.stop()
        await self._refresher.stop()
        await self._upstream.__aexit__(None, None, None)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    # ------------------------------------------------------------------ one request

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        began = False

        async def counted(message: MutableMapping[str, Any]) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                self._answers[path if is_known(path) else "other", message["status"]] += 1
            await send(message)

        self._in_hand += 1
        try:
            if not await self._answer_itself(scope, counted):
                request = await self._read(scope, receive)
                await _while_client_waits(self._flow.run(request, counted), receive)
        except ClientGone:
            pass
        except Refusal as refusal:
            await _say(counted, refusal.status, refusal.headers() + self._named(scope), refusal.body())
        except Exception:
            if began:  # too late for an answer: the server breaks the connection
                raise
            logger.exception("router: %s %s failed", scope["method"], path)
            broken = Refusal(500, "The router failed. Its log says how.", "InternalServerError")
            await _say(counted, broken.status, broken.headers() + self._named(scope), broken.body())
        finally:
            self._in_hand -= 1

    async def _answer_itself(self, scope: Scope, send: Send) -> bool:
        """Answer what no engine is asked for; False: it is for an engine. Raises Refusal for what nobody answers."""
        method, path = scope["method"], scope["path"]
        named = self._named(scope)
        if method == "GET" and path in ("/health", "/ping"):
            await _say(send, 200 if self._able() else 503, [*named, (b"content-length", b"0")], b"")
            return True
        if method == "GET" and path == "/metrics":
            text = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
            await _say(send, 200, [*named, text], self._metrics().encode())
            return True
        if path in GENERATE and method == "POST" or path in PASSED_ON.get(method, ()):
            return False
        if is_known(path):
            raise Refusal(405, f"{method} is not what {path} takes.")
        raise Refusal(404, f"The router has no {path}.")

    async def _read(self, scope: Scope, receive: Receive) -> Request:
        """The request, read to its end. Raises Refusal, and ClientGone."""
        options, path = self._options, scope["path"]
        body = await _read_body(scope, receive, options.max_body_nbytes)
        request = Request(scope["method"], _target(scope), self._headers(scope), body, own_headers=self._named(scope))
        if path in GENERATE:
            request.prompt = read_prompt(path, body, options.transport, options.min_prompt_chars)
            if self._learner is not None:
                self._learner.see(request.prompt)
        if not self._able() and self._refresher.problem:
            raise Refusal(503, f"{self._flow.nobody()} Also, {self._refresher.problem}.")
        return request

    def _able(self) -> bool:
        return any(engine.ready and engine.role in DECODES for engine in self.table.engines)

    def _headers(self, scope: Scope) -> list[tuple[str, str]]:
        """What the engines get; a request that has no id gets one, so that it is the same on both engines."""
        headers = request_headers(scope["headers"])
        if first(scope["headers"], REQUEST_ID) is None:
            headers.append((REQUEST_ID.decode(), self._id(scope).decode()))
        return headers

    def _named(self, scope: Scope) -> Headers:
        return [(REQUEST_ID, self._id(scope))] if self._names_requests else []

    def _id(self, scope: Scope) -> bytes:
        given = first(scope["headers"], REQUEST_ID)
        if given is None:
            given = scope.setdefault("raykv.request_id", uuid.uuid4().hex.encode())
        return given

    def _metrics(self) -> str:
        """Prometheus' text: this replica's counts."""
        lines = ["# TYPE raykv_router_answers_total counter"]
        for (path, status), count in sorted(self._answers.items()):
            lines.append(f'raykv_router_answers_total{{path="{path}",status="{status}"}} {count}')
        lines.append("# TYPE raykv_router_events_total counter")
        learned = self._learner.counts if self._learner is not None else {}
        for event, count in sorted({**self._flow.counts, **learned}.items()):
            lines.append(f'raykv_router_events_total{{event="{event}"}} {count}')
        lines.append("# TYPE raykv_router_requests_in_hand gauge")
        lines.append(f"raykv_router_requests_in_hand {self._in_hand}")
        lines.append("# TYPE raykv_router_engine_in_hand gauge")
        for engine in self.table.engines:
            labels = f"engine={json.dumps(engine.name)},role={json.dumps(str(engine.role))}"
            lines.append(f"raykv_router_engine_in_hand{{{labels}}} {self.table.in_hand(engine)}")
        return "\n".join(lines) + "\n"


async def _while_client_waits(answering: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run `answering`; a client that leaves ends it. Cancelling it closes the connections to the engines at once, and
    with them vLLM's requests."""
    work = asyncio.ensure_future(answering)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        left = [task for task in (work, gone) if not task.done()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    if not work.cancelled():
        work.result()


def _target(scope: Scope) -> str:
    """Path and query as bytes for the engine; the path is one of ours, so it needs no quoting."""
    query = scope.get("query_string", b"")
    return scope["path"] + (f"?{query.decode('latin-1')}" if query else "")


async def _read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body. Raises Refusal (413), also before it has come where the client says its length."""
    too_large = Refusal(413, f"The request is larger than {limit} bytes, the router's max_body_nbytes.")
    length = first(scope["headers"], b"content-length")
    if length is not None and length.isdigit() and int(length) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _say(send: Send, status: int, headers: Headers, body: bytes) -> None:
    with contextlib.suppress(OSError):  # the client has left
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
