"""Carries out what takes long: each operation in a thread of its own, so that who orders it does not wait.

What an operation does is a *runner*'s, one for each kind: `check` says no before anything is changed, `run` does it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from raykv.admin_messages import Operation, OperationKind, OperationState
from raykv.core.operations import OperationBook
from raykv.errors import RayKVError, StoreError

logger = logging.getLogger("raykv")

CLOSE_S = 30.0


class Progress:
    """What a runner tells of itself."""

    def __init__(self, book: OperationBook, number: str) -> None:
        self._book, self._number = book, number

    def total(self, blocks: int) -> None:
        """It is about so many blocks."""
        self._book.advance(self._number, 0, blocks)

    def done(self, blocks: int = 1) -> None:
        """So many more are done."""
        self._book.advance(self._number, blocks)

    @property
    def stopped(self) -> bool:
        """Whether it is to come to its end now: the store closes."""
        return self._book.stopped(self._number)


class Runner(Protocol):
    """Carries out one kind of operation."""

    def check(self, operation: Operation) -> int:
        """About how many blocks it is about. Raises StoreError with one sentence if it can't be done. Quick."""

    def run(self, operation: Operation, progress: Progress) -> str:
        """Do it, in a thread of its own; a sentence that says what was done. Raises RayKVError: that is its error."""


class Operations:
    """One per store. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.book = OperationBook(clock)
        self._runners: dict[OperationKind, Runner] = {}
        self._threads: list[threading.Thread] = []
        self._turn = threading.Lock()

    def add(self, kind: OperationKind, runner: Runner) -> None:
        """From now on operations of this kind can be ordered."""
        self._runners[kind] = runner

    def begin(self, operation: Operation) -> OperationState:
        """Begin it, or answer for the one that has this number already. Raises StoreError, and then nothing begins."""
        if not isinstance(operation, Operation) or not isinstance(operation.kind, OperationKind):
            raise StoreError(f"An order is an Operation with an OperationKind, not {operation!r:.80}.")
        with self._turn:
            known = next((state for state in self.book.all() if state.number == operation.number), None)
            runner = self._runners.get(operation.kind)
            total = 0
            if known is None:
                if runner is None:
                    raise StoreError(f"This store can't {operation.kind} now: no engine has joined it yet.")
                total = runner.check(operation)
            state, new = self.book.begin(operation.number, operation.kind, total)
            if new and runner is not None:
                thread = threading.Thread(
                    target=self._run, args=(runner, operation), name=f"raykv-{operation.kind}", daemon=True
                )
                self._threads = [one for one in self._threads if one.is_alive()] + [thread]
                thread.start()
        return state

    def _run(self, runner: Runner, operation: Operation) -> None:
        result = error = ""
        try:
            result = runner.run(operation, Progress(self.book, operation.number))
        except RayKVError as raised:
            error = str(raised)
        except Exception as raised:  # a defect
            logger.exception("operation %s (%s)", operation.number, operation.kind)
            error = f"{type(raised).__name__}: {raised}"
        finally:
            self.book.end(operation.number, result, error)

    def get(self, number: str) -> OperationState:
        return self.book.get(number)

    def all(self) -> tuple[OperationState, ...]:
        return self.book.all()

    def close(self) -> None:
        """Nothing begins any more; waits for what runs, which is told to stop."""
        self.book.close()
        with self._turn:
            threads = list(self._threads)
        deadline = time.monotonic() + CLOSE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            raise StoreError("An operation still runs: the store's process must be killed.")
