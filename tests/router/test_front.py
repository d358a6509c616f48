"""The layer in Serve's proxy: what a client gets whose replica dies. A coroutine stands for the proxy behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from raykv.router import front
from raykv.router.front import Front

PATH = "/v1/completions"
JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
Step = Callable[[Any, Any], Awaitable[None]]
"""What the proxy does with one try."""


class Client:
    """Says its messages, and hears the answer."""

    def __init__(self, *parts: bytes, leaves: bool = False) -> None:
        self._says = [
            {"type": "http.request", "body": part, "more_body": number + 1 < len(parts)}
            for number, part in enumerate(parts)
        ]
        self._leaves = leaves
        self.heard: list[Any] = []

    async def receive(self) -> Any:
        if self._says:
            return self._says.pop(0)
        if self._leaves:
            return {"type": "http.disconnect"}
        await asyncio.Event().wait()

    async def send(self, message: Any) -> None:
        self.heard.append(message)

    @property
    def status(self) -> int:
        return self.heard[0]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.heard[1:])

    @property
    def complete(self) -> bool:
        return not self.heard[-1].get("more_body", False)


def run(client: Client, *tries: Step, path: str = PATH, headers: Any = ()) -> list[int]:
    """The numbers of the tries that were made."""
    made: list[int] = []

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        made.append(len(made))
        await tries[made[-1]](receive, send)

    scope = {"type": "http", "path": path, "headers": list(headers)}
    asyncio.run(asyncio.wait_for(Front(proxy)(scope, client.receive, client.send), 10))
    return made


async def body_of(receive: Any) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message["body"])
        more = message["more_body"]
    return b"".join(parts)


async def dies(receive: Any, send: Any) -> None:
    """Serve's proxy returns, having said nothing."""
    await body_of(receive)


async def dies_early(receive: Any, send: Any) -> None:
    """... with a part of the request still to come."""
    await receive()


async def echoes(receive: Any, send: Any) -> None:
    body = await body_of(receive)
    await send({"type": "http.response.start", "status": 200, "headers": JSON})
    await send({"type": "http.response.body", "body": body})


def begins(headers: Any, body: bytes) -> Step:
    async def step(receive: Any, send: Any) -> None:
        await body_of(receive)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})

    return step


@pytest.mark.parametrize("first", [dies, dies_early])
def test_a_request_without_a_byte_of_its_answer_is_asked_again(first: Step) -> None:
    client = Client(b"one ", b"two ", b"three")
    assert run(client, first, echoes) == [0, 1]
    assert (client.status, client.body, client.complete) == (200, b"one two three", True)


def test_it_is_asked_again_once() -> None:
    client = Client(b"poison")
    assert run(client, dies, dies, headers=[(b"x-request-id", b"mine")]) == [0, 1]
    assert client.status == 502 and client.complete
    assert "died" in json.loads(client.body)["error"]["message"]
    assert (b"x-request-id", b"mine") in client.heard[0]["headers"]


def test_a_stream_ends_with_one_error() -> None:
    client = Client(b"{}")
    assert run(client, begins(EVENTS, b"data: 1\n\n")) == [0]
    one, error, done, rest = client.body.decode().split("\n\n")
    assert (one, done, rest) == ("data: 1", "data: [DONE]", "") and client.complete
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 502


def test_another_answer_that_has_begun_stays_incomplete() -> None:
    """So that the server breaks the connection: half an answer must not look whole."""
    client = Client(b"{}")
    assert run(client, begins(JSON, b'{"half')) == [0]
    assert client.body == b'{"half' and not client.complete


def test_nothing_is_done_for_a_client_that_has_left() -> None:
    async def until_it_leaves(receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    client = Client(b"{}", leaves=True)
    assert run(client, until_it_leaves) == [0]
    assert not client.heard


def test_a_large_request_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "KEPT_NBYTES", 9)
    client = Client(b"12345", b"67890")
    assert run(client, dies) == [0]
    assert client.status == 502


def test_a_sound_answer_passes_as_it_is() -> None:
    client = Client(b"{}")
    assert run(client, echoes) == [0]
    assert [message["type"] for message in client.heard] == ["http.response.start", "http.response.body"]
    assert client.heard[0]["headers"] == JSON


def test_other_applications_on_the_proxy_are_left_alone() -> None:
    client = Client(b"{}")
    assert run(client, dies, path="/mine") == [0]
    assert not client.heard
