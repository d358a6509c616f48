"""A small plain class for actors, and what it takes to launch it."""

import itertools
import os
import threading
import time

from raykv.actors.handles import RemoteHost
from raykv.actors.host_base import HostBase
from tests.support.process import REPOSITORY

READY_S = 60.0
"""Generous: a worker process starts in a second on an idle machine."""
_number = itertools.count()


class FakeHost(HostBase):
    """Adds, raises, sleeps; `mode` makes its constructor raise or hang."""

    CONTROL_METHODS = ("status",)

    def __init__(self, mode: str = "well") -> None:
        if mode == "raise":
            raise RuntimeError("no such device")
        if mode == "hang":
            time.sleep(3600)

    def __repr__(self) -> str:
        return "FakeHost(child rank 0)"

    def add(self, left: int, right: int) -> int:
        return left + right

    def thread(self) -> int:
        return threading.get_native_id()

    def boom(self) -> None:
        raise KeyError("block 7")

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def status(self) -> str:
        return "up"


def launch(mode: str = "well", name: str | None = None, cuda_uuid: str | None = None, **env: str) -> RemoteHost:
    """FakeHost as an actor, not yet ready."""
    env = {"PYTHONPATH": str(REPOSITORY), **env}
    name = name or f"fake.{os.getpid()}.{next(_number)}"
    return RemoteHost.launch(FakeHost, (mode,), name=name, env=env, cuda_uuid=cuda_uuid)


def ready(**options: str) -> RemoteHost:
    """The same, ready."""
    host = launch(**options)
    host.wait_ready(READY_S)
    return host
