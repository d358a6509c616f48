"""The host pool: slots in a named shared-memory file, found again by the next process after a kill -9.

One file: the table of headers, with room for more of them that costs nothing (a hole), then the slots. All of its
memory is reserved when it is made or grows, so that a full machine is an error then and not a SIGBUS later. Nothing
else in this process may keep a view of `slots` past `close`.

It changes its size in place: slots that stay keep their address. The slots are cut into *pieces*, which is what CUDA
and NIXL are told of. A piece that somebody was told of is given back as a whole only: its pages are pinned, and under
the same addresses there must never be others.

A kill in the middle of a change leaves the geometry of before or of after, written by one call, over a file that is
long enough for either. The slots that only the larger one has hold nothing then, or blocks with their headers.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct
from typing import NamedTuple

import torch
import xxhash

from raykv.errors import StorageError
from raykv.storage.arena import Arena
from raykv.storage.files import PAGE, extend, open_locked, reserve, write_owner
from raykv.storage.headers import Recovered, SlotHeaders, geometry, read_geometry, table_nbytes

logger = logging.getLogger(__name__)

GROWTH = 8
LEAST_ROOM = 1 << 16
"""The table has room for so many times the slots of its beginning, and for so many slots at least."""
PIECE_NBYTES = 256 << 20

_ROOM_AT = 128  # in the first page, behind the geometry and the owner: from where on the slots lie
_ROOM = struct.Struct("<8sQ")
_ROOM_MAGIC = b"RAYKVROM"
_CHECK = struct.Struct("<Q")
_FIX = "Give the host tier a smaller capacity, or mount a larger /dev/shm (docker: --shm-size)."


class Piece(NamedTuple):
    """Slots next to each other that are pinned and registered as one: where they lie, and how many bytes."""

    address: int
    nbytes: int


class HostPool:
    """Made by `open`, closed once, by one owner. `slots` is uint8 [slots, slot_nbytes], rows page-aligned.

    `recovered`: what an earlier process published, its bytes unchecked. Reading and writing rows needs no lock; who
    owns a row is the caller's business, and so is the order clear, write, publish. `resize` is the owner's too, one at
    a time; who reads `slots` and `headers` once has a pair that fits every slot that is in both sizes.
    """

    def __init__(self, path: str, fd: int, slots: int, slot_nbytes: int, start: int) -> None:
        self.path, self._fd, self._start = path, fd, start
        self._registered: dict[int, int] = {}  # pieces that CUDA knows: address, bytes
        self._pin = False
        self.told = False
        self.headers = SlotHeaders(self._table(slots), slots, slot_nbytes)
        self.recovered: list[Recovered] = self.headers.recover()
        whole = os.fstatvfs(fd).f_blocks * os.fstatvfs(fd).f_frsize
        used, most = slots * slot_nbytes, self._most_slots * slot_nbytes
        self._arena: Arena | None = Arena(fd, start, used, min(most, max(whole, 2 * used)) // PAGE * PAGE)
        self._ends = _ends(0, slots, slot_nbytes)  # of the pieces, in slots
        self._show(slots)

    @classmethod
    def open(cls, path: str, slots: int, slot_nbytes: int, pin: bool = False) -> HostPool:
        """Open or make the pool at `path` (a file in /dev/shm) and lock it.

        One with another number of slots is brought to this one, and loses what lies beyond it; one of another slot size
        is replaced. `pin` registers the slots with CUDA, where there is one, so that copies to a GPU are asynchronous.
        Raises StorageError with the fix.
        """
        if slots < 1 or slot_nbytes < 1 or slot_nbytes % PAGE:
            raise StorageError(f"A pool has at least one slot, of a multiple of {PAGE} bytes: {slots} x {slot_nbytes}.")
        fd = open_locked(path)
        try:
            found = _found(fd, slot_nbytes)
            if found is None or slots > _most_slots(found[1]):
                if os.fstat(fd).st_size:
                    logger.warning("%s holds a pool of another size or version: it is replaced.", path)
                found = _make(path, fd, slots, slot_nbytes)
            pool = cls(path, fd, found[0], slot_nbytes, found[1])
            if found[0] != slots:
                pool.resize(slots)
                pool.recovered = [one for one in pool.recovered if one.slot < slots]
            os.ftruncate(fd, found[1] + slots * slot_nbytes)  # a kill may have left more
            write_owner(fd)
        except BaseException:
            os.close(fd)
            raise
        if pin and torch.cuda.is_available():
            pool._pin = True
            for piece in pool.pieces:
                pool._register(piece)
        return pool

    # -- its size -------------------------------------------------------------------------------------------

    @property
    def _most_slots(self) -> int:
        return _most_slots(self._start)

    @property
    def pieces(self) -> list[Piece]:
        """All that there are now. Who tells others of them says so (`tell`)."""
        return self._cut(0, self._ends)

    def tell(self) -> None:
        """From now on somebody else knows the pieces: they are given back as a whole only."""
        self.told = True

    def why_not(self, slots: int) -> str:
        """Why the pool can't have so many slots, in a sentence; empty if it can, as far as that is known before."""
        assert self._arena is not None
        n = self.headers.slot_nbytes
        if slots < 1:
            return f"It needs at least one slot of {n} bytes."
        most = min(self._most_slots, self._arena.room // n)
        if slots > most:
            return f"A running store's host tier can grow to {most * n} bytes here, not to {slots * n}: start it anew."
        return ""

    def plan(self, slots: int) -> tuple[list[Piece], list[Piece]]:
        """The pieces that `resize` would add, and those that it would give back."""
        ends = self._next_ends(slots)
        kept = min(len(ends), len(self._ends))
        if not self._whole_pieces:
            kept = next((i for i in range(kept) if ends[i] != self._ends[i]), kept)
        first = ends[kept - 1] if kept else 0
        return self._cut(first, ends[kept:]), self._cut(first, self._ends[kept:])

    def resize(self, slots: int) -> None:
        """So many slots from now on. Slots that go hold nothing, and nobody reads there; pieces that go are known to
        nobody else any more. Raises StorageError with the fix, and changes nothing."""
        assert self._arena is not None
        why = self.why_not(slots)
        if why:
            raise StorageError(why)
        n, old = self.headers.slot_nbytes, self.headers.slots
        added, dropped = self.plan(slots)
        ends = self._next_ends(slots)
        if slots > old:
            extend(self._fd, self._start + self._arena.nbytes, self._start + ends[-1] * n, self.path, _FIX)
            if table_nbytes(slots) > table_nbytes(old):
                extend(self._fd, table_nbytes(old), table_nbytes(slots), self.path, _FIX)
            self._arena.resize(max(self._arena.nbytes, ends[-1] * n))
            table = self._table(slots)
            table[table_nbytes(old) :] = bytes(table_nbytes(slots) - table_nbytes(old))  # what is behind is no header
            os.pwrite(self._fd, geometry(slots, n), 0)
            self.headers = self.headers.resized(table, slots)
            if self._pin:
                for piece in added:
                    self._register(piece)
            self._ends = ends
            self._show(slots)
            return
        self._show(slots)
        for slot in range(slots, old):
            self.headers.clear(slot)
        os.pwrite(self._fd, geometry(slots, n), 0)
        self.headers = self.headers.resized(self._table(slots), slots)
        for piece in dropped:
            self._unregister(piece)
        self._ends = ends
        self._arena.resize(ends[-1] * n)
        os.ftruncate(self._fd, self._start + ends[-1] * n)

    @property
    def _whole_pieces(self) -> bool:
        return self.told or bool(self._registered)

    def _next_ends(self, slots: int) -> list[int]:
        """The ends of the pieces with so many slots."""
        n, ends = self.headers.slot_nbytes, self._ends
        if slots > ends[-1]:
            return ends + _ends(ends[-1], slots, n)
        kept = [end for end in ends if end < slots]
        last = next(end for end in ends if end >= slots)
        return [*kept, last if self._whole_pieces else slots]

    def _cut(self, first: int, ends: list[int]) -> list[Piece]:
        assert self._arena is not None
        n = self.headers.slot_nbytes
        starts = [first, *ends][: len(ends)]
        return [
            Piece(self._arena.address + start * n, (end - start) * n) for start, end in zip(starts, ends, strict=True)
        ]

    def _show(self, slots: int) -> None:
        assert self._arena is not None
        n = self.headers.slot_nbytes
        self.slots: torch.Tensor = self._arena.tensor(slots * n).view(slots, n)

    def _table(self, slots: int) -> memoryview:
        return memoryview(mmap.mmap(self._fd, table_nbytes(slots)))

    # -- its end --------------------------------------------------------------------------------------------

    def close(self, remove: bool) -> None:
        """Unlock; `remove` gives the memory back, else the next process finds it. `slots` is gone after this.

        While somebody keeps a view of `slots` the mapping stays, and the lock with it.
        """
        if self._fd < 0:
            return
        for piece in self.pieces:
            self._unregister(piece)
        self.slots = torch.empty((0, 0), dtype=torch.uint8)
        self._arena = None
        self.headers.release()
        if remove:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        os.close(self._fd)
        self._fd = -1

    # -- CUDA -----------------------------------------------------------------------------------------------

    def _register(self, piece: Piece) -> None:
        error = torch.cuda.cudart().cudaHostRegister(piece.address, piece.nbytes, 0)
        if int(error) == 0:
            self._registered[piece.address] = piece.nbytes
        else:
            logger.warning("CUDA can't pin %s (error %s): copies to the GPU are slower.", self.path, int(error))

    def _unregister(self, piece: Piece) -> None:
        if self._registered.pop(piece.address, None) is not None:
            torch.cuda.cudart().cudaHostUnregister(piece.address)


def _ends(first: int, last: int, slot_nbytes: int) -> list[int]:
    """Where pieces end, in slots, that cover the slots from `first` to `last`."""
    step = max(1, PIECE_NBYTES // slot_nbytes)
    return [*range(first + step, last, step), last]


def _most_slots(start: int) -> int:
    """What a table has room for whose slots begin there."""
    return int((start - PAGE) // (table_nbytes(1 << 10) - PAGE) * (1 << 10))


def _make(path: str, fd: int, slots: int, slot_nbytes: int) -> tuple[int, int]:
    """A new pool: its slots, and where they begin."""
    start = table_nbytes(-(-max(GROWTH * slots, LEAST_ROOM) // 1024) * 1024)
    try:
        reserve(fd, table_nbytes(slots), path, _FIX)
        extend(fd, start, start + slots * slot_nbytes, path, _FIX)
    except StorageError:
        os.unlink(path)  # an empty file helps nobody; ours, under the lock
        raise
    body = _ROOM.pack(_ROOM_MAGIC, start)
    os.pwrite(fd, body + _CHECK.pack(xxhash.xxh3_64_intdigest(body)), _ROOM_AT)
    os.pwrite(fd, geometry(slots, slot_nbytes), 0)  # all headers are zeros, so it is a table now
    return slots, start


def _found(fd: int, slot_nbytes: int) -> tuple[int, int] | None:
    """What an earlier process left in the file: its slots, and where they begin. None: nothing that is of use."""
    page = os.pread(fd, PAGE, 0)
    found = read_geometry(page)
    if found is None or found[1] != slot_nbytes or len(page) < PAGE:
        return None
    body = page[_ROOM_AT : _ROOM_AT + _ROOM.size]
    (check,) = _CHECK.unpack_from(page, _ROOM_AT + _ROOM.size)
    magic, start = _ROOM.unpack(body)
    if magic != _ROOM_MAGIC or check != xxhash.xxh3_64_intdigest(body):
        return None
    if not PAGE < start <= 1 << 50 or found[0] > _most_slots(start):
        return None
    return (found[0], start) if os.fstat(fd).st_size >= start + found[0] * slot_nbytes else None
