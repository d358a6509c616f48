"""The two files of a disk pool: made, replaced, opened past the page cache, removed. For `disk_pool`."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os

from raykv.errors import StorageError
from raykv.storage.files import PAGE, open_locked, open_private, reserve
from raykv.storage.headers import table_nbytes

logger = logging.getLogger(__name__)

HEADERS, SLOTS = "raykv.headers", "raykv.slots"
"""Their names in the pool's folder."""
FIX = "Give the disk tier a smaller capacity, or free space there."


def remove_pool(folder: str) -> bool:
    """Delete the files of a pool that nobody has open; False: somebody has, or it can't be done."""
    path = os.path.join(folder, HEADERS)
    if not os.path.exists(path):
        return True
    try:
        fd = open_locked(path)
    except StorageError:
        return False
    try:
        for name in ("raykv.slots", HEADERS):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def map_table(fd: int, slots: int) -> memoryview:
    """The table of headers. The view keeps the mapping, and that a descriptor of its own, which shares the lock."""
    return memoryview(mmap.mmap(fd, table_nbytes(slots)))


def prepare(headers_path: str, headers_fd: int, slots_path: str, slots: int, slot_nbytes: int, known: int) -> int:
    """Replace both files unless they hold so many `known` slots; how many there are then. On an error nothing is left
    of them."""
    fd = open_private(slots_path)
    try:
        sizes = (os.fstat(headers_fd).st_size, os.fstat(fd).st_size)
        if known and sizes[0] >= table_nbytes(known) and sizes[1] >= known * slot_nbytes:
            return known
        if any(sizes):
            logger.warning("%s holds a pool of another size or version: it is replaced.", os.path.dirname(slots_path))
        reserve(headers_fd, table_nbytes(slots), headers_path, FIX)  # first: no old header over new slots
        reserve(fd, slots * slot_nbytes, slots_path, FIX)
        return slots
    except StorageError:
        os.unlink(slots_path)  # ours, under the lock
        os.unlink(headers_path)
        raise
    finally:
        os.close(fd)


def open_slots(path: str) -> tuple[int, bool]:
    """A descriptor of the slots, and whether it is past the page cache."""
    try:
        fd = open_private(path, os.O_DIRECT)
    except OSError:
        fd = -1
    if fd >= 0:
        try:
            with mmap.mmap(-1, PAGE) as page:
                os.preadv(fd, [page], 0)  # some file systems take the flag and refuse the read
            return fd, True
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EINVAL:
                raise StorageError(f"Can't read {path}: {error.strerror}.") from error
    logger.warning("%s is on a file system that refuses O_DIRECT: its I/O goes through the page cache.", path)
    return open_private(path), False
