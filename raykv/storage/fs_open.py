"""How a shared directory is opened, and how its layout is agreed on: whoever comes first decides."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Sequence

from raykv.errors import StorageError
from raykv.storage.fs_header import BASE, LAYOUT, pack_layout, read_layout

FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""To walk through, by its descriptor."""
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LAYOUT_WAIT_S = 5.0


def open_base(path: str) -> tuple[int, bool]:
    """A descriptor of RayKV's folder in the directory, made if there is none, and whether a group shares it.

    The directory itself is never made: where a file system is not mounted that would fill the disk below. Raises
    StorageError for what a person must set right, OSError for the rest.
    """
    try:
        root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise StorageError(
            f"Can't open the folder {path} of an fs tier: {error.strerror}. Mount the shared file system on this node, "
            "or make the folder there; RayKV does not make it, since without the mount it would be on the local disk."
        ) from error
    try:
        grouped = _trusted(path, root)
        with contextlib.suppress(FileNotFoundError):
            return _open_own(path, root), grouped
        make_folder(BASE, root, grouped)
        return _open_own(path, root), grouped
    except PermissionError as error:
        raise StorageError(
            f"Can't write in the folder {path} of an fs tier: {error.strerror}. Give this user, or a group that it is "
            "in, the right to."
        ) from error
    finally:
        os.close(root)


def _open_own(path: str, root: int) -> int:
    try:
        base = os.open(BASE, _LIST, dir_fd=root)
    except NotADirectoryError as error:
        raise StorageError(f"{path}/{BASE} is a link, or no folder: remove it, RayKV does not follow it.") from error
    _trusted(f"{path}/{BASE}", base)
    return base


def _trusted(path: str, fd: int) -> bool:
    """Whether a group shares the folder. Who can write there decides what engines read: not just anybody."""
    mode = os.fstat(fd).st_mode
    if mode & stat.S_IWOTH:
        raise StorageError(
            f"Anybody can write in the folder {path} of an fs tier, and what is there is given to engines. Take that "
            f"right away: chmod o-w {path}."
        )
    return bool(mode & stat.S_IWGRP)


def make_folder(name: str, parent: int, grouped: bool) -> None:
    """For this user, or for the folder's group too, whatever the umask is. It may be there already."""
    try:
        os.mkdir(name, 0o770 if grouped else 0o700, dir_fd=parent)
    except FileExistsError:
        return
    if grouped:
        fd = os.open(name, _LIST, dir_fd=parent)
        try:
            os.fchmod(fd, 0o770 | os.fstat(fd).st_mode & stat.S_ISGID)
        finally:
            os.close(fd)


def settle_layout(path: str, base: int, folders: int, grouped: bool) -> int:
    """Over how many folders the files are spread: as many as the first store here wanted."""
    deadline = time.monotonic() + _LAYOUT_WAIT_S
    while True:
        data = _read(base, LAYOUT)
        if data is None:
            _write_new(base, pack_layout(folders), 0o640 if grouped else 0o600)
            data = _read(base, LAYOUT)
        found = read_layout(data or b"")
        if found is not None:
            return found
        if time.monotonic() >= deadline:
            raise StorageError(
                f"{path}/{BASE}/{LAYOUT} is damaged: when no store uses this fs tier, remove {path}/{BASE} with all "
                "that is in it."
            )
        time.sleep(0.1)  # where links are refused, it may be half written


def _read(folder: int, name: str) -> bytes | None:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def _write_new(base: int, data: bytes, mode: int) -> None:
    """The layout, whole, unless another store's is there first."""
    temp = f".{LAYOUT}.{secrets.token_hex(8)}"
    _create(base, temp, data, mode)
    try:
        os.link(temp, LAYOUT, src_dir_fd=base, dst_dir_fd=base)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        with contextlib.suppress(FileExistsError):
            _create(base, LAYOUT, data, mode)
    finally:
        os.unlink(temp, dir_fd=base)


def _create(folder: int, name: str, data: bytes, mode: int) -> None:
    fd = os.open(name, _CREATE, mode, dir_fd=folder)
    try:
        write_all(fd, [memoryview(data)])
        os.fchmod(fd, mode)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, parts: Sequence[memoryview]) -> None:
    """All bytes of all parts, from the file's position on."""
    left = [part for part in parts if len(part)]
    while left:
        done = os.writev(fd, left)
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if left:
            left[0] = left[0][done:]
