"""Questions for which a store looks at other nodes: each has an answer already, which stands unless more is found.

This class decides only; its caller asks the store and answers. One thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from raykv.store_messages import LookedUp, LookUp
from raykv.types import LeaseId

MAX_LATE = 1000
"""Calls that are waited for though nobody needs them: only to give back what they have leased."""


@dataclass(frozen=True, slots=True)
class _Reaching:
    """The store looks for more than `have`, which is the answer at `limit`."""

    look_up: LookUp
    have: LookedUp
    limit: float


class Reaches:
    """By the token of the call. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._open: dict[int, _Reaching] = {}
        self._late: dict[int, LookedUp] = {}  # what was answered instead
        self._spare: list[LeaseId] = []

    def __contains__(self, token: int) -> bool:
        """Whether an answer to this call is still of use."""
        return token in self._open or token in self._late

    def begin(self, token: int, look_up: LookUp, have: LookedUp, limit: float) -> None:
        """The store is asked; `have` is the answer at `limit`."""
        self._open[token] = _Reaching(look_up, have, limit)

    def end(self, token: int, found: LookedUp | None) -> tuple[LookUp, LookedUp] | None:
        """The call has ended, None: by an error. The question and its answer; None: it has been answered before."""
        reaching = self._open.pop(token, None)
        if reaching is not None:
            return reaching.look_up, found if found is not None else reaching.have
        have = self._late.pop(token)
        if found is not None and have.lease is None and found.lease is not None:
            self._spare.append(found.lease)
        return None

    def overdue(self, now: float) -> list[tuple[LookUp, LookedUp]]:
        """Questions that wait no longer, with their answers."""
        late = [(token, one) for token, one in self._open.items() if one.limit <= now]
        for token, one in late:
            del self._open[token]
            self._late[token] = one.have
            if len(self._late) > MAX_LATE:
                del self._late[next(iter(self._late))]
        return [(one.look_up, one.have) for _, one in late]

    @property
    def next_at(self) -> float | None:
        """When `overdue` next has something; None: nothing is open."""
        return min((one.limit for one in self._open.values()), default=None)

    def take_spare(self) -> list[LeaseId]:
        """Leases that came too late to be of use, each once."""
        spare, self._spare = self._spare, []
        return spare
