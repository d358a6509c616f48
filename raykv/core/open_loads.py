"""The asynchronous loads that one child has open on one rank, and how its reports end them.

A child names requests when they arrive and block ids when they fail, possibly in different polls. This book
brings both together into one end for each load, with the attempt that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from raykv.messages import NO_ATTEMPT, EventKind, LoadOrder
from raykv.types import Attempt, RequestId

End = tuple[EventKind, RequestId, Attempt]


@dataclass(slots=True)
class _OpenLoad:
    attempt: Attempt
    blocks: frozenset[int]
    deadline: float
    failed: bool = False


class OpenLoads:
    """Times are monotonic seconds. Falsy while nothing is open."""

    def __init__(self) -> None:
        self._open: dict[RequestId, _OpenLoad] = {}

    def begin(self, orders: Iterable[LoadOrder], deadline: float) -> None:
        """These loads were handed to the child."""
        for order in orders:
            self._open[order.request] = _OpenLoad(order.attempt, frozenset(order.blocks), deadline)

    def end(
        self, receiving: Iterable[RequestId], failed: Iterable[RequestId], invalid_blocks: Iterable[int]
    ) -> Iterator[End]:
        """The ends that a report brings. A load ends when the child names it as received, well or not."""
        failed = set(failed)
        invalid = set(invalid_blocks)
        for request, load in self._open.items():
            load.failed |= request in failed or not load.blocks.isdisjoint(invalid)
        for request in receiving:
            found = self._open.pop(request, None)
            bad = found.failed if found is not None else request in failed
            attempt = found.attempt if found is not None else NO_ATTEMPT
            yield (EventKind.RECV_FAILED if bad else EventKind.RECV_DONE), request, attempt

    def lose(self) -> Iterator[End]:
        """The process is dead: every open load has failed."""
        for request, load in self._open.items():
            yield EventKind.RECV_FAILED, request, load.attempt
        self._open = {}

    def overdue(self, now: float) -> RequestId | None:
        """A load past its deadline, if any."""
        return next((request for request, load in self._open.items() if now > load.deadline), None)

    def __len__(self) -> int:
        return len(self._open)
