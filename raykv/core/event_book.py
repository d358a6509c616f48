"""What all stores hold, by medium, and what readers outside are told of it. No I/O, no clock.

The theory. A store tells a numbered stream (`event_messages.Tell`), taken as `directory_book` takes a Publish. When a
stream begins, what the one before said still stands: each block has a mark of the stream that said it last, and once
the new stream is whole, blocks with the old mark are gone. So a store that begins anew is no storm of removals.

Readers know models and not fingerprints. A block is there, in a medium, if all ranks of its model have it there; of a
model that nobody has named yet nothing is told. A message is about one store and one model. What is told of a block is
its state, and not a step: to be told twice changes nothing. That is why a snapshot need not stop the world: it lists
the blocks there were at its beginning and says of each how it is when it is written, and the messages after its
beginning put right whatever changed meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from raykv.errors import IntegrityError
from raykv.event_messages import EVENT_BITS, ModelFacts, Tell
from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES
from raykv.types import StoreLife

CHUNK = 1000
"""Blocks in one message: with hashes as bytes 34 KB."""
LIVES = 8
"""Lives of a store whose streams are remembered, so that their late batches are refused."""
GONE = 1024
"""Stores that have gone and are remembered for the same reason."""
MEDIA, MARK = 7, 8

Block: TypeAlias = bytes
"""A block key without its fingerprint: KV group and hash."""


class Event(NamedTuple):
    """Blocks (their hashes, HASH_NBYTES each) of one KV group that are in a medium now, or are no longer."""

    stored: bool
    medium: str
    group: int
    hashes: tuple[bytes, ...]


class Message(NamedTuple):
    """What happened in one store, of one model."""

    node: str
    store: str
    model: ModelFacts
    events: tuple[Event, ...]


class Snapshot(NamedTuple):
    """All that is held: so many messages, made when they are asked for, with the lock of the book held each time."""

    total: int
    messages: Iterator[Message]


@dataclass(slots=True, eq=False)
class _Store:
    """By fingerprint, by block: its media, and the mark of the stream that said so."""

    node: str
    name: str
    life: StoreLife | None = None
    stream: int = -1
    next: int = 0
    mark: int = 0
    whole: bool = False
    serving: bool = False
    heard: float = 0.0
    blocks: dict[bytes, dict[Block, int]] = field(default_factory=dict)
    streams: dict[StoreLife, int] = field(default_factory=dict)


class _Diff:
    """What a change does to each block of each model, its first state against its last."""

    def __init__(self) -> None:
        self._turned: dict[tuple[ModelFacts, str], dict[Block, bool]] = {}

    def add(self, model: ModelFacts, block: Block, before: int, after: int) -> None:
        for medium, bits in EVENT_BITS.items():
            is_there = bool(after & bits)
            if is_there is not bool(before & bits):
                turned = self._turned.setdefault((model, medium), {})
                if turned.pop(block, None) is None:  # else it is as it was
                    turned[block] = is_there

    def messages(self, store: _Store) -> list[Message]:
        found = []
        for (model, medium), turned in self._turned.items():
            blocks = list(turned.items())
            for at in range(0, len(blocks), CHUNK):
                found.append(Message(store.node, store.name, model, _events(medium, blocks[at : at + CHUNK])))
        return found


def _events(medium: str, blocks: Iterable[tuple[Block, bool]]) -> tuple[Event, ...]:
    hashes: dict[tuple[bool, int], list[bytes]] = {}
    for block, stored in blocks:
        hashes.setdefault((stored, block[0]), []).append(block[1:])
    return tuple(Event(stored, medium, group, tuple(ones)) for (stored, group), ones in hashes.items())


class EventBook:
    """Not thread-safe; its owner has a lock. What a method returns is to be told to readers, in that order."""

    def __init__(self) -> None:
        self._stores: dict[tuple[str, str], _Store] = {}
        self._models: dict[tuple[bytes, ...], ModelFacts] = {}
        self._of_rank: dict[bytes, list[ModelFacts]] = {}
        self.counts: Counter[str] = Counter()
        """Since the start: told, refused."""

    # -- what stores say ------------------------------------------------------------------------------------

    def tell(self, told: Tell, now: float) -> tuple[bool, list[Message]]:
        """Take a batch; whether the store must begin a new stream. Raises ValueError for one that can't be read."""
        if any(len(one.head) != FINGERPRINT_NBYTES + 1 or len(one.hashes) % HASH_NBYTES for one in told.now):
            raise ValueError(f"a batch of {told.store} has no whole number of block keys")
        store = self._stores.setdefault((told.node, told.store), _Store(told.node, told.store))
        if not store.serving or (store.life, store.stream) != (told.life, told.stream):
            if told.number or told.stream <= store.streams.get(told.life, -1):
                self.counts["refused"] += 1
                return True, []
            self._begin(store, told)
        if told.number != store.next:
            self.counts["refused"] += 1
            return told.number > store.next, []  # else it was sent twice, because its answer was lost
        store.next += 1
        store.heard = now
        self.counts["told"] += 1
        messages = self.name(told.models)
        diff = _Diff()
        for one in told.now:
            rank, group = one.head[:FINGERPRINT_NBYTES], one.head[FINGERPRINT_NBYTES:]
            for at in range(0, len(one.hashes), HASH_NBYTES):
                block = group + one.hashes[at : at + HASH_NBYTES]
                self._set(store, rank, block, one.media & MEDIA, diff)
        if told.whole and not store.whole:
            store.whole = True
            for rank, blocks in list(store.blocks.items()):
                for block in [block for block, state in blocks.items() if state & MARK != store.mark]:
                    self._set(store, rank, block, 0, diff)
        return False, messages + diff.messages(store)

    def _begin(self, store: _Store, told: Tell) -> None:
        store.serving, store.whole = True, False
        store.life, store.stream, store.next = told.life, told.stream, 0
        store.mark ^= MARK
        store.streams.pop(told.life, None)  # to the end of the dict: the newest
        store.streams[told.life] = told.stream
        while len(store.streams) > LIVES:
            del store.streams[next(iter(store.streams))]
        gone = [place for place, one in self._stores.items() if not one.serving]
        for place in gone[: max(0, len(gone) - GONE)]:
            del self._stores[place]

    def _set(self, store: _Store, rank: bytes, block: Block, media: int, diff: _Diff) -> None:
        blocks = store.blocks.setdefault(rank, {})
        before = blocks.get(block, 0) & MEDIA
        if media:
            blocks[block] = media | store.mark
        elif blocks.pop(block, None) is not None and not blocks:
            del store.blocks[rank]
        if before != media:
            for model in self._of_rank.get(rank, ()):
                others = self._joined(store, [one for one in model.fingerprints if one != rank], block)
                diff.add(model, block, before & others, media & others)

    def _joined(self, store: _Store, ranks: Sequence[bytes], block: Block) -> int:
        media = MEDIA
        for rank in ranks:
            media &= store.blocks.get(rank, {}).get(block, 0)
        return media

    # -- who is gone ----------------------------------------------------------------------------------------

    def leave(self, node: str, name: str, life: StoreLife) -> list[Message]:
        """That life of a store ends in order."""
        store = self._stores.get((node, name))
        return self._end(store) if store is not None and store.serving and store.life == life else []

    def forget_nodes(self, nodes: Iterable[str]) -> list[Message]:
        """These nodes are gone."""
        gone = set(nodes)
        return [one for store in self._serving() if store.node in gone for one in self._end(store)]

    def forget_silent(self, before: float) -> list[Message]:
        """Stores that were last heard before that time are gone."""
        return [one for store in self._serving() if store.heard < before for one in self._end(store)]

    def _serving(self) -> list[_Store]:
        return [store for store in self._stores.values() if store.serving]

    def _end(self, store: _Store) -> list[Message]:
        messages = [one for model in self._models.values() for one in self._all(store, model, False)]
        store.serving, store.blocks = False, {}
        return messages

    # -- models ---------------------------------------------------------------------------------------------

    def name(self, models: Iterable[ModelFacts]) -> list[Message]:
        """Engines have these models. A name stays, since blocks outlive engines, unless too little was known of it."""
        messages: list[Message] = []
        for model in models:
            old = self._models.get(model.fingerprints)
            if not model.fingerprints or (old is not None and (old.block_size or not model.block_size)):
                continue
            stores = self._serving()
            if old is not None:
                messages += [one for store in stores for one in self._all(store, old, False)]
                for rank in old.fingerprints:
                    self._of_rank[rank].remove(old)
            self._models[model.fingerprints] = model
            for rank in model.fingerprints:
                self._of_rank.setdefault(rank, []).append(model)
            messages += [one for store in stores for one in self._all(store, model, True)]
        return messages

    def _all(self, store: _Store, model: ModelFacts, stored: bool) -> list[Message]:
        """That all of a model's blocks in a store are there, or no longer."""
        diff = _Diff()
        for block in store.blocks.get(model.fingerprints[0], ()):
            media = self._joined(store, model.fingerprints, block)
            diff.add(model, block, 0 if stored else media, media if stored else 0)
        return diff.messages(store)

    # -- for who comes late ---------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """All that is held, for a reader who also takes all messages that are made from now on."""
        parts: list[tuple[_Store, ModelFacts, list[Block]]] = []
        for store in self._serving():
            for model in self._models.values():
                blocks = list(store.blocks.get(model.fingerprints[0], ()))
                parts += [(store, model, blocks[at : at + CHUNK]) for at in range(0, len(blocks), CHUNK)]
        return Snapshot(len(parts), (self._part(*part) for part in parts))

    def _part(self, store: _Store, model: ModelFacts, blocks: Sequence[Block]) -> Message:
        events: list[Event] = []
        if self._models.get(model.fingerprints) is model:  # else it has another name, under which all is told anew
            media = [(block, self._joined(store, model.fingerprints, block)) for block in blocks]
            for medium, bits in EVENT_BITS.items():
                events += _events(medium, [(block, True) for block, lies in media if lies & bits])
        return Message(store.node, store.name, model, tuple(events))

    # -- figures --------------------------------------------------------------------------------------------

    @property
    def stores(self) -> int:
        """Those that serve."""
        return len(self._serving())

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of stores and ranks, and how many of them have no name."""
        sizes = [(rank, len(blocks)) for store in self._serving() for rank, blocks in store.blocks.items()]
        return sum(size for _, size in sizes), sum(size for rank, size in sizes if not self._of_rank.get(rank))

    def check_integrity(self) -> None:
        """Raise IntegrityError unless stores, marks and names agree. Reads all."""
        for store in self._stores.values():
            if store.blocks and not store.serving:
                raise IntegrityError(f"store {store.name} is gone and has blocks")
            for blocks in store.blocks.values():
                if not blocks or any(not state & MEDIA for state in blocks.values()):
                    raise IntegrityError(f"store {store.name} has a block that lies nowhere")
                if store.whole and any(state & MARK != store.mark for state in blocks.values()):
                    raise IntegrityError(f"store {store.name} has a block of a stream that is over")
        named = {(rank, model) for model in self._models.values() for rank in model.fingerprints}
        if named != {(rank, model) for rank, models in self._of_rank.items() for model in models}:
            raise IntegrityError("the names of models and of ranks disagree")
