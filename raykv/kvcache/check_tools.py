"""A second process for the check script: spawned, given a role, spoken to over a pipe."""

from __future__ import annotations

import multiprocessing as mp
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from raykv.errors import RayKVError

ANSWER_S = 120.0  # a fresh process imports torch and creates a CUDA context first
SPAWN = mp.get_context("spawn")


def child(conn: Connection, role: Callable[..., Any], *args: Any) -> None:
    """Run `role`, which talks over `conn`; send its exception as ("error", type, text)."""
    try:
        role(conn, *args)
    except Exception as error:
        conn.send(("error", type(error).__name__, str(error)))
        if not isinstance(error, RayKVError):
            traceback.print_exc()


@contextmanager
def process(role: Callable[..., Any], *args: Any) -> Iterator[tuple[Connection, Any]]:
    """A spawned process in `role` and the pipe to it; it is gone at the end."""
    ours, theirs = SPAWN.Pipe()
    running = SPAWN.Process(target=child, args=(theirs, role, *args), daemon=True)
    running.start()
    theirs.close()
    try:
        yield ours, running
    finally:
        ours.close()
        running.join(timeout=10)
        if running.is_alive():
            running.kill()
            running.join()


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables for the processes started inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def receive(conn: Connection) -> Any:
    """The next message; an error of the other process is raised here."""
    if not conn.poll(ANSWER_S):
        raise TimeoutError(f"no answer from the other process in {ANSWER_S:.0f} s")
    message = conn.recv()
    if isinstance(message, tuple) and message[:1] == ("error",):
        raise AssertionError(f"the other process raised {message[1]}: {message[2]}")
    return message


def expect(found: object, wanted: object) -> None:
    """Compare."""
    if found != wanted:
        raise AssertionError(f"expected {wanted}, found {found}")


def expect_error(conn: Connection, kind: str, text: str) -> str:
    """Receive an error of that kind whose message contains `text`; return the message."""
    try:
        message = receive(conn)
    except AssertionError as error:
        if f"raised {kind}" in str(error) and text in str(error):
            return str(error).partition(": ")[2]
        raise
    raise AssertionError(f"expected {kind}, got {message!r}")
