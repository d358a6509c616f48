"""A small load of requests through a router, each compared with what a plain engine answers."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from tests.support.prompts import LOAD, LOAD_TOKENS
from tests.support.real_cluster import Answer, ask, until

PAUSE_S = 0.3
"""After each request: what is started anew needs two cores too."""


@dataclass(frozen=True)
class Outcome:
    """One request. Times are of `time.monotonic`."""

    prompt: str
    stream: bool
    began: float
    ended: float
    answer: Answer
    right: bool
    """What tokens there are are the right ones; all of them, if there was no error."""

    @property
    def well(self) -> bool:
        """Answered in full."""
        return self.right and not self.answer.error and not self.answer.broken

    def __str__(self) -> str:
        kind = "stream" if self.stream else "whole"
        return f"{self.prompt} ({kind}, {self.ended - self.began:.1f} s): {self.answer}"


class Load:
    """Threads that ask one prompt after the other, every second one as a stream, from `with` to its end."""

    def __init__(self, router: str, model: str, expected: Mapping[str, list[int]], threads: int = 2) -> None:
        self._router, self._model, self._expected = router, model, expected
        self._prompts = itertools.cycle(enumerate(LOAD))
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._run, name=f"load-{i}", daemon=True) for i in range(threads)]
        self.outcomes: list[Outcome] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Returns when no request is under way any more."""
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def answered_since(self, moment: float, count: int) -> None:
        """Wait until so many requests that began after `moment` were answered in full."""
        until(
            lambda: sum(one.well and one.began >= moment for one in list(self.outcomes)) >= count,
            f"the load does not flow: {[str(one) for one in self.outcomes[-10:]]}",
        )

    def _run(self) -> None:
        while not self._closed.wait(PAUSE_S):
            with self._lock:
                number, name = next(self._prompts)
            # An odd number of turns apart, so that each prompt comes as both.
            stream = (number + number // 8 + len(self.outcomes) // len(LOAD)) % 2 == 0
            began = time.monotonic()
            answer = ask(self._router, self._model, LOAD[name], LOAD_TOKENS, stream)
            ended = time.monotonic()
            whole = not answer.error and not answer.broken
            wanted = self._expected[name] if whole else self._expected[name][: len(answer.tokens)]
            self.outcomes.append(Outcome(name, stream, began, ended, answer, answer.tokens == wanted))
