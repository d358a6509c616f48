"""Threads for calls that may never come back, and what keeps a late call's hands off its caller's memory.

A system call on a network file system whose server is gone waits for ever, and nothing ends it, not even SIGKILL. So
nobody who has anything else to do calls it himself: he gives it to one of these threads, waits for as long as he likes,
and goes on. The thread is lost until the server is back. They are daemons: the process can end.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Abandoned(Exception):
    """Nobody waits for this call any more."""


class Gate:
    """What a call may do to its caller's memory it does inside `entered`; who gives up calls `shut`, and waits for that
    alone. Inside, nothing may block."""

    def __init__(self) -> None:
        self._lock, self._open = threading.Lock(), True

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Raises Abandoned once the gate is shut."""
        with self._lock:
            if not self._open:
                raise Abandoned
            yield

    def shut(self) -> None:
        with self._lock:
            self._open = False


class PatientThreads:
    """`count` threads, started as they are needed. Any thread may call."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._calls: queue.SimpleQueue[tuple[Future, Callable[[], object]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run it when a thread is free. `cancel` of the future holds while it has not begun."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads {self._name} are closed")
            self._calls.put((future, call))
            if len(self._threads) < self._count:
                self._threads.append(threading.Thread(target=self._run, name=self._name, daemon=True))
                self._threads[-1].start()
        return future

    def run(self, call: Callable[[], T], limit_s: float, gate: Gate | None = None) -> T:
        """Its result. Raises TimeoutError after `limit_s`: it may still run then, with `gate` shut."""
        future = self.submit(call)
        try:
            return future.result(limit_s)
        except TimeoutError:
            if gate is not None:
                gate.shut()
            if not future.cancel() and future.done():
                return future.result()  # it has ended just now, or raised this itself
            raise

    def close(self, limit_s: float) -> bool:
        """Whether all threads have ended in that time. What has not begun is cancelled."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._calls.put(None)
        deadline = time.monotonic() + limit_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _run(self) -> None:
        while (job := self._calls.get()) is not None:
            future, call = job
            if self._closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del future, call, job  # an idle thread must not keep what the last call held
