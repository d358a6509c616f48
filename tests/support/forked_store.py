"""A NodeStore in a process of its own that can be killed for real, many times a minute.

A small server imports everything once and forks a process per life of the store (it is single-threaded and has no
pool open, so that is safe). `ForkedStore` is what a link is given to open the store.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from raykv.actors.processes import Pidfd
from raykv.actors.store_call import Done
from raykv.errors import HostDied, HostRaised, StoreError
from raykv.store_messages import Attached, StoreSpec
from tests.support.store_calls import call_and_wait

REPOSITORY = Path(__file__).resolve().parents[2]


class ForkedStore:
    """The store's lives, one after the other. `pid` of the life that is."""

    def __init__(self, spec: StoreSpec, folder: Path) -> None:
        self.name = f"raykv-store-{spec.name}-0123"
        self._spec, self._folder = spec, folder
        self._address = str(folder / "socket")
        self._server = subprocess.Popen(
            [sys.executable, __file__, self._address],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            start_new_session=True,
        )
        assert self._server.stdout is not None and self._server.stdout.readline() == b"ready\n"
        self._lock = threading.Lock()
        self._calls: dict[int, Done] = {}
        self._ids = itertools.count()
        self._connection: Connection | None = None
        self._process: Pidfd | None = None
        self.pid = 0

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        process = self._process
        if process is not None:
            process.signal(signal.SIGKILL)
            assert process.wait(30)

    def close(self) -> None:
        self.kill()
        self._server.kill()
        self._server.wait(30)
        assert self._server.stdout is not None
        self._server.stdout.close()

    # -- StoreCaller ----------------------------------------------------------------------------------------

    def __call__(self) -> ForkedStore:
        with self._lock:
            if self._connection is None:
                try:
                    self._start()
                except (OSError, EOFError) as error:
                    raise StoreError(f"the store did not start: {error}") from error
        return self

    def _start(self) -> None:
        connection = Client(self._address, "AF_UNIX")
        connection.send((self._spec, self._folder))
        self.pid = connection.recv()
        self._process, self._connection = Pidfd.open(self.pid), connection
        threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def submit(self, method: str, *args: Any, done: Done) -> None:
        with self._lock:
            number = next(self._ids)
            self._calls[number] = done
            with contextlib.suppress(OSError):
                if self._connection is not None:
                    self._connection.send((number, method, args))
                    return
            del self._calls[number]
        done(None, HostDied("the store is gone"))

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        return call_and_wait(self, method, *args, timeout=timeout)

    def process(self, attached: Attached) -> Pidfd | None:
        return Pidfd.open(attached.pid, attached.started)

    def _read(self, connection: Connection) -> None:
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            while True:
                number, result, error = connection.recv()
                with self._lock:
                    done = self._calls.pop(number)
                done(result, HostRaised("store", *error) if error is not None else None)
        with self._lock:
            self._connection = None
            lost, self._calls = self._calls, {}
        for done in lost.values():
            done(None, HostDied("the store is gone"))


# -- the server and the store's process ---------------------------------------------------------------------


def serve(address: str) -> None:
    from raykv.actors.node_store import NodeStore
    from raykv.storage.row_copy import row_copy

    row_copy()  # once for all lives

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are reaped by the kernel
    with Listener(address, "AF_UNIX") as listener:
        print("ready", flush=True)
        while True:
            connection = listener.accept()
            if os.fork() == 0:
                spec, folder = connection.recv()
                connection.send(os.getpid())
                run(NodeStore(spec, "test", own_process=True, shm=folder), connection)
                os._exit(0)
            connection.close()


def run(store: Any, connection: Connection) -> None:
    lock = threading.Lock()

    def answer(number: int, method: str, args: tuple[Any, ...]) -> None:
        result, error = None, None
        try:
            result = getattr(store, method)(*args)
        except Exception as raised:
            error = (type(raised).__name__, str(raised), traceback.format_exc())
        with lock, contextlib.suppress(OSError):
            connection.send((number, result, error))

    with contextlib.suppress(OSError, EOFError):
        while True:
            threading.Thread(target=answer, args=connection.recv(), daemon=True).start()


if __name__ == "__main__":
    serve(sys.argv[1])
