"""Which of the sends that a child reports as done are proof that it no longer reads a request's blocks.

A child is told which ended requests it still owes a send. A report of any other request may be about less than all of
it: the child said so before it had been asked for the rest. It proves nothing.

A child whose sends are *pulled by a peer* is the exception. The peer hears of a request from its final output, so what
it reports as read was complete, and the scheduler half has opened the send before. Only the debt itself, which comes
with the engine's next step, can be later than the peer: on a quick machine it often is.
"""

from __future__ import annotations

from collections.abc import Iterable

from raykv.types import RequestId

REMEMBERED = 1024
"""Sends that were done before they were owed; their debts are a step behind."""


class OwedSends:
    """The open sends of one child on one rank."""

    def __init__(self, pulled_by_peers: bool) -> None:
        self._pulled_by_peers = pulled_by_peers
        self._owed: set[RequestId] = set()
        self._done_early: dict[RequestId, None] = {}

    def owe(self, requests: Iterable[RequestId]) -> None:
        for request in requests:
            if request in self._done_early:
                del self._done_early[request]
            else:
                self._owed.add(request)

    def done(self, reported: Iterable[RequestId]) -> tuple[set[RequestId], set[RequestId]]:
        """Those that settle their send, and those that prove nothing."""
        reported = set(reported)
        asked = reported & self._owed
        self._owed -= asked
        early = reported - asked
        if not self._pulled_by_peers:
            return asked, early
        self._done_early.update(dict.fromkeys(early))
        while len(self._done_early) > REMEMBERED:
            del self._done_early[next(iter(self._done_early))]
        return reported, set()
