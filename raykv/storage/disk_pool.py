"""The disk pool: slots in one preallocated file, read and written past the page cache.

`<folder>/raykv.slots` holds the slots and nothing else; `raykv.headers` the table of headers, mapped, and the lock.
Past the page cache (O_DIRECT), because the host tier is the cache: what came from the disk goes there, and a second
copy in the page cache would cost memory that the host tier could have. Where the file system refuses O_DIRECT, I/O is
buffered and its pages are dropped after use.

No fdatasync per write: after a kill the page cache is still there; after a power loss a header may name bytes that
never reached the disk, and their checksum says so. `sync` is for a clean end.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
from collections.abc import Iterator

import torch

from raykv.errors import DiskError, StorageError
from raykv.storage.checksum import as_bytes
from raykv.storage.disk_files import FIX, HEADERS, SLOTS, map_table, open_slots, prepare
from raykv.storage.files import PAGE, extend, open_locked, write_owner
from raykv.storage.headers import Recovered, SlotHeaders, geometry, read_geometry, table_nbytes

logger = logging.getLogger(__name__)

# After one of these nothing of the medium can be trusted to work: the tier goes off. Others concern one call.
FATAL = frozenset(
    {
        errno.EIO,
        errno.EROFS,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.ENOENT,
        errno.ESTALE,
        errno.ENODEV,
        errno.ENXIO,
        errno.EBADF,
    }
)


class DiskPool:
    """Made by `open`, closed once, by one owner. `read` and `write` block, from any thread, with the GIL released
    during the I/O and at most `queue_depth` of them at work. Who owns a slot is the caller's business, and so is the
    order clear, write, publish. `recovered`: what an earlier process published, its bytes unchecked.
    """

    def __init__(self, folder: str, fds: tuple[int, int], direct: bool, headers: SlotHeaders, depth: int) -> None:
        self.folder, self.direct, self.headers = folder, direct, headers
        self.slots, self.slot_nbytes = headers.slots, headers.slot_nbytes
        self.recovered: list[Recovered] = headers.recover()
        self._fd, self._headers_fd = fds
        self._depth, self._turns = depth, threading.Semaphore(depth)
        self._bounce = threading.local()

    @classmethod
    def open(cls, folder: str, slots: int, slot_nbytes: int, queue_depth: int = 4) -> DiskPool:
        """Open or make the pool in `folder` (made too, for this user alone) and lock it.

        A pool with another number of slots is brought to this one, and loses what lies beyond it; files of another slot
        size are replaced. Raises StorageError with the fix.
        """
        if slots < 1 or slot_nbytes < 1 or slot_nbytes % PAGE:
            raise StorageError(f"A pool has at least one slot, of a multiple of {PAGE} bytes: {slots} x {slot_nbytes}.")
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise StorageError(f"Can't make the folder {folder} of a disk tier: {error.strerror}.") from error
        headers_path, slots_path = os.path.join(folder, HEADERS), os.path.join(folder, SLOTS)
        with contextlib.ExitStack() as undo:
            headers_fd = open_locked(headers_path)
            undo.callback(os.close, headers_fd)
            left = read_geometry(os.pread(headers_fd, PAGE, 0))
            known = left[0] if left is not None and left[1] == slot_nbytes else 0
            found = prepare(headers_path, headers_fd, slots_path, slots, slot_nbytes, known)
            fd, direct = open_slots(slots_path)
            undo.callback(os.close, fd)
            headers = SlotHeaders(map_table(headers_fd, found), found, slot_nbytes)
            pool = cls(folder, (fd, headers_fd), direct, headers, queue_depth)
            if found != slots:
                pool.resize(slots)
                pool.recovered = [one for one in pool.recovered if one.slot < slots]
            os.ftruncate(fd, slots * slot_nbytes)  # a kill may have left more
            write_owner(headers_fd)
            undo.pop_all()
        return pool

    def read(self, slot: int, nbytes: int, out: torch.Tensor) -> None:
        """Fill `out[:nbytes]` with the slot's first bytes. More of `out` may be overwritten, up to the next page.

        `out` is a uint8 vector. Page-aligned, and as long as whole pages, it is read into directly, else by one more
        copy. Raises DiskError; `out` is undefined then.
        """
        start, pages = self._place(slot, nbytes)
        target = as_bytes(out)
        if nbytes > len(target):
            raise ValueError(f"{nbytes} bytes do not fit into {len(target)}.")
        fits = self._fits(out, pages)
        with self._turn():
            buffer = target[:pages] if fits else self._bounce_buffer()[:pages]
            if not self.direct:
                buffer = buffer[:nbytes]
            self._transfer("read", buffer, start)
            if not fits:
                target[:nbytes] = buffer[:nbytes]

    def write(self, slot: int, data: torch.Tensor) -> None:
        """Write `data`, a uint8 vector, to the slot's start. What follows in the slot is undefined.

        Page-aligned data of whole pages is written from where it is, other data by one more copy. Raises DiskError:
        the slot's bytes are undefined then.
        """
        source = as_bytes(data)
        start, pages = self._place(slot, len(source))
        fits = self._fits(data, pages)
        with self._turn():
            if fits:
                buffer = source[:pages]
            else:
                buffer = self._bounce_buffer()[:pages]
                buffer[: len(source)] = source
            self._transfer("write", buffer, start)

    def resize(self, slots: int) -> None:
        """So many slots from now on, of this owner's, one call at a time. Slots that go hold nothing, and nobody reads
        or writes there. Raises StorageError with the fix, and changes nothing.

        A kill in between leaves the geometry of before or of after, over files that are long enough for either.
        """
        if slots < 1:
            raise StorageError(f"A disk tier needs at least one slot of {self.slot_nbytes} bytes.")
        n, old = self.slot_nbytes, self.slots
        if slots > old:
            extend(self._fd, old * n, slots * n, os.path.join(self.folder, "raykv.slots"), FIX)
            if table_nbytes(slots) > table_nbytes(old):
                try:
                    path = os.path.join(self.folder, "raykv.headers")
                    extend(self._headers_fd, table_nbytes(old), table_nbytes(slots), path, FIX)
                except StorageError:
                    os.ftruncate(self._fd, old * n)
                    raise
            table = map_table(self._headers_fd, slots)
            table[table_nbytes(old) :] = bytes(table_nbytes(slots) - table_nbytes(old))  # what is behind is no header
        else:
            for slot in range(slots, old):
                self.headers.clear(slot)
            table = map_table(self._headers_fd, slots)
        os.pwrite(self._headers_fd, geometry(slots, n), 0)
        self.headers, self.slots = self.headers.resized(table, slots), slots
        if slots < old:  # the table stays as long as it was: somebody may just look into it
            os.ftruncate(self._fd, slots * n)

    def sync(self) -> None:
        """Return when all written slots and headers are on the medium. Raises DiskError."""
        with self._turn():
            try:
                os.fdatasync(self._fd)
                os.fdatasync(self._headers_fd)  # dirty pages of the shared mapping are this file's pages
            except OSError as error:
                raise self._error("sync", error) from error

    def close(self, remove: bool) -> None:
        """Wait for the calls at work, unlock; `remove` deletes the files. Later calls raise StorageError."""
        for _ in range(self._depth):
            self._turns.acquire()
        try:
            if self._fd < 0:
                return
            if remove:
                for name in ("raykv.slots", "raykv.headers"):
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(self.folder, name))
            self.headers.release()
            os.close(self._fd)
            os.close(self._headers_fd)
            self._fd = self._headers_fd = -1
        finally:
            self._turns.release(self._depth)

    def _transfer(self, what: str, buffer: memoryview, start: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                if what == "read":
                    count = os.preadv(self._fd, [buffer[done:]], start + done)
                else:
                    count = os.pwrite(self._fd, buffer[done:], start + done)
            except OSError as error:
                raise self._error(what, error) from error
            if done + count == len(buffer):
                break
            # O_DIRECT goes on at a page only. No whole page of progress: the file ends here, it was cut.
            progress = count // PAGE * PAGE if self.direct else count
            if progress == 0:
                raise DiskError(f"A {what} in {self.folder}/raykv.slots stopped at its end: was it cut?", fatal=False)
            done += progress
        if not self.direct:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, start, len(buffer), os.POSIX_FADV_DONTNEED)

    def _error(self, what: str, error: OSError) -> DiskError:
        fatal = error.errno in FATAL
        return DiskError(f"A {what} in {self.folder}/raykv.slots failed: {error.strerror}.", fatal=fatal)

    def _place(self, slot: int, nbytes: int) -> tuple[int, int]:
        """Where the slot starts, and `nbytes` in whole pages."""
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        if not 0 <= nbytes <= self.slot_nbytes:
            raise ValueError(f"{nbytes} bytes in a slot of {self.slot_nbytes}")
        return slot * self.slot_nbytes, -(-nbytes // PAGE) * PAGE

    def _fits(self, data: torch.Tensor, pages: int) -> bool:
        return not self.direct or (data.data_ptr() % PAGE == 0 and data.numel() >= pages)

    def _bounce_buffer(self) -> memoryview:
        if not hasattr(self._bounce, "buffer"):
            self._bounce.buffer = memoryview(mmap.mmap(-1, self.slot_nbytes))
        return self._bounce.buffer

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self._turns:
            if self._fd < 0:
                raise StorageError(f"The disk pool in {self.folder} is closed.")
            yield


def aligned_buffer(nbytes: int) -> torch.Tensor:
    """A page-aligned uint8 vector of `nbytes`, in whole pages of its own, zeros."""
    memory = mmap.mmap(-1, max(1, -(-nbytes // PAGE)) * PAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
