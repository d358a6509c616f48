"""What the ledger keeps for each open load and send, and what it answers. The rules are in `ledger`."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from raykv.messages import ChildIndex
from raykv.types import Attempt, Incarnation, Rank, RequestId


class LoadState(enum.Enum):
    """Of a load that vLLM waits for: some rank is still to report; or it failed, and the caller looks for somebody
    else who has what is missing; or it failed and waits for its echo."""

    OPEN = "open"
    RETRY = "retry"
    ECHO = "echo"


class Drop(enum.Enum):
    """Why a report was dropped."""

    UNKNOWN = "unknown"  # nothing of the kind is owed: a duplicate, a phantom, or the loser of a load
    LATE = "late"  # of an older attempt or incarnation


@dataclass(slots=True)
class Share:
    """What one child loads of a load. `waiting`: the ranks that have not settled it."""

    waiting: set[Rank]
    failed: bool = False


@dataclass(slots=True)
class Load:
    """An asynchronous load that vLLM holds its request for. `well`: whose shares of earlier attempts ended so."""

    attempt: Attempt
    shares: dict[ChildIndex, Share]
    state: LoadState = LoadState.OPEN
    aborted: bool = False
    well: set[ChildIndex] = field(default_factory=set)

    @property
    def failed(self) -> bool:
        """Whether a share has failed, so that the load as a whole does."""
        return any(share.failed for share in self.shares.values())

    @property
    def is_settled(self) -> bool:
        """Whether no rank owes a share any more."""
        return not any(share.waiting for share in self.shares.values())


@dataclass(slots=True)
class Send:
    """What a child still reads for an ended request. `incarnations`, by rank: the hosts that read."""

    incarnations: tuple[Incarnation, ...]
    waiting: set[Rank]
    opened_at: float


@dataclass(slots=True)
class Settled:
    """What the caller must do after an event."""

    tell: set[RequestId] = field(default_factory=set)  # give vLLM finished_recving for these, now
    echo: set[RequestId] = field(default_factory=set)  # ask the ranks to report these as failed
    retry: dict[RequestId, set[ChildIndex]] = field(default_factory=dict)  # call `retry` or `give_up`: who failed
    sends: set[tuple[RequestId, ChildIndex]] = field(default_factory=set)  # give back the pins of these
    loaded: list[tuple[RequestId, ChildIndex]] = field(default_factory=list)  # shares of loads that ended well
    ended: list[tuple[RequestId, ChildIndex]] = field(default_factory=list)  # shares that ended, well or not
    well: set[tuple[RequestId, ChildIndex]] = field(default_factory=set)  # those of them that did not fail
