"""Turns: of a group of engines whose spec has changed one at a time is started anew, the next when it is ready again.

Theory. A replica's turn begins when its old instance is told to end, and is over when the new one is ready, or nobody
wants the replica any more. Of an engine that starts though it was nobody's turn (its process had died, or the
Controller's had, in the middle of a change) the turn begins then: nobody else of its group is taken away meanwhile.
An engine that fails in its turn keeps it: a change that does not work goes no further, and the others serve on. But
who gets nowhere for PATIENCE_S, without failing, may wait for what the others hold, such as a GPU: then the next one's
turn begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PATIENCE_S = 45.0
"""Less than the Controller's SILENT_S, after which such an engine counts as failed."""


@dataclass(frozen=True)
class Replica:
    """One that is wanted. `ready`: as it is wanted. `moving`: it is being ended, or starts. `failures`: ever."""

    group: str
    name: str
    ready: bool
    moving: bool
    failures: int


@dataclass
class _Turn:
    name: str
    since: float
    failures: int


class Rolling:
    """Remembers whose turn it is, by group. `now` is in seconds of any clock that does not go back."""

    def __init__(self) -> None:
        self._turns: dict[str, _Turn] = {}
        self._failures: dict[str, int] = {}

    def look(self, replicas: Sequence[Replica], now: float) -> None:
        """These are all that are wanted now. Call it before `take`."""
        self._failures = {one.name: one.failures for one in replicas}
        found = {(one.group, one.name): one for one in replicas}
        for group, turn in list(self._turns.items()):
            one = found.get((group, turn.name))
            if one is None or (one.ready and not one.moving):
                del self._turns[group]
            elif one.moving or one.failures > turn.failures:
                turn.since = now
            elif now - turn.since >= PATIENCE_S:
                del self._turns[group]
        for one in replicas:
            if one.moving and not one.ready and one.group not in self._turns:
                self._turns[one.group] = _Turn(one.name, now, one.failures)

    def take(self, group: str, name: str, now: float) -> bool:
        """Whether it is the turn of this one, of `look`'s; its turn begins if it is nobody's."""
        turn = self._turns.setdefault(group, _Turn(name, now, self._failures.get(name, 0)))
        return turn.name == name
