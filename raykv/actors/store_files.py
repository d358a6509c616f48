"""Where stores keep their host tiers, and what is left of them. Imports nothing heavy: the command line uses it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

SHM = Path("/dev/shm")


def host_path(namespace: str, name: str, folder: Path = SHM) -> Path:
    """Where a store's host tier lies; named, so that the next life finds it."""
    return folder / f"{_own_prefix()}{namespace}-{name}.host"


def remove_stale(folder: Path = SHM) -> list[str]:
    """Remove this user's host tiers, and what was noted of tiers (`tier_state`), that no store holds (by its lock);
    returns their names."""
    removed = []
    ours = [path for kind in ("host", "tiers", "tiers-new") for path in folder.glob(f"{_own_prefix()}*.{kind}")]
    for path in sorted(ours):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path.name)
                Path(f"{path}.notes").unlink(missing_ok=True)  # of a host tier: see `store_notes`
            finally:
                os.close(fd)
    return removed


def _own_prefix() -> str:
    return f"raykv-{os.getuid()}-"
