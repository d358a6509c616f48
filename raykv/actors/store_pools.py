"""The pool of a tier, whatever its medium: found or made."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TypeAlias

import torch

from raykv.errors import StorageError
from raykv.storage.disk_pool import DiskPool
from raykv.storage.files import open_locked
from raykv.storage.fs_pool import FsPool
from raykv.storage.host_pool import HostPool
from raykv.store_messages import Medium, TierSpec

Pool: TypeAlias = HostPool | DiskPool | FsPool

LOCK_WAIT_S = 10.0
"""How long a predecessor may take to die: its lock goes with its process."""


def open_pool(tier: TierSpec, slot_nbytes: int, host: Path) -> Pool:
    """Find or make the pool of a tier; `host`: the host tier's file. Blocks for LOCK_WAIT_S at most where a predecessor
    still has it, and while it is made (seconds for many GiB). Raises StorageError."""
    num_slots = tier.capacity // slot_nbytes
    if num_slots < 1:
        raise StorageError(
            f"The {tier.medium} tier has room for {tier.capacity} bytes, less than one block of {slot_nbytes}: give "
            "it a larger `capacity`."
        )
    if tier.medium is Medium.FS:
        return FsPool.open(tier.path or "", tier.capacity, slot_nbytes)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            if tier.medium is Medium.HOST:
                return HostPool.open(str(host), num_slots, slot_nbytes, pin=torch.cuda.is_available())
            return DiskPool.open(tier.path or "", num_slots, slot_nbytes)
        except StorageError as error:
            if not isinstance(error.__cause__, BlockingIOError) or time.monotonic() >= deadline:
                raise
            time.sleep(0.1)


def remove_host_pool(host: Path) -> None:
    """Give the memory of a host tier back that was removed, if a kill came in between."""
    if host.exists():
        with contextlib.suppress(StorageError):
            fd = open_locked(str(host))
            os.unlink(host)
            os.close(fd)
