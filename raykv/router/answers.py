"""What the router says by itself, in OpenAI's shape, and which headers pass through it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from http import HTTPStatus

Headers = list[tuple[bytes, bytes]]
"""As ASGI has them: names in lower case."""

# What belongs to one connection and not to the message, and what the server on this side writes itself.
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade"}
)
NOT_SENT_ON = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
NOT_SENT_BACK = HOP_BY_HOP | {b"date", b"server"}
REQUEST_ID = b"x-request-id"


class Refusal(Exception):
    """An answer of the router's own instead of an engine's."""

    def __init__(self, status: int, message: str, kind: str = "") -> None:
        """`kind`: OpenAI's `type`; empty: the phrase of the status, as vLLM has it."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind or HTTPStatus(status).phrase

    def body(self) -> bytes:
        """The JSON of OpenAI's error."""
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.status}
        return json.dumps({"error": error}).encode()

    def event(self) -> bytes:
        """The same as the last event of a stream that has begun, and the stream's end, as vLLM writes them."""
        return b"data: " + self.body() + b"\n\ndata: [DONE]\n\n"

    def headers(self) -> Headers:
        """For an answer that is nothing but this."""
        retry = [(b"retry-after", b"1")] if self.status == HTTPStatus.SERVICE_UNAVAILABLE else []
        return [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self.body())), *retry]


def request_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """A client's headers as an engine gets them."""
    dropped = NOT_SENT_ON | _named_by_connection(headers)
    return [(k.decode("latin-1"), v.decode("latin-1")) for k, v in headers if k.lower() not in dropped]


def response_headers(raw: Iterable[tuple[bytes, bytes]]) -> Headers:
    """An engine's headers as the client gets them. The request's id is the router's to add."""
    return [(k.lower(), v) for k, v in raw if k.lower() not in NOT_SENT_BACK and k.lower() != REQUEST_ID]


def first(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The value of the first header of this name, if any."""
    return next((value for key, value in headers if key.lower() == name), None)


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    """What the client's Connection header says is for one hop only."""
    return {n.strip().lower() for k, v in headers if k.lower() == b"connection" for n in v.split(b",")}
