"""Memory that a file is mapped to, at an address that stays while it grows and shrinks.

A range of addresses is reserved once, without memory behind it; parts of the file are mapped into it and taken out. So
whoever copies from or to a part that stays is never disturbed. An address that is not mapped is a fault, not garbage.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

import torch

from raykv.errors import StorageError

_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value
_MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap has no name for it in Python 3.11
_MADV_HUGEPAGE = 14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Arena:
    """One owner. It, and a descriptor of the file of its own, live as long as it or any tensor over it does."""

    def __init__(self, fd: int, offset: int, nbytes: int, room: int) -> None:
        """Map `nbytes` of the file from `offset` on, with addresses for `room` bytes. Both are whole pages.

        Where the process may not have so many addresses, there is no room to grow. Raises StorageError.
        """
        self._fd, self._offset = os.dup(fd), offset
        self.room, self.nbytes = max(room, nbytes), 0
        try:
            try:
                self.address = self._map(0, self.room, None)
            except StorageError:
                self.room = nbytes
                self.address = self._map(0, self.room, None)
            end = weakref.finalize(self, _let_go, self.address, self.room, self._fd)
            end.atexit = False  # threads may run until the very end
        except BaseException:
            os.close(self._fd)
            raise
        self.resize(nbytes)

    def resize(self, nbytes: int) -> None:
        """So many bytes of the file are mapped from now on, from the same address on. The file has them."""
        if not 0 <= nbytes <= self.room:
            raise StorageError(f"{nbytes} bytes do not fit into the {self.room} addresses that were reserved.")
        if nbytes > self.nbytes:
            start, more = self.address + self.nbytes, nbytes - self.nbytes
            self._map(start, more, self.nbytes)
            _libc.madvise(start, more, _MADV_HUGEPAGE)  # where shmem_enabled=advise: fewer TLB misses
            _libc.madvise(start, more, _MADV_POPULATE_WRITE)  # else the first copy of each page pays a fault
        elif nbytes < self.nbytes:
            self._map(self.address + nbytes, self.nbytes - nbytes, None)
        self.nbytes = nbytes

    def tensor(self, nbytes: int) -> torch.Tensor:
        """The first bytes, as uint8. It keeps the arena."""
        memory: Any = (ctypes.c_char * nbytes).from_address(self.address)
        memory.arena = self
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _map(self, start: int, nbytes: int, at: int | None) -> int:
        """`at`: from where on of what is mapped of the file; None: nothing, the addresses alone."""
        fixed = _MAP_FIXED if start else 0
        if at is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | fixed
            found = _libc.mmap(start, nbytes, _PROT_NONE, flags, -1, 0)
        else:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            found = _libc.mmap(start, nbytes, protection, mmap.MAP_SHARED | fixed, self._fd, self._offset + at)
        if found == _FAILED:
            raise StorageError(f"Can't map {nbytes} bytes: {os.strerror(ctypes.get_errno())}.")
        return int(found)


def _let_go(address: int, nbytes: int, fd: int) -> None:
    _libc.munmap(address, nbytes)
    os.close(fd)
