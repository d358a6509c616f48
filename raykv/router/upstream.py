"""HTTP to the engines: kept connections, no buffering, and errors that say whether the engine saw the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType

import aiohttp
from yarl import URL

from raykv.cluster_messages import EngineInfo

KEPT_S = 3.0
"""vLLM's server closes a connection that was idle for 5 s; one that it is about to close must not be used."""
MAX_HEADER_NBYTES = 64 << 10
MAX_ANSWER_NBYTES = 64 << 20
"""Of a prefill engine's answer. It holds block numbers and token ids."""

Pairs = Sequence[tuple[str, str]]


class EngineFault(Exception):
    """The engine gave no answer; the message says what happened."""


class Unsent(EngineFault):
    """It never saw the request: no connection came about."""


class Lost(EngineFault):
    """It may have seen the request, and worked on it."""


class Slow(Lost):
    """It took longer than it may."""


class Upstream:
    """A pool of connections to all engines. One event loop; use as `async with`."""

    def __init__(self, connect_timeout_s: float, silence_timeout_s: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=silence_timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Upstream:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S),
            timeout=self._timeout,
            # Bytes go on as they come: no decompression, no cookies of one client for another, no proxy, no headers
            # of our own.
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
            max_line_size=MAX_HEADER_NBYTES,
            max_field_size=MAX_HEADER_NBYTES,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
        self._session = None

    @asynccontextmanager
    async def answer(
        self, engine: EngineInfo, method: str, target: str, headers: Pairs, body: bytes
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; the answer's head has come, its body is read from it by `piece` and `whole`.

        `target`: path and query, as they came. Leaving early (also by cancellation) closes the connection at once:
        that is how vLLM hears that nobody waits any more. Raises EngineFault.
        """
        assert self._session is not None, "use it as `async with Upstream(...)`"
        url = URL(engine.url + target, encoded=True)
        response = None
        try:
            try:
                response = await self._session.request(
                    method, url, data=body or None, headers=headers, allow_redirects=False
                )
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                raise _fault(engine, error) from error
            yield response
        finally:
            if response is not None and not response.closed:
                # Read to its end, the connection has gone back to the pool by itself.
                response.close()

    async def whole(self, engine: EngineInfo, response: aiohttp.ClientResponse, limit: int) -> bytes:
        """The body; of one of `limit` bytes or more as much as came with them. Raises EngineFault."""
        parts, left = [], limit
        while left > 0 and (piece := await self.piece(engine, response)):
            parts.append(piece)
            left -= len(piece)
        return b"".join(parts)

    async def piece(self, engine: EngineInfo, response: aiohttp.ClientResponse) -> bytes:
        """What of the body has arrived, waiting for it if need be; nothing: the body has ended. Raises EngineFault."""
        try:
            return await response.content.readany()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise _fault(engine, error) from error


def _fault(engine: EngineInfo, error: BaseException) -> EngineFault:
    what = f"engine {engine.name} ({engine.url})"
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return Unsent(f"{what} can't be reached: {error or type(error).__name__}")
    if isinstance(error, asyncio.TimeoutError):
        return Slow(f"{what} sent nothing for too long")
    return Lost(f"{what} broke the connection off: {type(error).__name__}: {error}")
