"""The stores that may take the blocks of one that is drained: which is asked next, and when one is given up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from raykv.actors.peer_finder import OpenPeer
from raykv.actors.store_call import StoreCaller, reason
from raykv.errors import HostError, HostTimeout, RayKVError
from raykv.peer_messages import Adopted, Room
from raykv.types import StoreLife

ASK_S = 5.0
ANSWER_S = 30.0
LOOK_S = 0.1
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
MOST_FAILURES = 8
"""In a row, over about 20 seconds: a store that was killed is back by then, and has its blocks."""
ROOM_PAUSE_S = 0.2
STALL_S = 10.0
"""So long a store may take to make room for one block."""

GoesOn = Callable[[], bool]


class Target:
    """One other store. `number` is its place in the book of the drain. One thread."""

    def __init__(self, name: str, number: int, open_peer: OpenPeer) -> None:
        self.name, self.number = name, number
        self.slots = 0
        self.given_up = ""
        """Why it is asked no more."""
        self._open_peer = open_peer
        self._caller: StoreCaller | None = None
        self._life: StoreLife | None = None
        self._failures = 0
        self._not_before = 0.0
        self._stalled_since: float | None = None

    def may(self, now: float) -> bool:
        return not self.given_up and now >= self._not_before

    def submit(self, method: str, argument: Any) -> Callable[[float], Any]:
        """Ask; what is returned waits for the answer, and raises RayKVError where there is none."""
        if self._caller is None:
            self._caller = self._open_peer(self.name)
        answered = threading.Event()
        answers: list[tuple[Any, HostError | None]] = []

        def done(result: Any, error: HostError | None) -> None:
            answers.append((result, error))
            answered.set()

        def wait(seconds: float) -> Any:
            if not answered.wait(seconds):
                raise HostTimeout(f"{self.name} did not answer in time")
            result, error = answers[0]
            if error is not None:
                raise error
            return result

        self._caller.submit(method, argument, done=done)
        return wait

    def call(self, method: str, argument: Any, goes_on: GoesOn) -> Any:
        """The answer, if it comes within ANSWER_S. Raises RayKVError."""
        wait = self.submit(method, argument)
        for _ in range(int(ANSWER_S / LOOK_S)):
            try:
                return wait(LOOK_S)
            except HostTimeout:
                if not goes_on():
                    break
        raise HostTimeout("it did not answer in time")

    def is_new(self, life: StoreLife) -> bool:
        """Whether it is another life than the one that answered before."""
        before, self._life = self._life, life
        return before not in (None, life)

    def failed(self, error: Exception | str, now: float) -> None:
        """It did not answer, or could not do it."""
        self._caller = None
        self._failures += 1
        if self._failures >= MOST_FAILURES:
            self.given_up = error if isinstance(error, str) else reason(error)
        self._not_before = now + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._failures - 1))

    def answered(self, taken: int, some: bool, answer: Adopted, now: float) -> None:
        """It took so many blocks; `some`: of others it says that they are there."""
        self._failures, self.slots = 0, max(0, self.slots - taken)
        if answer.full and not answer.more:
            self.given_up = answer.refused or "it is full"
        elif some or taken:
            self._stalled_since = None
        else:
            self._stalled_since = now if self._stalled_since is None else self._stalled_since
            self._not_before = now + ROOM_PAUSE_S
            if now - self._stalled_since > STALL_S:
                self.given_up = "it makes no more room"


class Targets:
    """All of them. One thread."""

    def __init__(self, names: Sequence[str], open_peer: OpenPeer, first_number: int, most: int) -> None:
        """`most` of them at most, numbered from `first_number` on."""
        self._all = [Target(name, first_number + i, open_peer) for i, name in enumerate(sorted(names)[:most])]

    def ask_for_room(self, slot_nbytes: int, goes_on: GoesOn) -> None:
        """Ask all at once, for ASK_S at most. One that does not answer comes last."""
        waiting: list[tuple[Target, Callable[[float], Any]]] = []
        for target in self._all:
            try:
                waiting.append((target, target.submit("room", slot_nbytes)))
            except RayKVError as error:
                target.given_up = reason(error)
        looks = int(ASK_S / LOOK_S)
        for target, wait in waiting:
            while True:
                try:
                    room = wait(LOOK_S)
                    if isinstance(room, Room):
                        target.slots, target.given_up = room.slots, room.refused
                    break
                except HostTimeout:
                    looks -= 1
                    if looks <= 0 or not goes_on():
                        break
                except RayKVError:
                    break  # it may be coming back

    def next(self, now: float) -> Target | None:
        """The one with the most free host memory; None: none can be asked now."""
        return max((target for target in self._all if target.may(now)), key=lambda one: one.slots, default=None)

    @property
    def none_left(self) -> bool:
        return all(target.given_up for target in self._all)

    def why(self) -> str:
        """Why what is left could not be moved."""
        reasons = [f"{target.name}: {target.given_up}" for target in self._all if target.given_up]
        return "; ".join(reasons[:3]) or "there is no other store to take its blocks"
