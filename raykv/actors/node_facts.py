"""What placement must know of a node beyond what Ray says: memory and disk for stores, and whether the model is there.

`probe` runs on the node, as a Ray task; it takes milliseconds.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
SHM = "/dev/shm"


@dataclass(frozen=True)
class NodeFacts:
    """`memory`: the bytes that host tiers may take at most; `disks`: by folder, those that disk tiers may."""

    memory: int
    disks: dict[str, int]
    model: bool | None
    address: str


def probe(folders: Sequence[str], model: str | None, address: str = "") -> NodeFacts:
    """Of the machine where this runs. `model`: the path to look for, None for a name on a hub."""
    return NodeFacts(
        memory=store_memory(),
        disks={folder: _room(Path(folder)) for folder in folders},
        model=None if model is None else os.path.exists(os.path.expanduser(model)),
        address=address,
    )


def store_memory() -> int:
    """Host tiers are files in shared memory: its size bounds them, and the machine's or the container's memory does."""
    limits = [_total_memory()]
    with contextlib.suppress(OSError):
        stat = os.statvfs(SHM)
        limits.append(stat.f_frsize * stat.f_blocks)
    for path in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
            limits.append(int(Path(path).read_text()))
    return min(limits)


def free_memory() -> int:
    """What could be taken now without swapping, of memory and of shared memory."""
    free = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    limits = [int(free.split()[1]) * 1024, store_memory()]
    with contextlib.suppress(OSError):
        stat = os.statvfs(SHM)
        limits.append(stat.f_frsize * stat.f_bavail)
    return min(limits)


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _room(folder: Path) -> int:
    """Free bytes of the disk where the folder is or would be, and what files of the folder's own take already."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    stat = os.statvfs(existing)
    taken = 0
    if existing == folder:
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                taken += (folder / name).stat().st_blocks * 512
    return stat.f_frsize * stat.f_bavail + taken
