"""One Ray head on this machine that RayKV starts, and may restart and stop. Subprocesses only, no Ray import.

What was started is written to a record in the state folder, so that `stop` ends exactly that and nothing of a
cluster that somebody else runs. All its processes are in the sessions (setsid) that the record names.

Losing the head means losing its GCS. Raylet, actors and engines go on with the settings below; the GCS comes back
as the same command on the same port, reads its state from RocksDB, and everybody reconnects.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from raykv.actors import ports, settings
from raykv.actors.cluster_record import (
    ClusterRecord,
    HeadProcess,
    forget,
    locked,
    read_record,
    state_dir,
    write,
)
from raykv.actors.processes import (
    Pidfd,
    command_of,
    end_all,
    environment_of,
    parent_of,
    pids,
    session_of,
    start_time,
)
from raykv.errors import ClusterError

__all__ = ["ClusterRecord", "StartOptions", "members", "read_record", "restart_head", "start", "state_dir", "stop"]

LOOPBACK = "127.0.0.1"
RAY_START_TIMEOUT_S = 180


@dataclass(frozen=True)
class StartOptions:
    """How to start a head. None: as Ray chooses."""

    port: int = 6379
    host: str = LOOPBACK
    num_cpus: int | None = None
    object_store_memory: int | None = None
    temp_dir: str | None = None
    dashboard: bool = True
    dashboard_port: int | None = None


def members(record: ClusterRecord) -> list[int]:
    """Every process of the cluster on this machine: the head's, its actors, and what those started."""
    return _members(record.live_sessions())


def start(options: StartOptions) -> tuple[ClusterRecord, bool]:
    """Start a head unless RayKV's own runs already; returns it and whether it was started now. About 5 to 10 s."""
    with locked():
        record = read_record()
        if record is not None:
            if not record.missing():
                return record, False
            if members(record):
                lost = ", ".join(process.role for process in record.missing())
                raise ClusterError(
                    f"The cluster at {record.address} that RayKV started runs without its {lost}. Bring that back "
                    "with `raykv restart-head`, or end the rest with `raykv stop` and start anew."
                )
            forget(record)
        record = _start(options)
        write(record)
        return record, True


def stop(grace: float = 10) -> ClusterRecord | None:
    """End all that RayKV's own head started, its actors too; None if there is none. Engines are not ended."""
    with locked():
        record = read_record()
        if record is None:
            return None
        if any(process.role == "gcs_server" for process in record.missing()):
            grace = min(grace, 1.0)  # without the head nothing ends in order, it only waits for it
        # The raylet first: it ends its workers in order, as long as it lives. Then the autoscaler, at once: it
        # has nothing to lose, and on SIGTERM it goes on asking for the head.
        for role, patience in (("raylet", grace), ("autoscaler", 0.0)):
            _end([pid for pid in members(record) if _role(command_of(pid)) == role], patience)
        stuck = _end(members(record), grace)
        if stuck:
            raise ClusterError(f"Processes {stuck} of the cluster at {record.address} could not be ended.")
        forget(record)
        return record


def restart_head(timeout: float = 30) -> tuple[ClusterRecord, list[str]]:
    """Start again what is gone of the head, on the same port with its state; returns what was started."""
    with locked():
        record = read_record()
        if record is None:
            raise ClusterError("RayKV has started no cluster that could be restarted. Start one with `raykv start`.")
        gone = record.missing()
        if any(process.role == "raylet" for process in gone):
            raise ClusterError(
                f"The whole node of the cluster at {record.address} is gone, its actors too: there is no head to "
                "restart. Use `raykv stop`, then `raykv start`, and restart the engines."
            )
        renewed, sessions = list(record.processes), list(record.sessions)
        # The GCS first: the others look for it.
        for process in sorted(gone, key=lambda process: process.role != "gcs_server"):
            child = _spawn(process, record)
            sessions.append(child.pid)
            renewed[renewed.index(process)] = HeadProcess(
                process.role, child.pid, start_time(child.pid) or 0, process.argv
            )
            if process.role == "gcs_server":
                _wait_for_port(record, child, timeout)
        record = replace(record, processes=renewed, sessions=sessions)
        write(record)
        return record, [process.role for process in gone]


def _start(options: StartOptions) -> ClusterRecord:
    if not ports.is_free(options.host, options.port):
        raise ClusterError(
            f"Port {options.port} on {options.host} is in use, perhaps by another Ray cluster (`raykv status "
            f"--address {options.host}:{options.port}`). Choose another one with `raykv start --port`."
        )
    try:
        return _attempt(options)
    except _SlowStart:
        # Ray gives a node a fixed 30 s to come up: on a machine that is busy with engines a second try finds
        # the files in the page cache.
        return _attempt(options)


class _SlowStart(ClusterError):
    pass


