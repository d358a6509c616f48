"""A Directory in this process behind what a publisher and a locator need of one: it dies, comes back empty, hangs.

`InProcessDirectory` is itself what they are given to find it. Arguments and results are pickled as Ray would.
"""

from __future__ import annotations

import pickle
import threading
from typing import Any

from raykv.actors.directory import Directory
from raykv.actors.store_call import Done
from raykv.errors import HostDied, HostError, HostRaised, HostTimeout


class InProcessDirectory:
    """`calls` has every call in order. Calls to a handle of a life that is gone fail, until it is found again."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.directory: Directory | None = Directory(**options)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.found = 0
        self.lost_answers = 0
        """So many of the next calls run, and their answers are lost."""
        self._hung: list[threading.Event] = []
        self.hanging = False

    # -- what tests do to it --------------------------------------------------------------------------------

    def die(self) -> None:
        if self.directory is not None:
            self.directory.close()
        self.directory = None

    def come_back(self) -> None:
        self.directory = Directory(**self._options)

    def go_on(self) -> None:
        """End a `hanging`."""
        self.hanging = False
        for event in self._hung:
            event.set()

    def of(self, method: str) -> list[Any]:
        """The first arguments of all calls of a method."""
        return [args[0] for name, args in self.calls if name == method]

    def close(self) -> None:
        self.go_on()
        if self.directory is not None:
            self.directory.check_integrity()
        self.die()

    # -- FindDirectory and DirectoryCaller ------------------------------------------------------------------

    def __call__(self) -> Handle | None:
        self.found += 1
        return None if self.directory is None else Handle(self, self.directory)


class Handle:
    """One life of it, as somebody found it."""

    def __init__(self, owner: InProcessDirectory, life: Directory) -> None:
        self._owner, self._life = owner, life

    def submit(self, method: str, *args: Any, done: Done) -> None:
        def run() -> None:
            if self._owner.hanging:
                event = threading.Event()
                self._owner._hung.append(event)
                event.wait(30)
            try:
                result, error = self.call(method, *args, timeout=30), None
            except HostError as raised:
                result, error = None, raised
            done(result, error)

        threading.Thread(target=run, daemon=True).start()

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        owner = self._owner
        if owner.directory is not self._life:
            raise HostDied("the Directory is gone")
        owner.calls.append((method, args))
        try:
            result = pickle.loads(pickle.dumps(getattr(self._life, method)(*pickle.loads(pickle.dumps(args)))))
        except Exception as error:
            raise HostRaised("raykv-directory", type(error).__name__, str(error), "") from error
        if owner.lost_answers:
            owner.lost_answers -= 1
            raise HostTimeout("no answer")
        return result
