"""A guard between an engine's owner and its `vllm serve`: whoever dies, however, nothing of the engine is left.

    python engine_guard.py FD FOLDER -- COMMAND ...

Run as a script, by `engine_process`, with the standard library only. FD is one end of a socket whose other end the
owner holds. The guard starts the command in a session of its own and writes "pid N"; when the command has ended, and
everything that it started with it, it removes what that left behind (its shared memory, and FOLDER, if that is not
empty text), writes "exit N" and ends. When the owner's end closes - it was killed, Ray's
raylet was - it kills all of it at once. It adopts what the command's processes leave behind (a "subreaper"), so that
vLLM's EngineCore and workers are its own even when their parent is gone. The guard is nobody's child: a Ray actor that
ends by `ray.kill`, or because its raylet has, kills its children first (`kill_child_processes_on_worker_exit`, Ray
2.60). If the guard itself is killed, the kernel kills the command (PDEATHSIG), and the owner the rest of the session.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SWEEP_S = 15.0
TRACKER_S = 8.0
LOOK_S = 5.0
SELDOM_S = 300.0
UNMAPPED_S = 3.0
STUCK_S = 2.0
SHM = "/dev/shm"
SEGMENT = re.compile(r"(?:psm_|sem\.mp-|vllm_)[^/ ]+|\d+-[^/ ]+-cpushm[^/ ]*")
"""Python's shared memory and semaphores, and vLLM's (the last: ranks that met at a port). RayKV's have others."""


def main(argv: list[str]) -> int:
    """Guard one command; returns its exit status, 128 + N for signal N."""
    owner, folder = socket.socket(fileno=int(argv[0])), argv[1]
    command = argv[argv.index("--") + 1 :]
    if os.fork():
        os._exit(0)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the command; the owner says when to end

    def in_child() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    segments = Segments()
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=in_child)
    except OSError as error:
        print(f"{command[0]} can't be started: {error.strerror}", flush=True)
        remove_folder(folder)
        tell(owner, "exit 127")
        return 127
    tell(owner, f"pid {child.pid}")
    with contextlib.suppress(OSError):
        wait_for_either(owner, child.pid, segments)
    segments.look(descendants(os.getpid()))
    if child.poll() is None:
        os.kill(child.pid, signal.SIGKILL)
    status = child.wait()
    end_descendants()
    segments.remove()
    remove_folder(folder)
    code = status if status >= 0 else 128 - status
    tell(owner, f"exit {code}")
    return code


def wait_for_either(owner: socket.socket, pid: int, segments: Segments) -> None:
    """Until the owner has gone, or the command has ended. Reaps orphans meanwhile, so that none stays a zombie, and
    looks at what the processes map: one that is killed, or ends by itself, can't be looked at any more."""
    ended = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    poll.register(ended, select.POLLIN)
    try:
        while True:
            ready = poll.poll(LOOK_S * 1000)
            if any(fd == ended for fd, _ in ready):
                return
            if ready and not owner.recv(64):
                return
            reap(pid)
            segments.watch(descendants(os.getpid()))
    finally:
        os.close(ended)


def reap(but: int) -> None:
    """Wait for adopted children that have ended; never for the command itself, which is Popen's."""
    for child in children(os.getpid()):
        if child != but:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def end_descendants() -> None:
    """SIGKILL for everything below this process, again until nothing is left: a killed parent's children come here.

    But for Python's resource trackers: these end by themselves when all of their users are gone, and first remove the
    users' shared memory and semaphores, hundreds of MB of vLLM's. They are killed when they take TRACKER_S.
    """
    began = time.monotonic()
    while time.monotonic() < began + SWEEP_S:
        below = children(os.getpid())
        if not below:
            return
        for pid in below:
            if time.monotonic() > began + TRACKER_S or not is_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(0.01)


def is_tracker(pid: int) -> bool:
    """Whether it is a resource tracker of Python's multiprocessing."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """The children of this process, by all of its threads."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(one) for one in file.read().split()]
    return found


def descendants(pid: int) -> list[int]:
    """Everything below this process."""
    found = children(pid)
    for one in found:  # grows meanwhile
        found += children(one)
    return found


class Segments:
    """Shared memory that processes have mapped, seen while they live and removed after their end.

    At a normal end vLLM or Python's resource tracker has removed it; what a kill leaves, and the 4 MiB of each tensor
    parallel rank of vLLM's CPU engine, would stay until the machine restarts. Nobody else's is touched: not what was
    there before, nor what a living process maps.
    """

    def __init__(self) -> None:
        self._before = set(existing())
        self._seen: set[tuple[str, int]] = set()
        self._processes: list[int] = []
        self._pause, self._next = LOOK_S, 0.0
        self._thread: threading.Thread | None = None

    def watch(self, processes: list[int]) -> None:
        """Look at them again and again, more seldom each time while they are the same."""
        if processes == self._processes and time.monotonic() < self._next:
            return
        self._pause = min(2 * self._pause, SELDOM_S) if processes == self._processes else LOOK_S
        self._processes = processes
        self.look(processes)
        self._next = time.monotonic() + self._pause

    def look(self, processes: Iterable[int]) -> None:
        """Note what these have mapped. 1 ms for 1000 mappings, which is an engine's process on a CPU."""
        self._bounded(lambda: self._look(processes), STUCK_S)

    def remove(self) -> None:
        """Remove what is left of it and mapped by nobody. Waits for others to end that map it, UNMAPPED_S at most."""
        self._bounded(self._remove, UNMAPPED_S + STUCK_S)

    def _bounded(self, work: Callable[[], None], limit: float) -> None:
        """In a thread: who asks what a process has mapped hangs where that process hangs in the kernel, such as in a
        page of a lost NFS server. An engine's end must not."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=work, daemon=True)
            self._thread.start()
            self._thread.join(limit)

    def _look(self, processes: Iterable[int]) -> None:
        for pid in processes:
            self._seen |= mapped(pid)

    def _remove(self) -> None:
        deadline = time.monotonic() + UNMAPPED_S
        while left := (self._seen - self._before) & existing():
            used = {segment for pid in os.listdir("/proc") if pid.isdigit() for segment in mapped(int(pid))}
            for name, _ in left - used:
                with contextlib.suppress(OSError):
                    os.unlink(f"{SHM}/{name}")
                if name.startswith("vllm_dist_"):  # named after the file by which its ranks found each other
                    with contextlib.suppress(OSError):
                        os.unlink(f"{tempfile.gettempdir()}/{name.partition('-')[0]}")
            if not left & used or time.monotonic() > deadline:
                return
            time.sleep(0.1)


def existing() -> set[tuple[str, int]]:
    """Name and inode of this user's segments: a name that is used again is another segment."""
    found = set()
    with contextlib.suppress(OSError), os.scandir(SHM) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if SEGMENT.fullmatch(entry.name) and entry.stat().st_uid == os.geteuid():
                    found.add((entry.name, entry.inode()))
    return found


def mapped(pid: int) -> set[tuple[str, int]]:
    """The segments that this process has mapped; nothing if it is gone or another user's."""
    found = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
        for line in file:
            if SHM in line:
                fields = line.split()  # address, access, offset, device, inode, path, and maybe "(deleted)"
                name = fields[5].removeprefix(f"{SHM}/")
                if len(fields) == 6 and SEGMENT.fullmatch(name):
                    found.add((name, int(fields[4])))
    return found


def remove_folder(folder: str) -> None:
    """With all that is in it."""
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def tell(owner: socket.socket, text: str) -> None:
    """A line to the owner, who may be gone."""
    with contextlib.suppress(OSError):
        owner.sendall(text.encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
