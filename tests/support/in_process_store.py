"""A NodeStore in this process behind what a link needs of one: it dies, comes back, hangs and dawdles when told to.

`InProcessStore` is itself what a link is given to open the store. Each call runs in a thread of its own, its arguments
and its result pickled as Ray would. A death waits for the copies that run, since threads can't be killed; the link
sees the process as dead only after that, so its safety rule is kept for real.
"""

from __future__ import annotations

import pickle
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from raykv.actors.node_store import NodeStore
from raykv.actors.store_call import Done
from raykv.errors import HostDied, HostError, HostRaised, StoreError
from raykv.store_messages import Attached, StoreSpec
from tests.support.store_calls import call_and_wait


class Life:
    """One life of the store, and its process as a link sees it."""

    def __init__(self, store: NodeStore) -> None:
        self.store = store
        self.dying, self.gone = threading.Event(), threading.Event()
        self._running = 0
        self._changed = threading.Condition()

    def alive(self) -> bool:
        return not self.gone.is_set()

    def wait(self, timeout: float | None) -> bool:
        return self.gone.wait(timeout)

    def signal(self, number: int) -> None:
        """Any signal is a death here."""
        with self._changed:
            if self.dying.is_set():
                return
            self.dying.set()
        threading.Thread(target=self._die, daemon=True).start()

    def _die(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0)
        self.store.shutdown(remove_host=False)
        self.gone.set()

    def run(self, method: str, args: tuple[Any, ...]) -> Any:
        with self._changed:
            if self.dying.is_set():
                raise HostDied("the store is gone")
            self._running += 1
        try:
            result = getattr(self.store, method)(*pickle.loads(pickle.dumps(args)))
            if self.dying.is_set():
                raise HostDied("the store is gone")
            return pickle.loads(pickle.dumps(result))
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()


class InProcessStore:
    """Call it to open it. `calls` counts what was called, by method; `lives` has one entry a life."""

    def __init__(self, spec: StoreSpec, shm: Path, *, restart_after_s: float = 0.0, **options: Any) -> None:
        self._make = lambda: NodeStore(spec, "test", shm=shm, **options)
        self.name = f"raykv-store-{spec.name}-0123"
        self.restart_after_s = restart_after_s
        self.calls: dict[str, int] = {}
        self.lives: list[Life] = []
        self.stays_dead = False
        self._delays: dict[str, float] = {}
        self._hung: dict[str, threading.Event] = {}
        self._lock = threading.RLock()
        self._dead_at = 0.0
        self._start()

    # -- what tests do to it --------------------------------------------------------------------------------

    @property
    def store(self) -> NodeStore:
        """The store of the life that is, or was last."""
        return self.lives[-1].store

    def die(self) -> None:
        """As by kill -9, and wait until it is gone; it comes back when it is called after `restart_after_s`."""
        self._dead_at = time.monotonic()
        self.lives[-1].signal(9)
        assert self.lives[-1].wait(30)

    def hang(self, *methods: str) -> None:
        """These methods don't begin any more, until `go_on` or the end of this life."""
        for method in methods:
            self._hung[method] = threading.Event()

    def go_on(self) -> None:
        hung, self._hung = self._hung, {}
        for event in hung.values():
            event.set()

    def delay(self, seconds: float, *methods: str) -> None:
        """These methods begin so much later."""
        self._delays.update(dict.fromkeys(methods, seconds))

    def close(self) -> None:
        self.stays_dead = True
        self.go_on()
        life = self.lives[-1]
        life.signal(9)
        assert life.wait(30)

    # -- StoreCaller ----------------------------------------------------------------------------------------

    def __call__(self) -> InProcessStore:
        if self._current() is None:
            raise StoreError("the store is not there")
        return self

    def submit(self, method: str, *args: Any, done: Done) -> None:
        def run() -> None:
            try:
                result, error = self._run(method, args), None
            except HostError as raised:
                result, error = None, raised
            done(result, error)

        threading.Thread(target=run, name=f"store-{method}", daemon=True).start()

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        return call_and_wait(self, method, *args, timeout=timeout)

    def process(self, attached: Attached) -> Life | None:
        life = next((life for life in self.lives if life.store.life == attached.store), None)
        return life if life is not None and life.alive() else None

    # -- parts ----------------------------------------------------------------------------------------------

    def _run(self, method: str, args: tuple[Any, ...]) -> Any:
        life = self._current()
        if life is None:
            raise HostDied("the store is not there")
        self.calls[method] = self.calls.get(method, 0) + 1
        hung = self._hung.get(method)
        while hung is not None and not hung.wait(0.01):
            if life.dying.is_set():
                raise HostDied("the store is gone")
        life.dying.wait(self._delays.get(method, 0.0))
        try:
            return life.run(method, args)
        except HostError:
            raise
        except Exception as error:
            raise HostRaised("store", type(error).__name__, str(error), traceback.format_exc()) from error

    def _current(self) -> Life | None:
        with self._lock:
            if self.lives[-1].alive():
                return self.lives[-1]
            if self.stays_dead or time.monotonic() < self._dead_at + self.restart_after_s:
                return None
            return self._start()

    def _start(self) -> Life:
        self.lives.append(Life(self._make()))
        return self.lives[-1]
