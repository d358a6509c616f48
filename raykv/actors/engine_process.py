"""A real `vllm serve` process under a guard: its lines are read, its end is seen at once, all that it started ends."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from raykv.actors.engine_guard import Segments, remove_folder
from raykv.actors.processes import Pidfd, pids, session_of

GUARD = Path(__file__).with_name("engine_guard.py")
VLLM = (sys.executable, "-m", "raykv.connector.vllm_main")
"""This environment's `vllm`, also where its script is not on the PATH."""
TAIL = 60
KILL_S = 20.0

RAY_INTERNAL = frozenset(
    {
        "RAY_JOB_ID",
        "RAY_RAYLET_PID",
        "RAY_WORKER_TYPE",
        "RAY_NODE_ID",
        "RAY_CLIENT_MODE",
        "RAY_JOB_CONFIG_JSON_ENV_VAR",
        "RAY_SERIALIZED_RUNTIME_ENV",
        "RAY_RUNTIME_ENV_HASH",
        "SPT_NOENV",
    }
)
"""What a raylet tells its worker about itself: an engine is a driver of its own and not this worker."""
SOCKETS = "VLLM_RPC_BASE_PATH"
"""The folder of vLLM's sockets, which stay there when a process is killed: each engine has one of its own."""
SOCKET_NBYTES = 107 - len("/123e4567-e89b-12d3-a456-426614174000")
"""What of the longest name that a socket may have is left for its folder."""
FROM_RAY = "OMP_NUM_THREADS"
"""Ray sets it to an actor's number of CPUs, 1 for none: vLLM's CPU engine would use that many threads."""


class EngineProcess:
    """One run of a command. Threads: one reads its lines, one waits for its end. Every method from any thread."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        on_line: Callable[[str], None],
        on_end: Callable[[int], None],
    ) -> None:
        """Start it. `environment` is all that it gets. `on_end` is called once with its exit status, when all of its
        processes are gone; `on_line` with each line that they wrote. Raises OSError if there is no guard to start."""
        self.pid = 0
        """The command's own process; 0 until it is started."""
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL)
        self._on_line, self._on_end = on_line, on_end
        self._ended = threading.Event()
        self._segments = Segments()
        self._folder = "" if SOCKETS in environment else _socket_folder()
        own = {SOCKETS: self._folder} if self._folder else {}
        mine, its = socket.socketpair()
        read, write = os.pipe()
        try:
            # It leaves the guard behind, whose end is the end of the socket.
            starter = subprocess.Popen(
                # -S -E: nothing of the environment's is imported before the guard watches.
                [sys.executable, "-S", "-E", str(GUARD), str(its.fileno()), self._folder, "--", *_expanded(command)],
                env={**environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        except BaseException:
            mine.close()
            os.close(read)
            remove_folder(self._folder)
            raise
        finally:
            its.close()
            os.close(write)
        self._socket = mine
        self._reader = threading.Thread(target=self._read, args=(read,), name="raykv-engine-log", daemon=True)
        self._reader.start()
        self._started = threading.Event()
        threading.Thread(target=self._wait, args=(starter,), name="raykv-engine-wait", daemon=True).start()

    def wait_started(self, timeout: float) -> bool:
        """Whether the command's process is there, or has ended, within `timeout` seconds."""
        return self._started.wait(timeout)

    @property
    def tail(self) -> list[str]:
        """The last lines that it wrote."""
        return list(self._tail)

    def alive(self) -> bool:
        """False when nothing of it is left."""
        return not self._ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """True when nothing of it is left."""
        return self._ended.wait(timeout)

    def interrupt(self, number: int = signal.SIGTERM) -> None:
        """Ask the command's own process to end."""
        process = Pidfd.open(self.pid) if self.pid else None
        if process is not None and self.alive():
            process.signal(number)

    def stop(self, grace: float) -> None:
        """SIGTERM, after `grace` seconds SIGKILL for all of it; returns when nothing is left (KILL_S at most)."""
        self.interrupt()
        if not self.wait(grace):
            self.kill()
            self.wait(KILL_S)

    def kill(self) -> None:
        """SIGKILL for all of it; does not wait."""
        # The guard sees the end of the file, kills everything, and says so on the half that is still open.
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_WR)

    def _read(self, fd: int) -> None:
        with os.fdopen(fd, errors="replace", newline="\n") as file:
            for line in file:
                for part in line.rstrip("\n").split("\r")[-1:]:  # of a progress bar the last state
                    self._tail.append(part)
                    self._on_line(part)

    def _wait(self, starter: subprocess.Popen[bytes]) -> None:
        starter.wait()
        code = 137
        with self._socket.makefile("r") as lines:
            for line in lines:
                word, _, number = line.partition(" ")
                if word == "pid":
                    self.pid = int(number)
                    self._started.set()
                elif word == "exit":
                    code = int(number)
        self._sweep()
        self._reader.join(2.0)
        self._socket.close()
        self._ended.set()
        self._started.set()
        self._on_end(code)

    def _sweep(self) -> None:
        """What is left where the guard itself was killed: its session's, and what the guard would have removed."""
        found = [pid for pid in pids() if session_of(pid) == self.pid] if self.pid else []
        self._segments.look(found)
        opened = [process for pid in found if (process := Pidfd.open(pid)) is not None]
        swept = [process for process in opened if session_of(process.pid) == self.pid]
        for process in swept:
            process.signal(signal.SIGKILL)
        for process in swept:
            process.wait(KILL_S)
        self._segments.remove()
        remove_folder(self._folder)


def _socket_folder() -> str:
    """A new folder for this user only; empty where there is none, or its name would be too long for a socket's."""
    try:
        folder = tempfile.mkdtemp(prefix="rkv-")
    except OSError:
        return ""
    if len(os.fsencode(folder)) <= SOCKET_NBYTES:
        return folder
    os.rmdir(folder)
    return ""


def engine_environment(base: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Of an actor's environment what an engine may have, and what the order adds."""
    kept = {name: value for name, value in base.items() if name not in RAY_INTERNAL and name != FROM_RAY}
    return {**kept, **added}


def _expanded(command: Sequence[str]) -> list[str]:
    return [*VLLM, *command[1:]] if command[0] == "vllm" else list(command)