def _attempt(options: StartOptions) -> ClusterRecord:
    state_dir().mkdir(parents=True, exist_ok=True)
    # A fresh folder: a GCS that finds old state there believes to be restarted.
    storage = tempfile.mkdtemp(prefix="gcs-", dir=state_dir())
    wanted = [
        settings.GCS_RECONNECT,
        settings.GCS_STORAGE,
        settings.DEATH_INFO_WAIT,
        settings.WORKER_NICENESS,
    ]
    if options.host == LOOPBACK:
        wanted.append(settings.ONE_MACHINE)
    own = {setting.name: setting.value for setting in wanted} | {settings.GCS_STORAGE_PATH.name: storage}
    environ = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | own
    # start_new_session: all that Ray starts stays in this session, whoever its parent is.
    child = subprocess.Popen(
        _start_command(options),
        env=environ,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = child.communicate(timeout=RAY_START_TIMEOUT_S)
        if child.returncode != 0:
            lines = [line.strip() for line in output.splitlines() if line.strip()]
            kind = _SlowStart if "timed out" in output.lower() else ClusterError
            raise kind(f"`ray start` failed: {' '.join(lines[-3:])}")
        return _record(child.pid, storage, options)
    except subprocess.TimeoutExpired:
        _discard(child, storage)
        raise ClusterError(
            f"`ray start` did not end within {RAY_START_TIMEOUT_S} s. Is the machine overloaded?"
        ) from None
    except BaseException:
        _discard(child, storage)
        raise


def _discard(child: subprocess.Popen, storage: str) -> None:
    """Leave nothing of a start that failed."""
    _end([child.pid, *_members([child.pid])], 1)
    child.wait()
    shutil.rmtree(storage, ignore_errors=True)


def _start_command(options: StartOptions) -> list[str]:
    # Through this interpreter: the cluster then has the same Ray and Python as the engine.
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--disable-usage-stats"]
    given = {
        "node-ip-address": options.host,
        "port": options.port,
        "dashboard-host": options.host,
        "include-dashboard": str(options.dashboard).lower(),
        "dashboard-port": options.dashboard_port,
        "num-cpus": options.num_cpus,
        "object-store-memory": options.object_store_memory,
        "temp-dir": options.temp_dir,
        # Ray's defaults are fixed numbers, which a second cluster on the machine would find in use. 0: any.
        "min-worker-port": 0,
        "max-worker-port": 0,
        "ray-client-server-port": ports.free_port(LOOPBACK),
        "dashboard-agent-listen-port": ports.free_port(LOOPBACK),
    }
    return command + [f"--{key}={value}" for key, value in given.items() if value is not None]


def _record(session: int, storage: str, options: StartOptions) -> ClusterRecord:
    processes, environment, log_dir = [], {}, ""
    for pid in _members([session]):
        argv = command_of(pid)
        role = _role(argv)
        if role is None:
            continue
        processes.append(HeadProcess(role, pid, start_time(pid) or 0, argv))
        if role == "gcs_server":
            log_dir = next((arg.partition("=")[2] for arg in argv if arg.startswith("--log_dir=")), "")
            environ = environment_of(pid) or {}
            # Not the token: the record is a file, and the one who restarts the head has it.
            secret = "RAY_AUTH_TOKEN"
            environment = {k: v for k, v in environ.items() if k.startswith(("RAY_", "AUTOSCALER_")) and k != secret}
    if not {"gcs_server", "raylet"} <= {process.role for process in processes}:
        raise ClusterError(
            f"`ray start` ended without an error, but its head does not run; see {log_dir or 'its logs'}."
        )
    dashboard = f"http://{options.host}:{options.dashboard_port or 8265}" if options.dashboard else None
    return ClusterRecord(
        f"{options.host}:{options.port}", storage, [session], processes, environment, log_dir, dashboard
    )


def _role(argv: list[str]) -> str | None:
    """What a process of the head is; None for the raylet's children, which it cares for itself."""
    if not argv:
        return None
    if os.path.basename(argv[0]) in ("gcs_server", "raylet"):
        return os.path.basename(argv[0])
    for part, role in (
        ("/monitor.py", "autoscaler"),
        ("/log_monitor.py", "log monitor"),
        ("/dashboard.py", "dashboard"),
        ("ray.util.client.server", "client server"),
    ):
        if any(arg.endswith(part) for arg in argv[1:4]):
            return role
    return None


def _spawn(process: HeadProcess, record: ClusterRecord) -> subprocess.Popen:
    """As `ray start` started it, in a session of its own."""
    with open(Path(record.log_dir) / f"raykv-restart-{process.role.replace(' ', '-')}.log", "ab") as log:
        return subprocess.Popen(
            process.argv,
            env={**os.environ, **record.environment},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _wait_for_port(record: ClusterRecord, child: subprocess.Popen, timeout: float) -> None:
    host, _, port = record.address.rpartition(":")
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and child.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        time.sleep(0.05)
    _end([child.pid], 1)
    raise ClusterError(f"The head at {record.address} did not come back within {timeout:.0f} s; see {record.log_dir}.")


def _members(sessions: list[int]) -> list[int]:
    """All in these sessions, and the actors that have left for one of their own (`host_base.be_as_nice_as_others`)."""
    wanted = set(sessions)
    all_pids = list(pids())
    inside = {pid for pid in all_pids if session_of(pid) in wanted}
    return [pid for pid in all_pids if (pid in inside or parent_of(pid) in inside) and command_of(pid)]


def _end(which: list[int], grace: float) -> list[int]:
    handles = (Pidfd.open(pid) for pid in which)
    return end_all([handle for handle in handles if handle is not None], grace)
