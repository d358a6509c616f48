"""Takes the blocks of a store that is drained: reads them by NIXL into free slots of the host tier, checked.

Nothing of this node's is lost for them but what its own saves would push out of its slowest tier. A slot is the
transfer's until NIXL says that it has ended: what is late is kept aside until then.
"""

from __future__ import annotations

import logging
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from raykv.actors.late_transfers import LateTransfers
from raykv.actors.peer_reach import Peers
from raykv.actors.store_stock import Stock
from raykv.actors.store_tiers import Written
from raykv.core.peer_part import seal
from raykv.core.store_plans import Place
from raykv.peer_messages import Adopt, Adopted, Adoption, Lent
from raykv.storage.checksum import checksum
from raykv.storage.nixl_transport import NixlTransport, Transfer, TransferState, TransportError
from raykv.store_messages import KEY_NBYTES
from raykv.types import StoreLife

logger = logging.getLogger("raykv")

CHUNK_NBYTES = 4 << 20
DEPTH = 2
PATIENCE_S = 2.0
SLOWEST = 64 << 20
"""A batch ends within PATIENCE_S and the time that its bytes take at this rate."""
PAUSE_S = 200e-6


@dataclass(frozen=True, slots=True)
class _Block:
    """One block that is offered; `slot` is at the source."""

    key: bytes
    nbytes: int
    slot: int
    seal: int


@dataclass(eq=False, slots=True)
class _Chunk:
    blocks: list[tuple[_Block, Place]]
    transfer: Transfer


