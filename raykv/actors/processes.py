"""Processes of this machine: their end, seen through a pidfd, and Ray's own, read from /proc. No Ray call.

A pid alone proves nothing: it is used again, and means another process in another PID namespace. So a process
is named by its pid and the time it started, and a pidfd, once opened on it, can't come to mean another one.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


def start_time(pid: int) -> int | None:
    """When `pid` started, in clock ticks since boot; None: no such process."""
    return _stat_field(pid, 22)


def session_of(pid: int) -> int | None:
    """The session (setsid) that `pid` belongs to; all that it starts stays in it. None: no such process."""
    return _stat_field(pid, 6)


def parent_of(pid: int) -> int | None:
    """The process that started `pid`, or took it over. None: no such process."""
    return _stat_field(pid, 4)


def _stat_field(pid: int, number: int) -> int | None:
    """A field of /proc/PID/stat, numbered as in proc(5)."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The second field is the name in parentheses and may hold spaces and parentheses itself.
    return int(stat.rpartition(b")")[2].split()[number - 3])


class Pidfd:
    """One process, from `open` to its end. Every method may be called from any thread."""

    def __init__(self, fd: int, pid: int) -> None:
        self._fd = fd
        self.pid = pid

    @classmethod
    def open(cls, pid: int, started: int | None = None) -> "Pidfd | None":
        """None: no process `pid` is alive, or it is not the one that started at `started`."""
        try:
            handle = cls(os.pidfd_open(pid), pid)
        except OSError:
            return None
        # Read after the open: if it is the right one now, the pidfd is the right one for ever.
        if started is not None and start_time(pid) != started:
            return None
        return handle

    def alive(self) -> bool:
        """A few microseconds; False means that its memory is gone, also when it is not reaped yet."""
        return not self.wait(0)

    def wait(self, timeout: float | None) -> bool:
        """True when the process has ended; `timeout` in seconds, None for ever."""
        poll = select.poll()  # one object can't be polled by two threads
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(None if timeout is None else max(0.0, timeout * 1000)))

    def signal(self, number: int) -> None:
        """Nothing happens when it has ended. SIGKILL also works on a process stopped by SIGSTOP."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    def __del__(self) -> None:
        # Not earlier: a number closed while another thread polls it may come to mean another file.
        os.close(self._fd)


@dataclass(frozen=True)
class RayProcess:
    """A running `raylet` or `gcs_server` of this machine."""

    pid: int
    kind: str
    args: Mapping[str, str]

    @property
    def gcs_address(self) -> str:
        """host:port of the cluster's GCS, as this process was told."""
        if self.kind == "gcs_server":
            return f"{self.args.get('node-ip-address', '127.0.0.1')}:{self.args.get('gcs_server_port', '')}"
        return self.args.get("gcs-address", "")

    def environment(self) -> dict[str, str] | None:
        """What it was started with; None if it is another user's."""
        return environment_of(self.pid)


def ray_processes() -> list[RayProcess]:
    """All raylets and GCS servers that this process can see."""
    found = []
    for pid in pids():
        argv = command_of(pid)
        kind = os.path.basename(argv[0]) if argv else ""
        if kind in ("raylet", "gcs_server"):
            pairs = (arg[2:].partition("=") for arg in argv[1:] if arg.startswith("--"))
            found.append(RayProcess(pid, kind, {key: value for key, _, value in pairs}))
    return found


def find_by_environment(name: str, value: str) -> int | None:
    """The process that was started with this variable; None if there is none yet or any more.

    Its children inherit the variable: the oldest is meant.
    """
    wanted = f"{name}={value}".encode()
    found = []
    for pid in pids():
        with contextlib.suppress(OSError):
            if wanted in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                found.append((start_time(pid) or 0, pid))
    return min(found)[1] if found else None


def pids() -> Iterator[int]:
    """Every process that this one can see, without itself."""
    own = os.getpid()
    for entry in os.listdir(_PROC):
        if entry.isdigit() and int(entry) != own:
            yield int(entry)


def command_of(pid: int) -> list[str]:
    """Its argument vector; empty when it is gone, has ended and is not reaped yet, or is a kernel thread."""
    try:
        raw = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return [part.decode(errors="replace") for part in raw.rstrip(b"\0").split(b"\0")] if raw else []


def environment_of(pid: int) -> dict[str, str] | None:
    """What it was started with; None when it is gone or another user's."""
    try:
        raw = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    pairs = (item.decode(errors="replace").partition("=") for item in raw.split(b"\0") if b"=" in item)
    return {key: value for key, _, value in pairs}


def end_all(processes: list[Pidfd], grace: float) -> list[int]:
    """SIGTERM, after `grace` seconds SIGKILL; returns the pids that did not end even then (5 s)."""
    for number, limit in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + limit
        for process in processes:
            process.signal(number)
        processes = [p for p in processes if not p.wait(max(0.0, deadline - time.monotonic()))]
    return [process.pid for process in processes]


@contextlib.contextmanager
def off_core_of(pid: int) -> Iterator[None]:
    """Meanwhile, keep this process off the one core that the main thread of `pid` is bound to. For a start-up.

    vLLM's CPU worker is bound so, and never sleeps between steps. On a machine of two cores, a process that started
    on that core got 5 % of it for minutes while the other core was idle: not every kernel moves it away. Nothing is
    done where that thread is not bound to one core (a GPU's worker), or no other core is left. Not for longer than a
    start-up: NIXL's threads, kept on one core with another engine's worker, stood still.
    """
    allowed = os.sched_getaffinity(0)
    try:
        bound = os.sched_getaffinity(pid)
    except OSError:
        bound = set()
    if len(bound) != 1 or not allowed - bound:
        yield
        return
    _run_on(allowed - bound)
    try:
        yield
    finally:
        _run_on(allowed)


def _run_on(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread), cores)
