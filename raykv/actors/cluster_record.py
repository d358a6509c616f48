"""The record of the one cluster that RayKV started on this machine, in the state folder."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from raykv.actors.processes import command_of, start_time


@dataclass(frozen=True)
class HeadProcess:
    """One process of the head, and how to start it again."""

    role: str
    pid: int
    started: int
    argv: list[str]

    def alive(self) -> bool:
        """Whether this very process runs."""
        return start_time(self.pid) == self.started and bool(command_of(self.pid))


@dataclass(frozen=True)
class ClusterRecord:
    """What RayKV started. Written to a file: keep it readable for the next version."""

    address: str
    storage: str
    sessions: list[int]
    processes: list[HeadProcess]
    environment: dict[str, str]
    log_dir: str
    dashboard: str | None = None
    boot: str = field(default_factory=lambda: _boot_id())
    version: int = 1

    def missing(self) -> list[HeadProcess]:
        """The processes of the head that do not run."""
        return [process for process in self.processes if not process.alive()]

    def live_sessions(self) -> list[int]:
        """`sessions`, less those whose number means another session by now.

        `ray start` led one and is gone, and its number is free again only when the last member is. What RayKV
        restarted leads its own session.
        """
        if self.boot != _boot_id():
            return []
        leaders = {process.pid: process.started for process in self.processes}
        return [s for s in self.sessions if (began := start_time(s)) is None or leaders.get(s) == began]

    def process(self, role: str) -> HeadProcess | None:
        """The process with this role, alive or not."""
        return next((process for process in self.processes if process.role == role), None)


def state_dir() -> Path:
    """Where the record and the head's RocksDB lie: RAYKV_STATE_DIR or ~/.cache/raykv."""
    return Path(os.environ.get("RAYKV_STATE_DIR") or Path.home() / ".cache" / "raykv")


def read_record() -> ClusterRecord | None:
    """What RayKV started last and did not stop; its processes may be gone."""
    try:
        raw = json.loads((state_dir() / "cluster.json").read_text())
    except (OSError, ValueError):
        return None
    raw["processes"] = [HeadProcess(**process) for process in raw["processes"]]
    return ClusterRecord(**raw)


def write(record: ClusterRecord) -> None:
    """Replace the record in one step."""
    path = state_dir() / "cluster.json"
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(record), indent=1))
    fresh.replace(path)


def forget(record: ClusterRecord) -> None:
    """Remove the record and the head's state: for a cluster that is gone."""
    shutil.rmtree(record.storage, ignore_errors=True)
    (state_dir() / "cluster.json").unlink(missing_ok=True)


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """One command at a time changes the cluster."""
    state_dir().mkdir(parents=True, exist_ok=True)
    with open(state_dir() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
