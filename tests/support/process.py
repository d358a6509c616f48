"""Child processes that never outlive their owner: own session, own log, killed as a group."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.support import watchdog
from tests.support.watchdog import session_of

REPOSITORY = Path(__file__).resolve().parents[2]
SHM = Path("/dev/shm")

active_logs: list[Path] = []
"""Logs of what is running, oldest first; conftest shows their tails beside a failed test."""

_MARK = "RAYKV_TEST_SESSION"
_sessions: set[int] = set()
_watchdog: IO[str] | None = None

_SWEPT = re.compile(r"^(psm_|sem\.mp-|sem\.loky|vllm_|nccl)")
"""Segments that vLLM and multiprocessing remove at a normal end only."""


def free_ports(count: int) -> list[int]:
    """Ports free at this moment, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def log_dir() -> Path:
    """Where logs go: $RAYKV_TEST_LOGS, or a folder of this process below the system's temporary folder."""
    chosen = os.environ.get("RAYKV_TEST_LOGS")
    path = Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"raykv-logs-{os.getpid()}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def tail(path: Path, lines: int = 60) -> str:
    """The last lines of a log; empty if it is gone."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


class ProcessGroup:
    """One command in its own session with its output in a log file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._shm_before = shm_names()
        self.log = log_dir() / f"{name}-{os.getpid()}-{time.monotonic_ns() // 1_000_000}.log"
        with self.log.open("wb") as out:
            self._popen = subprocess.Popen(
                list(command),
                cwd=REPOSITORY,
                env=dict(os.environ) | {_MARK: str(os.getpid())} | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )
        self.pid = self._popen.pid
        watch_session(self.pid)
        active_logs.append(self.log)

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def wait(self, timeout_s: float) -> bool:
        """True if the leader ended by itself in time."""
        try:
            self._popen.wait(timeout_s)
            return True
        except subprocess.TimeoutExpired:
            return False

    def members(self) -> list[int]:
        """Pids of the session, also of those whose parent is gone."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and session_of(int(entry.name)) == self.pid:
                found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """SIGKILL for every process of the session, then its left-over shared memory goes."""
        deadline = time.monotonic() + 20
        while members := self.members():
            for pid in members:
                end(pid)
            self._popen.poll()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}: processes {members} survive SIGKILL")
            time.sleep(0.02)
        self._popen.wait()
        forget_session(self.pid)
        orphans = {n for n in shm_names() - self._shm_before if _SWEPT.match(n)}
        # A segment that nobody has mapped is nobody's. A semaphore may be another session's, so it stays then.
        shared = other_sessions()
        for name in orphans - mapped_shm():
            if name.startswith(("psm_", "vllm_")) or not shared:
                (SHM / name).unlink(missing_ok=True)
        if self.log in active_logs:
            active_logs.remove(self.log)


def watch_session(session: int) -> None:
    """Count a session among ours; the watchdog ends it if this process is killed."""
    global _watchdog
    _sessions.add(session)
    if _watchdog is None:
        read, write = os.pipe()
        subprocess.Popen(
            [sys.executable, "-S", watchdog.__file__, str(read)], pass_fds=[read], start_new_session=True, cwd="/"
        )
        os.close(read)
        _watchdog = os.fdopen(write, "w", buffering=1)
    _watchdog.write(f"+{session}\n")


def forget_session(session: int) -> None:
    """It has ended: its number may come back as somebody else's."""
    _sessions.discard(session)
    if _watchdog is not None:
        _watchdog.write(f"-{session}\n")


def survivors() -> dict[int, str]:
    """Processes that came from this one and still run, with their commands."""
    mark = f"{_MARK}={os.getpid()}".encode()
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            session = session_of(int(entry.name))
            # A process that renamed itself may have overwritten its environment: hence the session as well.
            if session in _sessions or (session and mark in (entry / "environ").read_bytes().split(b"\0")):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
    return found


def other_sessions() -> bool:
    """Whether processes of another test session (demo, benchmark) run on this machine."""
    mark = f"{_MARK}=".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                for variable in (entry / "environ").read_bytes().split(b"\0"):
                    if variable.startswith(mark) and variable != mark + str(os.getpid()).encode():
                        return True
    return False


def end(pid: int) -> None:
    """SIGKILL a process that may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_ours(name: str) -> bool:
    """Whether a name in /dev/shm can only come from an engine or from RayKV."""
    return bool(re.match(r"raykv|rk_|torch_", name) or _SWEPT.match(name))


def shm_names() -> set[str]:
    """What lies in /dev/shm now."""
    return {path.name for path in SHM.iterdir()} if SHM.is_dir() else set()


def mapped_shm() -> set[str]:
    """Names in /dev/shm that some process has mapped."""
    found: set[str] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found |= set(re.findall(r"/dev/shm/(\S+)", (entry / "maps").read_text()))
    return found
