"""The fs pool: blocks as files of a directory that the nodes of a cluster share (NFS, Lustre).

Any node reads what any other wrote; the file system is all that they have in common (`fs_folder`, and `core.fs_limit`
for the limit that they keep together). What this node knows of the directory is in numbered entries, so that a store
can treat it as a tier; an entry that is forgotten leaves its file where it is.

The directory is not trusted to answer. Every call runs in a thread of its own kind and has a time limit; bytes go by a
buffer of that thread, which a late answer may still fill, and reach the caller's memory only when they are verified.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch

from raykv.errors import DiskError, StorageError
from raykv.storage.checksum import as_bytes, checksum
from raykv.storage.disk_pool import FATAL, aligned_buffer
from raykv.storage.fs_folder import BadFileError, SharedFolder
from raykv.storage.fs_header import HEADER_NBYTES, BlockFile
from raykv.storage.fs_known import KnownFiles
from raykv.storage.fs_threads import Gate, PatientThreads
from raykv.storage.headers import Header, Recovered

logger = logging.getLogger(__name__)

T = TypeVar("T")

LIMIT_S = 8.0
"""Below what a worker gives its store for a save: a directory that hangs must not look like a store that does."""
OPEN_LIMIT_S = 20.0
COPY_THREADS = 8
"""More than the readers and movers of a store, so that none waits for a thread."""
LOOK_THREADS = 16
"""Round trips at the same time. By open, read and close, half a millisecond each, that is 10 000 files a second."""
MAX_KNOWN = 1 << 18
"""Entries, at about 350 bytes. What is not known is asked for again."""
REMOVE_AT_ONCE = 64
"""Files that one call with a time limit removes."""
SWEEP_S = 1.0
"""A folder at a time. That is for what killed writers leave; who writes trims his folder himself."""
_FATAL = FATAL | {errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ESHUTDOWN, errno.ENOTCONN}
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})
"""Of a write: it will stay so. Of a read it may be one file's rights."""
_STALE = frozenset({errno.ESTALE, errno.ENOENT})


