"""The files under a pool: created for this user alone, locked for life, reserved in full.

The lock is an flock: the kernel drops it with the last descriptor of its holder, so a killed owner leaves none. A
child that was forked without exec holds it too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct

from raykv.errors import StorageError

PAGE = 4096
_OWNER_AT = 64  # in the first page, behind the geometry: the pid of whoever holds the lock, for a person to read
_OWNER = struct.Struct("<Q")


def open_locked(path: str) -> int:
    """A descriptor of the file at `path`, made if there is none, mode 0600, locked by this process.

    Raises StorageError if it is a link, is not this user's alone, or is locked.
    """
    while True:
        fd = open_private(path)
        try:
            _lock(fd, path)
            if _still_there(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its last owner removed it between our open and our lock


def open_private(path: str, extra: int = 0) -> int:
    """A descriptor of the file at `path`, made if there is none, mode 0600; never of a link or another's file."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | extra
    try:
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            fd = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StorageError(f"{path} is a symbolic link: remove it, RayKV does not follow links here.") from error
        if error.errno == errno.EINVAL and extra:
            raise  # O_DIRECT is refused here; the caller knows what to do
        raise StorageError(f"Can't open {path}: {error.strerror}. Check the folder and its rights.") from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(fd)
        raise StorageError(
            f"{path} is not a plain file of this user alone (owner {status.st_uid}, mode {status.st_mode & 0o7777:o}): "
            "remove it, or choose another name."
        )
    return fd


def write_owner(fd: int) -> None:
    """Note this process in the locked file's first page, for the message that a second opener gets."""
    os.pwrite(fd, _OWNER.pack(os.getpid()), _OWNER_AT)


def reserve(fd: int, nbytes: int, path: str, fix: str) -> None:
    """Empty the file and give it `nbytes` zero bytes that the medium really has. StorageError if it has not."""
    try:
        os.ftruncate(fd, 0)
        free = os.fstatvfs(fd)
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.ftruncate(fd, 0)  # what was reserved until then is given back
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageError(f"Can't reserve {nbytes} bytes for {path}: {error.strerror}.") from error
        raise StorageError(
            f"{path} needs {nbytes} bytes ({nbytes / 2**30:.2f} GiB), and "
            f"{os.path.dirname(path)} has {free.f_bavail * free.f_frsize} free. {fix}"
        ) from error


def extend(fd: int, start: int, end: int, path: str, fix: str) -> None:
    """Give the file the bytes from `start` to `end`, zeros where there were none, that the medium really has.

    StorageError if it has not: then the file is as long as it was.
    """
    if end <= start:
        return
    before = os.fstat(fd).st_size
    free = os.fstatvfs(fd)
    try:
        os.posix_fallocate(fd, start, end - start)
    except OSError as error:
        os.ftruncate(fd, before)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageError(f"Can't reserve {end - start} bytes for {path}: {error.strerror}.") from error
        raise StorageError(
            f"{path} needs {end - start} bytes ({(end - start) / 2**30:.2f} GiB) more, and {os.path.dirname(path)} has "
            f"{free.f_bavail * free.f_frsize} free. {fix}"
        ) from error


def _lock(fd: int, path: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        noted = os.pread(fd, _OWNER.size, _OWNER_AT)
        pid = _OWNER.unpack(noted)[0] if len(noted) == _OWNER.size else 0
        raise StorageError(
            f"{path} is in use by {f'process {pid}' if pid else 'another process'}. One store owns a pool: stop the "
            "other one, or give this one another name or path."
        ) from error


def _still_there(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
