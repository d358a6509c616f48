"""A desk without Ray: the real `EngineDesk`, its calls in threads of their own, and what may happen to it."""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from raykv.actors.engine_desk import EngineDesk
from raykv.connector.desk_link import Opened
from raykv.errors import ClusterError, HostDied, HostError, HostRaised
from raykv.types import EngineId

Done = Callable[[Any, HostError | None], None]


class DeskInProcess:
    """One life of a desk. Arguments and results are pickled, as they would be over Ray."""

    def __init__(self, engine: EngineId, last_stories: int, calls: Counter[str]) -> None:
        self.desk = EngineDesk(engine, last_stories)
        self.calls = calls
        self.dead = threading.Event()
        self.silent = False
        self.ended = False

    def submit(self, method: str, *args: Any, done: Done) -> None:
        if self.dead.is_set():
            raise HostDied("the desk is gone")
        self.calls[method] += 1
        self.calls[f"bytes of {method}"] += len(pickle.dumps(args))
        threading.Thread(target=self._run, args=(method, pickle.dumps(args), done), daemon=True).start()

    def _run(self, method: str, args: bytes, done: Done) -> None:
        try:
            result = pickle.loads(pickle.dumps(getattr(self.desk, method)(*pickle.loads(args))))
        except Exception as error:
            done(None, HostRaised("desk", type(error).__name__, str(error), ""))
            return
        if self.silent:
            return
        if self.dead.is_set():
            done(None, HostDied("the desk is gone"))
        else:
            done(result, None)

    def die(self) -> None:
        """Its process is killed: calls that are under way fail."""
        self.dead.set()
        with self.desk._changed:  # whoever waits in it is woken
            self.desk._wait = lambda true, timeout_s: None  # type: ignore[method-assign]
            self.desk._changed.notify_all()

    def end(self) -> None:
        self.ended = True
        self.die()


class DesksInProcess:
    """Opens desks, one life after the other, as Ray would; `away`: there is no head to ask."""

    def __init__(self, last_stories: int = 1000, engine: str = "e") -> None:
        self._engine, self._last = EngineId(engine), last_stories
        self.lives: list[DeskInProcess] = []
        self.calls: Counter[str] = Counter()
        self.away = False
        self.tries = 0
        self.tried = threading.Event()

    def open(self) -> Opened:
        self.tries += 1
        self.tried.set()
        if self.away:
            raise ClusterError("Ray's head is away")
        self.lives.append(DeskInProcess(self._engine, self._last, self.calls))
        return Opened(self.lives[-1], "node-1")

    @property
    def desk(self) -> EngineDesk:
        """Of the current life."""
        return self.lives[-1].desk
