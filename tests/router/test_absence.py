"""No engine to ask, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from raykv.cluster_messages import EngineInfo
from tests.router import fake_engine as fakes
from tests.router.fake_engine import Behaviour, Door, door, drive, engine

pytestmark = pytest.mark.process

PROMPT = "Once upon a time " * 40
BODY = {"prompt": PROMPT, "max_tokens": 9}


# -------------------------------------------------------------------- no engine


class Listing:
    """A source whose answer the test sets."""

    def __init__(self, engines: Sequence[EngineInfo] = ()) -> None:
        self.found: Any = list(engines)

    async def engines(self) -> Sequence[EngineInfo]:
        if isinstance(self.found, Exception):
            raise self.found
        return list(self.found)


def test_no_engine_at_all() -> None:
    async def scenario() -> None:
        source = Listing()
        async with door([engine("p0"), engine("d0")], source=source, refresh_s=0.02) as opened:
            async with opened.client.post(opened.url + "/v1/completions", json=BODY) as response:
                error = (await response.json())["error"]
                assert response.status == 503 == error["code"] and error["type"] == "Service Unavailable"
                assert response.headers["Retry-After"] == "1" and "No engine is running" in error["message"]
            async with opened.client.get(opened.url + "/health") as response:
                assert response.status == 503
            source.found = [opened["p0"].info]
            await opened.until(lambda: len(opened.app.table.engines) == 1)
            status, answer = await opened.post(BODY)
            assert status == 503 and "p0: prefill, ready" in answer["error"]["message"]
            assert not opened["p0"].seen
            source.found = [opened["p0"].info, opened["d0"].info]
            await opened.until(lambda: len(opened.app.table.engines) == 2)
            assert (await opened.post(BODY))[0] == 200

    drive(scenario())


@pytest.mark.parametrize("known", [[], ["d1"]])
def test_who_finds_nobody_looks_for_new_engines(known: list[str]) -> None:
    """One engine has gone and another has come since the list was had: no client sees it."""

    async def scenario() -> None:
        source = Listing()
        async with door([engine("p0"), engine("d0")], [engine("d1")], source, refresh_s=60) as opened:
            opened.app.table.replace([opened["p0"].info, *(opened[name].info for name in known)])
            source.found = [opened["p0"].info, opened["d0"].info]
            statuses = [status for status, _ in await asyncio.gather(*(opened.post(BODY) for _ in range(3)))]
            assert statuses == [200] * 3 and len(opened["d0"].seen) == 3

    drive(scenario())


def test_a_list_that_can_not_be_had_leaves_the_known_engines() -> None:
    async def scenario() -> None:
        source = Listing()
        async with door([engine("d0")], source=source, refresh_s=0.02) as opened:
            source.found = [opened["d0"].info]
            await opened.until(lambda: len(opened.app.table.engines) == 1)
            source.found = ValueError("the head is away")
            await opened.until(lambda: opened.app._refresher.problem != "")
            assert (await opened.post(BODY))[0] == 200
        source.found = ValueError("the head is away")
        async with door([engine("d0")], source=source) as opened:
            status, answer = await opened.post(BODY)
            assert status == 503 and "the head is away" in answer["error"]["message"]

    drive(scenario())


# -------------------------------------------------------------------- clients that leave


async def leave(opened: Door, when: Any) -> None:
    """Ask for a stream and leave as soon as `when()` holds."""
    request = asyncio.ensure_future(opened.stream(BODY))
    await opened.until(when)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


def test_a_client_that_leaves_ends_the_prefill() -> None:
    async def scenario() -> None:
        async with door([engine("p0", fakes.hangs), engine("d0")]) as opened:
            await leave(opened, lambda: opened["p0"].seen)
            await opened.until(lambda: opened["p0"].aborted == 1)
            assert not opened["d0"].seen

    drive(scenario())


@pytest.mark.parametrize("decode", [fakes.hangs, fakes.streams_for_ever])
def test_a_client_that_leaves_ends_the_decode(decode: Behaviour) -> None:
    async def scenario() -> None:
        async with door([engine("p0"), engine("d0", decode)]) as opened:
            await leave(opened, lambda: opened["d0"].seen)
            await opened.until(lambda: opened["d0"].aborted == 1)

    drive(scenario())


def test_a_leaving_client_is_no_fault_of_the_engine() -> None:
    async def scenario() -> None:
        async with door([engine("p0", fakes.hangs), engine("d0")]) as opened:
            await leave(opened, lambda: opened["p0"].seen)
            await opened.until(lambda: opened["p0"].aborted == 1)
            assert not opened.app.table.avoided(opened["p0"].info, 0.0)

    drive(scenario())
