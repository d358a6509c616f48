"""The host pool: slots in a named shared-memory file, found again by the next process after a kill -9.

One file: the table of headers, then the slots. All of its memory is reserved when it is made, so that a full machine
is an error at start-up and not a SIGBUS later. Nothing else in this process may keep a view of `slots` past `close`.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os

import torch

from raykv.errors import StorageError
from raykv.storage.files import PAGE, open_locked, reserve, write_owner
from raykv.storage.headers import SlotHeaders, read_geometry, table_nbytes

logger = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap has no name for it in Python 3.11
_FIX = "Give the host tier a smaller capacity, or mount a larger /dev/shm (docker: --shm-size)."


class HostPool:
    """Made by `open`, closed once, by one owner. `slots` is uint8 [slots, slot_nbytes], rows page-aligned.

    `recovered`: what an earlier process published, its bytes unchecked. Reading and writing rows needs no lock; who
    owns a row is the caller's business, and so is the order clear, write, publish.
    """

    def __init__(self, path: str, fd: int, memory: mmap.mmap, slots: int, slot_nbytes: int) -> None:
        self.path, self._fd, self._pinned = path, fd, False
        self.headers = SlotHeaders(memoryview(memory), slots, slot_nbytes)
        self.recovered = self.headers.recover()
        start = table_nbytes(slots)
        # The tensor keeps the mapping, which must not be closed by hand: torch does not hold Python's buffer lock.
        self.slots = torch.frombuffer(memory, dtype=torch.uint8)[start:].view(slots, slot_nbytes)

    @classmethod
    def open(cls, path: str, slots: int, slot_nbytes: int, pin: bool = False) -> HostPool:
        """Open or make the pool at `path` (a file in /dev/shm) and lock it.

        A file of another geometry is replaced. `pin` registers the slots with CUDA, where there is one, so that
        copies to a GPU are asynchronous. Raises StorageError with the fix.
        """
        if slots < 1 or slot_nbytes < 1 or slot_nbytes % PAGE:
            raise StorageError(f"A pool has at least one slot, of a multiple of {PAGE} bytes: {slots} x {slot_nbytes}.")
        nbytes = table_nbytes(slots) + slots * slot_nbytes
        fd = open_locked(path)
        try:
            found = os.fstat(fd).st_size
            if found != nbytes or read_geometry(os.pread(fd, PAGE, 0)) != (slots, slot_nbytes):
                if found:
                    logger.warning("%s holds a pool of another size or version: it is replaced.", path)
                try:
                    reserve(fd, nbytes, path, _FIX)
                except StorageError:
                    os.unlink(path)  # an empty file helps nobody; ours, under the lock
                    raise
            memory = mmap.mmap(fd, nbytes)
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)  # where shmem_enabled=advise: fewer TLB misses
            with contextlib.suppress(OSError):
                memory.madvise(_MADV_POPULATE_WRITE)  # else the first copy of each page pays a fault
            pool = cls(path, fd, memory, slots, slot_nbytes)
            write_owner(fd)
        except BaseException:
            os.close(fd)
            raise
        if pin and torch.cuda.is_available():
            pool._pin()
        return pool

    def close(self, remove: bool) -> None:
        """Unlock; `remove` gives the memory back, else the next process finds it. `slots` is gone after this.

        While somebody keeps a view of `slots` the mapping stays, and the lock with it.
        """
        if self._fd < 0:
            return
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.slots.data_ptr())
        self.slots = torch.empty((0, 0), dtype=torch.uint8)
        self.headers.release()
        if remove:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        os.close(self._fd)
        self._fd = -1

    def _pin(self) -> None:
        error = torch.cuda.cudart().cudaHostRegister(self.slots.data_ptr(), self.slots.nbytes, 0)
        self._pinned = int(error) == 0
        if not self._pinned:
            logger.warning("CUDA can't pin %s (error %s): copies to the GPU are slower.", self.path, int(error))
