"""A guard between an engine's owner and its `vllm serve`: whoever dies, however, nothing of the engine is left.

    python engine_guard.py FD -- COMMAND ...

Run as a script, by `engine_process`, with the standard library only. FD is one end of a socket whose other end the
owner holds. The guard starts the command in a session of its own and writes "pid N"; when the command has ended, and
everything that it started with it, it writes "exit N" and ends. When the owner's end closes - it was killed, Ray's
raylet was - it kills all of it at once. It adopts what the command's processes leave behind (a "subreaper"), so that
vLLM's EngineCore and workers are its own even when their parent is gone. The guard is nobody's child: a Ray actor that
ends by `ray.kill`, or because its raylet has, kills its children first (`kill_child_processes_on_worker_exit`, Ray
2.60). If the guard itself is killed, the kernel kills the command (PDEATHSIG), and the owner the rest of the session.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SWEEP_S = 15.0
TRACKER_S = 8.0


def main(argv: list[str]) -> int:
    """Guard one command; returns its exit status, 128 + N for signal N."""
    owner = socket.socket(fileno=int(argv[0]))
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

    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=in_child)
    except OSError as error:
        print(f"{command[0]} can't be started: {error.strerror}", flush=True)
        tell(owner, "exit 127")
        return 127
    tell(owner, f"pid {child.pid}")
    with contextlib.suppress(OSError):
        wait_for_either(owner, child.pid)
    if child.poll() is None:
        os.kill(child.pid, signal.SIGKILL)
    status = child.wait()
    end_descendants()
    code = status if status >= 0 else 128 - status
    tell(owner, f"exit {code}")
    return code


def wait_for_either(owner: socket.socket, pid: int) -> None:
    """Until the owner has gone, or the command has ended. Reaps orphans meanwhile, so that none stays a zombie."""
    ended = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    poll.register(ended, select.POLLIN)
    try:
        while True:
            ready = poll.poll(5000)
            if any(fd == ended for fd, _ in ready):
                return
            if ready and not owner.recv(64):
                return
            reap(pid)
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


def tell(owner: socket.socket, text: str) -> None:
    """A line to the owner, who may be gone."""
    with contextlib.suppress(OSError):
        owner.sendall(text.encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
