"""Which node's store holds which block: what the Directory believes. No I/O, no clock.

The theory. A store publishes a *stream* of batches, numbered from 0, that begins with nothing: what it holds first,
then what changes. Each stream that is current has a *holder* here, with a bit of its own in the table of blocks:

    (none) ──batch 0 of a new stream──▶ SERVING ──newer stream, gone, silent──▶ DEAD ──swept from all shards──▶ (none)

A holder's end is one change of one integer, whatever it held; its bit is used again when `sweep` has been everywhere.
A batch is taken if it is the next one of its store's current stream, or begins a stream that was not seen yet (a life
counts its streams up, so what comes late is told from what is new). All else changes nothing, and the answer asks for
a new stream. So a Directory that knows nothing, one that missed a batch and one that forgot a store too early all
come right by the same answer. Were a batch of a dead life to come first, the living one's next would replace it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from raykv.core.block_marks import unpack_marks
from raykv.core.mark_table import SHARDS, MarkTable, indices
from raykv.core.prefix_runs import Runs, prefix_runs, turned
from raykv.directory_messages import Holder, HolderStatus, Locate, Publish
from raykv.errors import IntegrityError
from raykv.store_messages import HASH_NBYTES
from raykv.types import StoreLife

NAMED = 8
"""Holders in an answer: who asks tries two or three."""
LIVES = 8
"""Lives of a store whose streams are remembered, so that their late batches are refused."""
GONE = 1024
"""Stores without a holder that are remembered for the same reason."""


@dataclass(slots=True)
class Record:
    """A holder."""

    index: int
    node: str
    store: str
    life: StoreLife
    stream: int
    heard: float
    next: int = 0
    blocks: int = 0
    whole: bool = False

    @property
    def bit(self) -> int:
        return 1 << self.index


@dataclass(slots=True)
class Store:
    """One store through its lives: its current holder, and the last stream seen of each life."""

    holder: Record | None = None
    streams: dict[StoreLife, int] = field(default_factory=dict)


class DirectoryBook:
    """One thread at a time changes it; `locate` may run beside that, and then sees some changes and not others."""

    def __init__(self) -> None:
        self._table = MarkTable()
        self._stores: dict[tuple[str, str], Store] = {}
        self._records: dict[int, Record] = {}  # of serving holders, by index
        self._on_node: dict[str, int] = {}  # bits of serving holders
        self._serving = 0
        self._dead = 0  # bits that may still stand in the table
        self._sweeping = 0  # those of them that this round of the sweep clears
        self._next_shard = 0
        self._turn = 0
        self.counts: Counter[str] = Counter()
        """Since the start: published, refused, added, removed, forgotten, located, located_blocks, hits."""

    # -- what stores say ------------------------------------------------------------------------------------

    def publish(self, batch: Publish, now: float) -> bool:
        """Take a batch; whether the store must begin a new stream. Raises ValueError for one that can't be read."""
        added, removed = unpack_marks(batch.added), unpack_marks(batch.removed)
        store = self._stores.setdefault((batch.node, batch.store), Store())
        holder = store.holder
        if holder is None or (holder.life, holder.stream) != (batch.life, batch.stream):
            if batch.number or batch.stream <= store.streams.get(batch.life, -1):
                self.counts["refused"] += 1
                return True
            holder = self._begin(store, batch, now)
        if batch.number != holder.next:
            self.counts["refused"] += 1
            return batch.number > holder.next  # else it was sent twice, because its answer was lost
        gone = self._table.remove(removed, holder.bit)
        new = self._table.add(added, holder.bit)
        holder.blocks += new - gone
        holder.next += 1
        holder.heard = now
        holder.whole = holder.whole or batch.whole
        self.counts.update(published=1, added=new, removed=gone)
        return False

    def _begin(self, store: Store, batch: Publish, now: float) -> Record:
        self._end(store)
        if len(self._stores) > len(self._records) + GONE:
            self._stores = {place: one for place, one in self._stores.items() if one.holder or one is store}
        store.streams.pop(batch.life, None)  # to the end of the dict: the newest
        store.streams[batch.life] = batch.stream
        while len(store.streams) > LIVES:
            del store.streams[next(iter(store.streams))]
        taken = self._serving | self._dead
        index = (~taken & (taken + 1)).bit_length() - 1  # the lowest bit that is free
        holder = Record(index, batch.node, batch.store, batch.life, batch.stream, now)
        store.holder = self._records[index] = holder
        self._on_node[batch.node] = self._on_node.get(batch.node, 0) | holder.bit
        self._serving |= holder.bit
        return holder

    # -- who is gone ----------------------------------------------------------------------------------------

    def leave(self, node: str, store: str, life: StoreLife) -> bool:
        """That life of a store ends in order; whether it was known."""
        found = self._stores.get((node, store))
        return found is not None and found.holder is not None and found.holder.life == life and self._end(found)

    def forget_nodes(self, nodes: Iterable[str]) -> int:
        """These nodes are gone; how many stores that were."""
        gone = set(nodes) & self._on_node.keys()
        return self._end_all(record for record in self._records.values() if record.node in gone) if gone else 0

    def forget_silent(self, before: float) -> int:
        """Stores that were last heard before that time are gone; how many that were."""
        return self._end_all(record for record in self._records.values() if record.heard < before)

    def _end_all(self, records: Iterable[Record]) -> int:
        ended = sum(self._end(self._stores[record.node, record.store]) for record in list(records))
        self.counts["forgotten"] += ended
        return ended

    def _end(self, store: Store) -> bool:
        holder, store.holder = store.holder, None
        if holder is None:
            return False
        self._serving &= ~holder.bit
        self._dead |= holder.bit
        del self._records[holder.index]
        left = self._on_node[holder.node] & ~holder.bit
        if left:
            self._on_node[holder.node] = left
        else:
            del self._on_node[holder.node]
        return True

    def sweep(self, shards: int) -> bool:
        """Clear dead holders from the next shards of the table; whether there is more to do. Call it now and then."""
        if not self._sweeping:
            self._sweeping, self._next_shard = self._dead, 0
        if not self._sweeping:
            return False
        end = min(self._next_shard + shards, SHARDS)
        for number in range(self._next_shard, end):
            self._table.sweep(number, self._sweeping)
        self._next_shard = end
        if end == SHARDS:
            self._dead &= ~self._sweeping
            self._sweeping = 0
        return bool(self._dead)

    # -- look-ups -------------------------------------------------------------------------------------------

    def locate(self, wanted: Locate) -> tuple[Holder, ...]:
        """Who holds a prefix, as `prefix.longest_prefix` defines it, for every rank and group; the longest first.

        At most NAMED holders. Of those that hold as much, another one is named first each time. Raises ValueError.
        """
        asked = self._serving & ~self._on_node.get(wanted.but_not, 0)
        self._turn += 1
        found = self._named(prefix_runs(self._table.shards, asked, wanted, self._turn))
        self.counts.update(located=1, located_blocks=len(wanted.hashes) // HASH_NBYTES, hits=bool(found))
        return found

    def _named(self, runs: Runs) -> tuple[Holder, ...]:
        found: list[Holder] = []
        for blocks, held in runs:
            for index in turned(held, self._turn) if blocks else ():
                record = self._records.get(index)  # None: it ended in this moment
                if record is not None:
                    found.append(Holder(record.node, record.store, blocks))
                if len(found) == NAMED:
                    return tuple(found)
        return tuple(found)

    # -- figures --------------------------------------------------------------------------------------------

    @property
    def keys(self) -> int:
        """Distinct block keys; those of dead holders too until they are swept."""
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """About what the index takes."""
        return self._table.nbytes

    def holders(self, now: float) -> tuple[HolderStatus, ...]:
        """All that serve."""
        return tuple(
            HolderStatus(one.node, one.store, one.life, one.blocks, one.whole, now - one.heard)
            for one in list(self._records.values())
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless bits, holders and their counts of blocks agree. Reads the whole table."""
        if self._serving & self._dead or self._sweeping & ~self._dead:
            raise IntegrityError(f"bits: serving {self._serving:b}, dead {self._dead:b}, swept {self._sweeping:b}")
        serving = [store.holder for store in self._stores.values() if store.holder is not None]
        if {one.index: one for one in serving} != self._records or set(indices(self._serving)) != set(self._records):
            raise IntegrityError("stores, holders and serving bits disagree")
        nodes: Counter[str] = Counter()
        for one in serving:
            nodes[one.node] += one.bit
        if nodes != self._on_node:
            raise IntegrityError(f"holders by node: {self._on_node}, not {dict(nodes)}")
        found = self._table.counts()
        for index, blocks in found.items():
            known = self._records.get(index)
            if known is None and not self._dead >> index & 1:
                raise IntegrityError(f"{blocks} blocks have the holder {index}, which nobody is")
        wrong = {one.index: one.blocks for one in serving if one.blocks != found[one.index]}
        if wrong:
            raise IntegrityError(f"counts of blocks {wrong} differ from the table")
