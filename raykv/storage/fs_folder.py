"""A shared directory of block files, as system calls: read, write, look at and remove, and keep each folder's limit.

It is made for a network file system that other nodes write to at the same time, and which may do strange things:

- A file comes into being under its name by a rename, when all its bytes are written and its close has not failed. (On
  NFS it is close that sends the bytes to the server, and open that asks the server what is there now.)
- A file that is there is never written to. Two nodes that write one block replace each other's file by the same bytes.
- Every path is walked from an open directory, one name at a time, and no link is followed.
- That a file is gone is always possible, and is a miss. Who has it open reads its bytes to the end, or an error.

No thread and no time limit here: any call may block for as long as the file system likes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from typing import NoReturn

from raykv.core.fs_limit import folder_limit, least_capacity, num_folders
from raykv.errors import StorageError
from raykv.storage.fs_header import (
    HEADER_NBYTES,
    BlockFile,
    file_name,
    folder_index,
    folder_names,
    pack_header,
    read_header,
    temp_name,
)
from raykv.storage.fs_open import FOLDER, make_folder, open_base, settle_layout, write_all
from raykv.storage.fs_trim import Trimmed, list_files, trim, unlink

TOUCH_S = 10 * 60.0
"""A file that is used gets a new time at most so often: that is a write to the server."""
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""Of an open: nothing is there, or something that is no file, such as a link."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe under a block's name must not block
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class BadFileError(Exception):
    """A file is there and is not what its name promises. It has been removed."""


class SharedFolder:
    """Made by `open`, closed once, when no call runs. Any thread. Raises OSError where nothing else is said."""

    def __init__(self, path: str, base: int, folders: int, limit: int, grouped: bool, sync: bool) -> None:
        self.path, self.folders, self.limit = path, folders, limit
        self._base, self._sync, self._grouped = base, sync, grouped
        self._file_mode = 0o640 if grouped else 0o600
        self._ahead_s = 0.0
        """The file system's clock less this machine's, as far as it is known."""

    @classmethod
    def open(cls, path: str, capacity: int, block_nbytes: int, sync: bool = False) -> SharedFolder:
        """Open the directory for blocks of up to so many bytes; all its files together keep to `capacity` bytes.

        `sync`: a file is on the medium before it has its name. Raises StorageError for what a person must set right.
        """
        base, grouped = open_base(path)
        try:
            folders = settle_layout(path, base, num_folders(capacity, block_nbytes + HEADER_NBYTES), grouped)
            return cls(path, base, folders, _limit(path, capacity, folders, block_nbytes), grouped, sync)
        except BaseException:
            os.close(base)
            raise

    def resize(self, capacity: int, block_nbytes: int) -> None:
        """All files together keep to `capacity` from now on. Raises StorageError."""
        self.limit = _limit(self.path, capacity, self.folders, block_nbytes)

    def check(self) -> None:
        """Raises OSError if the directory is not what it was when it was opened."""
        status = os.fstat(self._base)
        if not status.st_nlink:
            raise FileNotFoundError(errno.ENOENT, "it was removed", self.path)

    def close(self) -> None:
        """Let go of the base. No other call runs."""
        os.close(self._base)

    # -- one block ------------------------------------------------------------------------------------------

    def look(self, key: bytes) -> BlockFile | None:
        """What is there under the key: header and length are checked, the bytes are not. None: nothing.

        Raises BadFileError.
        """
        with self._opened(key) as fd:
            if fd is None:
                return None
            page = os.pread(fd, HEADER_NBYTES, 0)
            block = self._checked(key, fd, page)
            self._touch(fd)
            return block

    def read(self, key: bytes, header: memoryview, data: memoryview) -> BlockFile | None:
        """Fill `data` with the block's bytes, and `header` (HEADER_NBYTES) with its header; their checksum is the
        caller's. None: nothing is there, or nothing that fits. Raises BadFileError."""
        with self._opened(key) as fd:
            if fd is None:
                return None
            done = os.preadv(fd, [header, data], 0)
            block = self._checked(key, fd, header[:done])
            if block.nbytes > len(data):
                return None
            while done < HEADER_NBYTES + block.nbytes:
                more = os.preadv(fd, [data[done - HEADER_NBYTES : block.nbytes]], done)
                if not more:
                    self._bad(key, fd, "it ends before its bytes do")
                done += more
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # the host tier is the cache
            self._touch(fd)
            return block

    def write(self, block: BlockFile, data: memoryview) -> Trimmed | None:
        """Write a block and trim its folder. None: it was there already."""
        folder = self._folder(block.key, make=True)
        try:
            name, temp = file_name(block.key), temp_name(block.key, secrets.token_hex(8))
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISREG(found.st_mode) and found.st_size == HEADER_NBYTES + block.nbytes:
                    return None
            fd = os.open(temp, _CREATE, self._file_mode, dir_fd=folder)
            try:
                try:
                    write_all(fd, [memoryview(pack_header(block)), data[: block.nbytes]])
                    os.fchmod(fd, self._file_mode)  # whatever the umask is
                    if self._sync:
                        os.fsync(fd)
                finally:
                    os.close(fd)
                os.rename(temp, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temp, dir_fd=folder)
                raise
            return self._trim(folder, name)
        finally:
            os.close(folder)

    def remove(self, key: bytes) -> bool:
        """A file is bad, or wanted by nobody. False: none is there."""
        try:
            folder = self._folder(key)
            try:
                return unlink(folder, file_name(key))
            finally:
                os.close(folder)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def remove_all(self, index: int, fingerprints: Collection[bytes]) -> int:
        """Remove the files of one folder whose keys begin with any of these; with none given, all. How many."""
        try:
            folder = self._walk(folder_names(index))
        except FileNotFoundError:
            return 0
        begin = tuple(one.hex() for one in fingerprints) or ("",)
        try:
            blocks, _ = list_files(folder)
            return sum(unlink(folder, file.name) for file in blocks if file.name.startswith(begin))
        finally:
            os.close(folder)

    # -- one folder -----------------------------------------------------------------------------------------

    def trim(self, index: int) -> Trimmed:
        """Bring a folder within its limit, and remove what killed writers left there."""
        try:
            folder = self._walk(folder_names(index))
        except FileNotFoundError:
            return Trimmed(0, 0, 0, 0)
        try:
            return self._trim(folder)
        finally:
            os.close(folder)

    def _trim(self, folder: int, newest: str = "") -> Trimmed:
        return trim(folder, self.limit, self._ahead_s, newest)

    # -- parts ----------------------------------------------------------------------------------------------

    def _folder(self, key: bytes, make: bool = False) -> int:
        return self._walk(folder_names(folder_index(key, self.folders)), make)

    def _walk(self, names: Sequence[str], make: bool = False) -> int:
        """A descriptor of the folder under the base. No link is followed."""
        at = os.dup(self._base)
        for name in names:
            try:
                try:
                    below = os.open(name, FOLDER, dir_fd=at)
                except FileNotFoundError:
                    if not make:
                        raise
                    make_folder(name, at, self._grouped)
                    below = os.open(name, FOLDER, dir_fd=at)
            finally:
                os.close(at)
            at = below
        return at

    @contextlib.contextmanager
    def _opened(self, key: bytes) -> Iterator[int | None]:
        """The file of a key, None if there is none that can be read. A file that goes while it is read is gone too."""
        fd: int | None = None
        try:
            folder = self._folder(key)
            try:
                fd = os.open(file_name(key), _READ, dir_fd=folder)
            finally:
                os.close(folder)
        except OSError as error:
            if error.errno not in _GONE:
                raise
        try:
            yield fd
        finally:
            if fd is not None:
                os.close(fd)

    def _checked(self, key: bytes, fd: int, page: bytes | memoryview) -> BlockFile:
        status = os.fstat(fd)
        block = read_header(page)
        if not stat.S_ISREG(status.st_mode):
            self._bad(key, fd, "no plain file")
        if block is None:
            self._bad(key, fd, "a damaged header, or one of another version")
        if block.key != key:
            self._bad(key, fd, "the block of another key")
        if status.st_size != HEADER_NBYTES + block.nbytes:
            self._bad(key, fd, f"{status.st_size} bytes long, and its header says {HEADER_NBYTES + block.nbytes}")
        return block

    def _bad(self, key: bytes, fd: int, why: str) -> NoReturn:
        """Remove the file that is open, unless another has its name by now."""
        with contextlib.suppress(OSError):
            folder = self._folder(key)
            try:
                now = os.stat(file_name(key), dir_fd=folder, follow_symlinks=False)
                if os.path.samestat(now, os.fstat(fd)):
                    os.unlink(file_name(key), dir_fd=folder)
            finally:
                os.close(folder)
        raise BadFileError(f"{file_name(key)} is {why}")

    def _touch(self, fd: int) -> None:
        """The file is used: it goes later. The time is the file system's own, where that has a clock."""
        with contextlib.suppress(OSError):
            if abs(time.time() + self._ahead_s - os.fstat(fd).st_mtime) > TOUCH_S:
                os.utime(fd)
                self._ahead_s = os.fstat(fd).st_mtime - time.time()


def _limit(path: str, capacity: int, folders: int, block_nbytes: int) -> int:
    """The bytes of one folder. Raises StorageError if that is too little."""
    least = least_capacity(folders, block_nbytes + HEADER_NBYTES)
    if capacity < least:
        raise StorageError(
            f"The fs tier in {path} has room for {capacity} bytes. It is spread over {folders} folders, and "
            f"blocks of {block_nbytes} bytes need {least} bytes there at least: give it a larger `capacity`, "
            "or another `path`."
        )
    return folder_limit(capacity, folders)
