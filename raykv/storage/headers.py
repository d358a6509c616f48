"""A pool's table of slot headers: what each slot holds, in a form that survives a kill -9 at any instruction.

The table is memory that a file is mapped to (shared), so what was stored is in the page cache when the process is
gone. One page of geometry, then 128 bytes a slot. Nothing is trusted because it is there:

- A record carries a check of itself that also covers the slot's number; torn, flipped or moved, it is a free slot.
- A record says what the slot's bytes must hash to. The data may be torn too: who serves a recovered slot compares.
- A slot's header is cleared before its bytes are overwritten and published after they are in place. After a kill
  that suffices. After a power loss the header may be on the disk and the data not: the checksum tells.

The state is the first byte of a record, so `clear` is one store.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import itertools
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from raykv.admin_messages import NO_TENANT, TENANT_NBYTES
from raykv.errors import StorageError
from raykv.store_messages import KEY_NBYTES

PAGE = 4096
RECORD_NBYTES = 128
VERSION = 1

_MAGIC = b"RAYKVSLT"
_GEOMETRY = struct.Struct("<8sQQQ")  # magic, version, slots, slot_nbytes
_CHECK = struct.Struct("<Q")
# state, has_checksum, generation, nbytes, checksum, key, tenant. Tables of before tenants have zeros there, which is
# nobody: they are as good as new ones, and RayKV of that time reads new ones.
_TENANT_AT = 88
_BODY = struct.Struct(f"<BB6xQQQ{KEY_NBYTES}s{_TENANT_AT - 32 - KEY_NBYTES}x{TENANT_NBYTES}s24x")
_WORDS = struct.Struct("<15Q")
_DTYPE = np.dtype(
    {
        "names": ["state", "has_checksum", "generation", "nbytes", "checksum", "key", "tenant", "check"],
        "formats": ["u1", "u1", "<u8", "<u8", "<u8", f"V{KEY_NBYTES}", f"V{TENANT_NBYTES}", "<u8"],
        "offsets": [0, 1, 8, 16, 24, 32, _TENANT_AT, 120],
        "itemsize": RECORD_NBYTES,
    }
)
_MASK = (1 << 64) - 1
_PRIME = 0x9E3779B185EBCA87
assert _BODY.size == _WORDS.size == RECORD_NBYTES - _CHECK.size


class SlotState(enum.IntEnum):
    """What a header says of its slot. FREE is what any header that can't be believed means."""

    FREE = 0
    READY = 1
    QUARANTINED = 2


class Header(NamedTuple):
    """One believable header. `checksum` is None where the writer kept none. `tenant`: whose block it is."""

    state: SlotState
    key: bytes = b""
    nbytes: int = 0
    checksum: int | None = None
    generation: int = 0
    tenant: bytes = NO_TENANT


class Recovered(NamedTuple):
    """A slot that an earlier process published. Its bytes are unchecked: compare them before they are served."""

    slot: int
    key: bytes
    nbytes: int
    checksum: int
    tenant: bytes = NO_TENANT