class Adopter:
    """One per store with a peer tier. Any thread."""

    def __init__(self, stock: Stock, life: StoreLife, transport: NixlTransport, peers: Peers) -> None:
        self._stock, self._life, self._transport, self._peers = stock, life, transport, peers
        self._late = LateTransfers(self._ended)

    def adopt(self, adopt: Adopt) -> Adopted:
        """Take what there is room for, from the first block on. Blocks for about as long as the bytes take."""
        stock = self._stock
        blocks = _blocks_of(adopt, stock.tiers.slot_nbytes)
        if stock.tiers.host is None or not stock.spec.checksum:
            return Adopted(self._life, refused="it has no host tier with checksums")
        if blocks is None:
            return Adopted(self._life, refused="the blocks it was offered make no sense")
        try:
            self._peers.memory(adopt.source, Lent(adopt.store, memory=adopt.memory))
        except TransportError as error:
            return Adopted(self._life, refused=str(error))
        keys = [block.key for block in blocks]
        with stock.lock:
            lacking, complete = stock.book.drain.lacking(keys)
            places, clear = stock.book.begin_fetch(lacking)
            stock.tiers.clear(clear)
        target = dict(zip(lacking, places, strict=True))
        wanted = {one.key: (one, place) for one in blocks if (place := target.get(one.key)) is not None}
        taken, bad, why = self._read(adopt, list(wanted.values()))
        with stock.lock:
            here = [stock.book.find(key) is not None for key in keys]
            more = stock.book.drain.makes_room
        answer = bytearray(Adoption.WAS_HERE if found else Adoption.NOT_HERE for found in here)
        for index, key in enumerate(keys):
            if key in taken:  # also if it has gone on to a slower tier by now, or further
                answer[index] = Adoption.TAKEN if here[index] else Adoption.NOT_HERE
            elif key in bad:
                answer[index] = Adoption.BAD
        full = not complete or len(wanted) < len(lacking)
        return Adopted(self._life, bytes(answer), why, full, more)

    def _read(self, adopt: Adopt, wanted: Sequence[tuple[_Block, Place]]) -> tuple[set[bytes], set[bytes], str]:
        """Keys that are here now, keys whose bytes were bad, and why it ended early. Each place is settled here, or
        waits with the orphans."""
        limit = time.monotonic() + PATIENCE_S + sum(block.nbytes for block, _ in wanted) / SLOWEST
        taken: set[bytes] = set()
        bad: set[bytes] = set()
        todo = deque(_chunks(wanted))
        flying: deque[_Chunk] = deque()
        error = ""
        try:
            while todo or flying:
                while todo and len(flying) < DEPTH:
                    flying.append(_Chunk(todo[0], self._begin(adopt, todo[0])))
                    todo.popleft()
                error = self._finish(flying[0], limit, taken, bad)
                if error:
                    break
                flying.popleft()
        except TransportError as failed:
            error = str(failed)
        finally:
            for chunk in flying:
                self._late.let_go(chunk)
            with self._stock.lock:
                self._stock.book.end_fetch([], [place for blocks in todo for _, place in blocks])
        if error:
            self._peers.failed(adopt.source, error)
        return taken, bad, error

    def _begin(self, adopt: Adopt, blocks: Sequence[tuple[_Block, Place]]) -> Transfer:
        rows = self._stock.tiers.rows(blocks[0][1].tier)
        assert rows is not None
        base, step, there = rows.data_ptr(), self._stock.tiers.slot_nbytes, adopt.memory
        pairs = [
            (there.base + block.slot * there.slot_nbytes, base + place.slot * step, block.nbytes)
            for block, place in blocks
        ]
        return self._transport.read(adopt.store, pairs)

    def _finish(self, chunk: _Chunk, limit: float, taken: set[bytes], bad: set[bytes]) -> str:
        """Wait for it and check it; why it failed, if it did: then its places are not settled."""
        while chunk.transfer.poll() is TransferState.RUNNING and time.monotonic() < limit:
            time.sleep(PAUSE_S)
        if chunk.transfer.poll() is not TransferState.DONE:
            return f"a read of its blocks failed: {chunk.transfer.error or 'it is too slow, or hangs'}"
        stock, rows = self._stock, self._stock.tiers.rows(chunk.blocks[0][1].tier)
        assert rows is not None
        good: list[Place] = []
        wrong: list[Place] = []
        for block, place in chunk.blocks:
            found = checksum(rows[place.slot][: block.nbytes])
            if seal(block.key, block.nbytes, found) == block.seal:
                stock.tiers.note(place, Written(block.nbytes, found))
                good.append(place)
                taken.add(block.key)
            else:
                wrong.append(place)
                bad.add(block.key)
        with stock.lock:
            stock.tiers.publish(stock.book.end_fetch(good, wrong))
        return ""

    # -- what has failed ------------------------------------------------------------------------------------

    def _ended(self, chunk: _Chunk) -> bool:
        """Whether nothing writes into its slots any more; then they are given back."""
        if chunk.transfer.poll() is TransferState.RUNNING:
            return False
        with self._stock.lock:
            self._stock.book.end_fetch([], [place for _, place in chunk.blocks])
        return True

    def reap(self) -> int:
        """Give back the slots of late transfers that have ended; how many have not."""
        return self._late.reap()


def _blocks_of(adopt: Adopt, slot_nbytes: int) -> list[_Block] | None:
    """None: they can't be what they should be."""
    count, rest = divmod(len(adopt.keys), KEY_NBYTES)
    if rest or (len(adopt.sizes), len(adopt.slots), len(adopt.seals)) != (4 * count, 4 * count, 8 * count):
        return None
    keys = [adopt.keys[at : at + KEY_NBYTES] for at in range(0, len(adopt.keys), KEY_NBYTES)]
    sizes, slots = struct.unpack(f"<{count}I", adopt.sizes), struct.unpack(f"<{count}I", adopt.slots)
    seals = struct.unpack(f"<{count}Q", adopt.seals)
    most = min(slot_nbytes, adopt.memory.slot_nbytes)
    if max(slots, default=0) >= adopt.memory.slots or not all(0 < nbytes <= most for nbytes in sizes):
        return None
    return [_Block(*fields) for fields in zip(keys, sizes, slots, seals, strict=True)]


def _chunks(wanted: Sequence[tuple[_Block, Place]]) -> list[list[tuple[_Block, Place]]]:
    chunks: list[list[tuple[_Block, Place]]] = []
    nbytes = 0
    for block, place in wanted:
        if not chunks or nbytes + block.nbytes > CHUNK_NBYTES:
            chunks.append([])
            nbytes = 0
        chunks[-1].append((block, place))
        nbytes += block.nbytes
    return chunks
