"""The operations of a store that take long: one bounded registry for all kinds, by the number that who orders chose.

The theory. A number is *begun* once and *ended* once; between the two it only counts up. Who orders may ask for that
number again, because an answer was lost: the first order goes on and answers. What has ended is kept for the last
ENDED operations, so that its result can be asked for; what runs is never dropped, and no more than RUNNING may run.

An operation runs in a thread of its owner's. `stopped(number)` tells that thread to come to its end: the store closes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from raykv.admin_messages import OperationKind, OperationState
from raykv.errors import IntegrityError, StoreError

ENDED = 128
"""So many ended operations are remembered."""
RUNNING = 8
"""So many may run at once: each has a thread, and all of them share one memory and one disk."""
NUMBER_LEN = 128
"""The longest number, in characters."""


class OperationBook:
    """Any thread: it has a lock of its own, held for moments, and calls nobody under it but the clock."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch."""
        self._clock = clock
        self._lock = threading.Lock()
        self._states: dict[str, OperationState] = {}  # oldest first
        self._closed = False

    def begin(self, number: str, kind: OperationKind, total: int = 0) -> tuple[OperationState, bool]:
        """The state of the operation, and whether this call began it: then, and only then, the caller carries it out
        and calls `end`.

        Raises StoreError, and changes nothing: for a bad number, one that was begun as another kind, and where too many
        run.
        """
        if not isinstance(number, str) or not 0 < len(number) <= NUMBER_LEN:
            raise StoreError(f"An operation's number is a text of 1 to {NUMBER_LEN} characters, not {number!r:.200}.")
        with self._lock:
            known = self._states.get(number)
            if known is not None:
                if known.kind is not kind:
                    raise StoreError(
                        f"Operation {number} is a {known.kind}, and this one is a {kind}: give it a number of its own."
                    )
                return known, False
            if self._closed:
                raise StoreError(f"The store is being shut down: operation {number} ({kind}) was not begun.")
            running = [state for state in self._states.values() if state.running]
            if len(running) >= RUNNING:
                raise StoreError(
                    f"{len(running)} operations run already ({', '.join(state.number for state in running[:3])}, ...): "
                    f"order {number} ({kind}) again when one of them has ended."
                )
            state = OperationState(number, kind, 0, max(0, total), running=True, began=self._clock())
            self._states[number] = state
            self._drop_old()
            return state, True

    def advance(self, number: str, done: int = 1, total: int | None = None) -> OperationState:
        """`done` more blocks are done. `total`: how many it is about, where that is known only now."""
        with self._lock:
            state = self._running(number)
            of = state.total if total is None else total
            now = state.done + done
            self._states[number] = state = replace(state, done=now, total=max(of, now))
            return state

    def end(self, number: str, result: str = "", error: str = "") -> OperationState:
        """It runs no more: in a sentence each what was done, and what was not. Once."""
        with self._lock:
            state = self._running(number)
            ended = max(self._clock(), state.began)
            self._states[number] = state = replace(state, running=False, ended=ended, result=result, error=error)
            self._drop_old()
            return state

    def get(self, number: str) -> OperationState:
        """How far it is. Raises StoreError if it is not known (any more)."""
        with self._lock:
            state = self._states.get(number) if isinstance(number, str) else None
        if state is None:
            raise StoreError(
                f"The store knows no operation {number!r:.200}: it was never begun here, or in an earlier life, or is "
                f"older than the last {ENDED}. `operations` lists those it knows."
            )
        return state

    def all(self) -> tuple[OperationState, ...]:
        """All that are known, oldest first."""
        with self._lock:
            return tuple(self._states.values())

    def stopped(self, number: str) -> bool:
        """Whether it must come to its end now: the store closes, or it is not known."""
        with self._lock:
            state = self._states.get(number)
            return self._closed or state is None or not state.running

    def close(self) -> None:
        """Nothing begins any more, and all that runs is told to stop; each still calls `end`."""
        with self._lock:
            self._closed = True

    def _running(self, number: str) -> OperationState:
        state = self._states.get(number)
        if state is None or not state.running:
            raise IntegrityError(f"operation {number} does not run")
        return state

    def _drop_old(self) -> None:
        ended = [number for number, state in self._states.items() if not state.running]
        for number in ended[: max(0, len(ended) - ENDED)]:
            del self._states[number]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless it is bounded, and each state agrees with itself."""
        states = self.all()
        running = sum(state.running for state in states)
        if running > RUNNING or len(states) - running > ENDED:
            raise IntegrityError(f"{running} operations run and {len(states) - running} are kept")
        for state in states:
            if state.done > state.total or state.running == bool(state.ended) or (state.running and state.result):
                raise IntegrityError(f"{state} contradicts itself")