class SlotHeaders:
    """The headers of one pool, over `buffer`: writable, page-aligned, `table_nbytes(slots)` long, kept by the caller.

    Opening a table of another geometry, or none, formats it: all slots are free (`fresh` says so). Then `recover`
    must come first, once: it also finds where the generations go on. A slot has one writer at a time; different
    slots may be written from different threads.
    """

    def __init__(self, buffer: memoryview, slots: int, slot_nbytes: int) -> None:
        self.slots, self.slot_nbytes = slots, slot_nbytes
        self._buffer = buffer[: table_nbytes(slots)]
        if len(self._buffer) < table_nbytes(slots):
            raise StorageError(f"A table of {slots} slots needs {table_nbytes(slots)} bytes, not {len(buffer)}.")
        self.fresh = read_geometry(bytes(self._buffer[:PAGE])) != (slots, slot_nbytes)
        if self.fresh:
            self._format()
        self._generations = itertools.count(1)  # its `next` is atomic

    def publish(self, slot: int, key: bytes, nbytes: int, checksum: int | None, tenant: bytes = NO_TENANT) -> None:
        """The slot's first `nbytes` bytes are in place and are this key's. `checksum` None: not kept, so not
        recovered. Call `clear` before the bytes are written.
        """
        if len(key) != KEY_NBYTES or len(tenant) != TENANT_NBYTES or not 0 <= nbytes <= self.slot_nbytes:
            raise ValueError(f"A key of {len(key)} bytes, a block of {nbytes} in slots of {self.slot_nbytes}.")
        self._write(slot, SlotState.READY, key, nbytes, checksum, next(self._generations), tenant)

    def clear(self, slot: int) -> None:
        """The slot holds nothing. It must not be read any more, and may be overwritten from now on."""
        self._buffer[self._start(slot)] = SlotState.FREE

    def quarantine(self, slot: int) -> None:
        """The slot is not to be used again, also not after a restart."""
        self._write(slot, SlotState.QUARANTINED, bytes(KEY_NBYTES), 0, None, next(self._generations))

    def read(self, slot: int) -> Header:
        """The slot's header; FREE if it can't be believed."""
        start = self._start(slot)
        body = bytes(self._buffer[start : start + _BODY.size])
        (check,) = _CHECK.unpack_from(self._buffer, start + _BODY.size)
        state, has_checksum, generation, nbytes, checksum, key, tenant = _BODY.unpack(body)
        if state not in (SlotState.READY, SlotState.QUARANTINED) or check != _record_check(slot, body):
            return Header(SlotState.FREE)
        return Header(SlotState(state), key, nbytes, checksum if has_checksum else None, generation, tenant)

    def recover(self) -> list[Recovered]:
        """The slots that an earlier process published, each key once: of two the later one.

        What is not returned is cleared: headers that can't be believed, the earlier of two, and slots without a
        checksum, because what can't be checked is not served. Quarantined slots stay so.
        """
        table = self._table()
        used = np.flatnonzero(table["state"])
        believed = used[_record_checks(table, used) == table["check"][used]]
        self._generations = itertools.count(int(table["generation"][believed].max(initial=0)) + 1)
        state = table["state"][believed]
        ready = believed[(state == SlotState.READY) & (table["has_checksum"][believed] == 1)]
        ready = ready[table["nbytes"][ready] <= self.slot_nbytes]
        ready = ready[np.argsort(table["generation"][ready], kind="stable")]
        columns = table[ready]
        last = {key: place for place, key in enumerate(columns["key"].tolist())}
        places = np.fromiter(last.values(), np.int64, len(last))
        chosen = columns[places]

        keep = np.zeros(self.slots, bool)
        keep[ready[places]] = True
        keep[believed[state == SlotState.QUARANTINED]] = True
        table["state"][used[~keep[used]]] = SlotState.FREE
        fields = (ready[places], chosen["key"], chosen["nbytes"], chosen["checksum"], chosen["tenant"])
        with _no_collector():  # a million tuples would start it again and again: 0.7 s instead of 0.2
            return list(map(Recovered._make, zip(*(field.tolist() for field in fields), strict=True)))

    def quarantined(self) -> list[int]:
        """The slots that are quarantined, also those of an earlier process."""
        table = self._table()
        found = np.flatnonzero(table["state"] == SlotState.QUARANTINED)
        return found[_record_checks(table, found) == table["check"][found]].tolist()

    def resized(self, buffer: memoryview, slots: int) -> SlotHeaders:
        """The same table with so many slots, over a buffer of the same file, whose geometry says so already. Who has
        this one may go on to use it for slots that are in both."""
        other = SlotHeaders(buffer, slots, self.slot_nbytes)
        other._generations = self._generations
        return other

    def release(self) -> None:
        """Let go of the buffer, so that its owner can unmap it. The headers must not be used after."""
        self._buffer.release()

    def _write(
        self,
        slot: int,
        state: SlotState,
        key: bytes,
        nbytes: int,
        checksum: int | None,
        generation: int,
        tenant: bytes = NO_TENANT,
    ) -> None:
        start = self._start(slot)
        body = _BODY.pack(state, checksum is not None, generation, nbytes, checksum or 0, key, tenant)
        self._buffer[start : start + RECORD_NBYTES] = body + _CHECK.pack(_record_check(slot, body))

    def _start(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        return PAGE + slot * RECORD_NBYTES

    def _table(self) -> np.ndarray:
        return np.frombuffer(self._buffer, _DTYPE, self.slots, PAGE)

    def _format(self) -> None:
        self._buffer[:PAGE] = bytes(PAGE)  # not a table, until it is a whole one
        self._table().view(np.uint8)[:] = 0
        page = geometry(self.slots, self.slot_nbytes)
        self._buffer[: len(page)] = page


def table_nbytes(slots: int) -> int:
    """The bytes of a table for so many slots, in whole pages."""
    return PAGE + -(-slots * RECORD_NBYTES // PAGE) * PAGE


def geometry(slots: int, slot_nbytes: int) -> bytes:
    """What the first page of a table begins with."""
    body = _GEOMETRY.pack(_MAGIC, VERSION, slots, slot_nbytes)
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def read_geometry(page: bytes) -> tuple[int, int] | None:
    """(slots, slot_nbytes) of a table that begins with this page; None if it is not one of this version."""
    if len(page) < _GEOMETRY.size + _CHECK.size:
        return None
    magic, version, slots, slot_nbytes = _GEOMETRY.unpack_from(page)
    (check,) = _CHECK.unpack_from(page, _GEOMETRY.size)
    believed = check == xxhash.xxh3_64_intdigest(page[: _GEOMETRY.size])
    return (slots, slot_nbytes) if believed and (magic, version) == (_MAGIC, VERSION) else None


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _record_check(slot: int, body: bytes) -> int:
    # Each step is a bijection of `value` and of the word: a change of any one word always changes the result.
    value = slot + 1
    for word in _WORDS.unpack(body):
        value = ((value ^ word) * _PRIME) & _MASK
        value ^= value >> 29
    return value


def _record_checks(table: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """`_record_check` of many slots at once."""
    # Viewed first, then picked: a copy of records leaves out what lies between their fields.
    words = table.view("<u8").reshape(len(table), RECORD_NBYTES // 8)[slots]
    value = slots.astype(np.uint64) + np.uint64(1)
    for column in range(15):
        value = (value ^ words[:, column]) * np.uint64(_PRIME)
        value ^= value >> np.uint64(29)
    return value
