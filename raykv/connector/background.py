"""Work that takes long, in a thread of its own, for somebody who looks again later and never waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Task(Generic[T]):
    """One piece of work. Once `done`, `error` is what it raised, or None."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._result: list[T] = []
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def result(self) -> T:
        """What the work gave; once it is done without an error."""
        return self._result[0]

    def run(self, work: Callable[[], T]) -> None:
        try:
            self._result.append(work())
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()


def in_background(name: str, work: Callable[[], T]) -> Task[T]:
    """Begin it, in a thread that ends with the process."""
    task: Task[T] = Task()
    threading.Thread(target=task.run, args=(work,), name=name, daemon=True).start()
    return task
