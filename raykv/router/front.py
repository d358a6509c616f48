"""A layer in Ray Serve's proxy, which outlives the router's replicas: what a client gets whose replica dies.

By itself Serve's proxy answers a plain 500 then, or a stream is cut. Here a request that has had no byte of its answer
is asked again, once, of the replica that is there next; a stream that has begun ends with one error event and
`[DONE]`, as it does when an engine dies. To ask again is as sound here as for a decode engine that failed (`flow`):
with the replica its connections to the engines have closed, so that vLLM aborts what it did for it, and prefilled
blocks are named anew.

Serve's proxy loads `layers` by the name that is in VARIABLE when it starts (read from Ray 2.60). It stands before every
application on this proxy, but touches only the paths of the router.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from raykv.router.answers import REQUEST_ID, Refusal, first
from raykv.router.paths import is_known

logger = logging.getLogger("raykv")

VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
TRIES = 2
KEPT_NBYTES = 16 << 20
"""A larger request is not kept until its answer begins, and so not asked again."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def layers() -> list[Any]:
    """What Serve's proxy puts around itself."""
    from starlette.middleware import Middleware

    return [Middleware(Front)]


class Front:
    """ASGI around Serve's proxy. One event loop."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """ASGI's entry. What the proxy itself raises passes."""
        if scope["type"] != "http" or not is_known(scope["path"]):
            await self._app(scope, receive, send)
            return
        exchange = Exchange(receive, send)
        for number in range(1, TRIES + 1):
            await self._app(scope, exchange.receive, exchange.send)
            if exchange.over or exchange.left:
                return
            logger.warning("router: a replica died with a request to %s in hand", scope["path"])
            if exchange.began or number == TRIES or not exchange.rewind():
                break
        if not exchange.began:
            request_id = first(scope["headers"], REQUEST_ID)
            await exchange.refuse([] if request_id is None else [(REQUEST_ID, request_id)])
        elif exchange.is_stream:
            await exchange.end_stream()
        # Of any other answer the rest is missing: when this returns, the server breaks the connection.


class Exchange:
    """One request and its answer as they pass, and what of them was seen."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._kept: list[Message] | None = []
        """What the client has sent so far; None: it can't be sent again."""
        self._kept_nbytes = 0
        self._again: list[Message] = []
        self.left = False
        """The client has gone."""
        self.began = self.over = self.is_stream = False
        """Of the answer: its head was sent; its end was; it is a stream of events."""

    async def receive(self) -> Message:
        """ASGI's, for the proxy."""
        if self._again:
            return self._again.pop(0)
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.left = True
        elif self._kept is not None:
            self._kept.append(message)
            self._kept_nbytes += len(message.get("body", b""))
            if self._kept_nbytes > KEPT_NBYTES:
                self._kept = None
        return message

    async def send(self, message: Message) -> None:
        """ASGI's, for the proxy."""
        if message["type"] == "http.response.start":
            self.began, self._kept = True, None
            self.is_stream = (first(message["headers"], b"content-type") or b"").startswith(b"text/event-stream")
        elif message["type"] == "http.response.body":
            self.over = not message.get("more_body", False)
        await self._send(message)

    def rewind(self) -> bool:
        """Have the request said again from its beginning; False: it was not kept."""
        if self._kept is None:
            return False
        self._again = list(self._kept)
        return True

    async def refuse(self, headers: list[tuple[bytes, bytes]]) -> None:
        """The whole answer is an error."""
        broken = Refusal(502, "The replica of the router that had this request died. Send it again.")
        await self._send({"type": "http.response.start", "status": 502, "headers": broken.headers() + headers})
        await self._send({"type": "http.response.body", "body": broken.body()})

    async def end_stream(self) -> None:
        """The last event is an error. Replicas send whole events only."""
        broken = Refusal(502, "The router's replica died. The stream ends here.")
        await self._send({"type": "http.response.body", "body": broken.event()})