class FsPool:
    """Made by `open`, closed once, by one owner. Methods block up to a time limit, from any thread.

    `headers` are its entries. `off` is why the directory could not be opened; empty: it could. The counts are since
    the start; `bad` files were removed, `gone` ones could not be read any more, `evicted` ones were removed for the
    limit, `leftovers` were those of killed writers.
    """

    recovered: Sequence[Recovered] = ()

    def __init__(self, path: str, slots: int, slot_nbytes: int, folder: SharedFolder | None, limit_s: float) -> None:
        self.path, self.slots, self.slot_nbytes = path, slots, slot_nbytes
        self.headers = KnownFiles(slots)
        self.off = ""
        self.counts: Counter[str] = Counter(bad=0, gone=0, written=0, evicted=0, leftovers=0, late=0)
        self._folder, self._limit_s = folder, limit_s
        self._copies = PatientThreads(COPY_THREADS, "raykv-fs")
        self._looks = PatientThreads(LOOK_THREADS, "raykv-fs-look")
        self._buffers = threading.local()
        self._counts_lock = threading.Lock()
        self._stop = threading.Event()
        self._sweeper: threading.Thread | None = None

    @classmethod
    def open(
        cls,
        path: str,
        capacity: int,
        slot_nbytes: int,
        *,
        limit_s: float = LIMIT_S,
        sync: bool = False,
        sweep_s: float = SWEEP_S,
    ) -> FsPool:
        """Open the directory, for blocks of up to `slot_nbytes`; `capacity` is what all nodes' files may hold.

        A directory that does not answer, or answers with an I/O error, gives a pool that is `off`. Raises
        StorageError for what a person must set right.
        """
        pool = cls(path, max(1, min(MAX_KNOWN, capacity // slot_nbytes)), slot_nbytes, None, limit_s)
        try:
            pool._folder = pool._copies.run(
                lambda: SharedFolder.open(path, capacity, slot_nbytes, sync), max(limit_s, OPEN_LIMIT_S)
            )
        except StorageError:
            raise
        except TimeoutError:
            pool.off = f"The folder {path} does not answer."
        except OSError as error:
            pool.off = f"The folder {path} can't be opened: {error.strerror}."
        else:
            pool._sweeper = threading.Thread(target=pool._sweep, args=(sweep_s,), name="raykv-fs-sweep", daemon=True)
            pool._sweeper.start()
        return pool

    def read(self, header: Header, out: torch.Tensor) -> bool:
        """Fill `out[:header.nbytes]` with the block's bytes, verified. False: they can't be had, and `out` is as it
        was. Raises a fatal DiskError, and never any other."""
        gate, folder = Gate(), self._opened()

        def read() -> bool:
            buffer = self._buffer()
            view = as_bytes(buffer)
            block = folder.read(header.key, view[:HEADER_NBYTES], view[HEADER_NBYTES:])
            if block is None:
                return False
            data = buffer[HEADER_NBYTES : HEADER_NBYTES + block.nbytes]
            if checksum(data) != block.checksum:
                again = folder.read(header.key, view[:HEADER_NBYTES], view[HEADER_NBYTES:])
                if again is None:
                    return False
                if again != block or checksum(data) != block.checksum:  # bad there, and not on the way here
                    folder.remove(header.key)
                    raise BadFileError(f"{header.key.hex()} has bytes that don't match its checksum")
            if block.nbytes != header.nbytes:  # good, and of another life than the entry
                return False
            with gate.entered():
                out[: block.nbytes].copy_(data)
            return True

        try:
            good = self._run("read", read, gate)
        except BadFileError as error:
            self._count("bad")
            logger.warning("a file of the fs tier in %s is removed: %s", self.path, error)
            return False
        except DiskError as error:
            if error.fatal:
                raise
            logger.warning("%s", error)
            return False
        if not good:
            self._count("gone")
        return good

    def write(self, key: bytes, nbytes: int, expected: int | None, data: torch.Tensor) -> bool:
        """Write `data[:nbytes]` under the key, for all nodes to see. False: it was there already.

        `expected`: their checksum, None if it isn't kept: files always have one. Raises DiskError.
        """
        gate, folder = Gate(), self._opened()

        def write() -> bool:
            buffer = self._buffer()
            with gate.entered():
                buffer[:nbytes].copy_(data[:nbytes])
            found = checksum(buffer[:nbytes]) if expected is None else expected
            trimmed = folder.write(BlockFile(key, nbytes, found), as_bytes(buffer))
            if trimmed is None:
                return False
            self._count("evicted", trimmed.evicted)
            self._count("leftovers", trimmed.leftovers)
            return True

        written = self._run("write", write, gate)
        self._count("written", written)
        return written

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove the files of these keys, for all nodes; how many there were. Raises DiskError."""
        folder = self._opened()
        removed = 0
        for at in range(0, len(keys), REMOVE_AT_ONCE):
            some = keys[at : at + REMOVE_AT_ONCE]
            removed += self._run("removal", lambda some=some: sum(map(folder.remove, some)), None)  # type: ignore[misc]
        return removed

    def remove_all(self, fingerprints: Collection[bytes]) -> int:
        """Remove all files of these fingerprints, with none given all files; how many. Lists every folder. Raises
        DiskError."""
        folder = self._opened()
        removed = 0
        for index in range(folder.folders):
            removed += self._run("removal", lambda at=index: folder.remove_all(at, fingerprints), None)  # type: ignore[misc]
        return removed

    def look(self, key: bytes) -> Future[BlockFile | None]:
        """Ask what is there under the key; the future has it, None for nothing, or a DiskError. Does not block."""
        folder = self._opened()

        def look() -> BlockFile | None:
            try:
                return folder.look(key)
            except BadFileError as error:
                self._count("bad")
                logger.warning("a file of the fs tier in %s is removed: %s", self.path, error)
                return None
            except OSError as error:
                raise self._error("look-up", error) from error

        return self._looks.submit(look)

    def check(self) -> Future[None]:
        """Ask whether the directory is what it was when it was opened; the future has a fatal DiskError if not."""
        folder = self._opened()

        def check() -> None:
            try:
                folder.check()
            except OSError as error:
                raise DiskError(f"The folder {self.path} is gone: {error.strerror}.", fatal=True) from error

        return self._looks.submit(check)

    def resize(self, capacity: int) -> int:
        """All nodes' files may hold so many bytes, as far as this node is concerned; how many entries there are then.
        They only become more. Raises StorageError, and changes nothing."""
        folder = self._opened()
        folder.resize(capacity, self.slot_nbytes)
        self.slots = max(self.slots, min(MAX_KNOWN, capacity // self.slot_nbytes))
        self.headers.grow(self.slots)
        return self.slots

    def close(self, remove: bool = False) -> None:
        """Let go of the directory; its files stay. Calls that hang are left to themselves."""
        self._stop.set()
        ended = [threads.close(self._limit_s) for threads in (self._copies, self._looks)]
        if self._sweeper is not None:
            self._sweeper.join(self._limit_s)
            ended.append(not self._sweeper.is_alive())
        folder, self._folder = self._folder, None
        if folder is not None and all(ended):
            folder.close()  # else a late call would meet another file under the same number

    # -- parts ----------------------------------------------------------------------------------------------

    def _opened(self) -> SharedFolder:
        if self._folder is None:
            raise DiskError(self.off or f"The fs tier in {self.path} is closed.", fatal=True)
        return self._folder

    def _run(self, what: str, call: Callable[[], T], gate: Gate | None) -> T:
        try:
            return self._copies.run(call, self._limit_s, gate)
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:
                self._count("late")
                raise DiskError(
                    f"A {what} in {self.path} did not end within {self._limit_s:g} s.", fatal=True
                ) from error
            raise self._error(what, error) from error

    def _error(self, what: str, error: OSError) -> DiskError:
        """A file that went while it was read is not fatal; a directory that did is."""
        fatal, folder = error.errno in _FATAL or (what == "write" and error.errno in _FORBIDDEN), self._folder
        if error.errno in _STALE and folder is not None:
            try:
                self._copies.run(folder.check, self._limit_s)
                fatal = False
            except OSError as worse:
                error, fatal = worse, True
        why = error.strerror or str(error) or "no answer"
        return DiskError(f"A {what} in {self.path} failed: {why}.", fatal=fatal)

    def _buffer(self) -> torch.Tensor:
        """This thread's own."""
        if not hasattr(self._buffers, "buffer"):
            self._buffers.buffer = aligned_buffer(HEADER_NBYTES + self.slot_nbytes)
        return self._buffers.buffer

    def _count(self, what: str, count: int = 1) -> None:
        with self._counts_lock:
            self.counts[what] += count

    def _sweep(self, pause_s: float) -> None:
        """Once round all folders, and again. Its own thread may hang; nobody waits for it."""
        folder = self._opened()
        index = int.from_bytes(os.urandom(4)) % folder.folders
        while not self._stop.wait(pause_s):
            try:
                trimmed = folder.trim(index)
                self._count("evicted", trimmed.evicted)
                self._count("leftovers", trimmed.leftovers)
            except OSError:
                pass  # who reads and writes there will say so
            index = (index + 1) % folder.folders
