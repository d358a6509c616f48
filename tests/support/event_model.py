"""Stores that tell an event stream what they hold, and a reader who believes what it tells, both without sockets."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from raykv.event_messages import EVENT_MEDIA, MEDIUM_BIT, ModelFacts, Now, Tell
from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES, Medium
from raykv.types import StoreLife

BLOCK_SIZE = 16
HOST, DISK = MEDIUM_BIT[Medium.HOST], MEDIUM_BIT[Medium.DISK]
Copy = tuple[str, str, int, bytes | int, str]
"""Topic, medium, KV group, hash, ownership."""


def fingerprint(number: int) -> bytes:
    return bytes([number]) * FINGERPRINT_NBYTES


def block_hash(number: int) -> bytes:
    return random.Random(number).randbytes(HASH_NBYTES)


def model(name: str = "m", *ranks: int, block_size: int = BLOCK_SIZE) -> ModelFacts:
    return ModelFacts(name, tuple(map(fingerprint, ranks or (0,))), block_size)


def now(numbers: Iterable[int], media: int = HOST, rank: int = 0, group: int = 0) -> Now:
    return Now(fingerprint(rank) + bytes([group]), media, b"".join(map(block_hash, numbers)))


class ModelStore:
    """What one store holds, and the batches by which it says so. A batch that is not delivered begins a stream anew."""

    def __init__(self, node: str, models: tuple[ModelFacts, ...] = (model(),), life: str = "1") -> None:
        self.node, self.name, self.life = node, f"store-{node}", StoreLife(life)
        self.models = models
        self.held: dict[tuple[int, int, int], int] = {}  # by rank, group and number
        self.told: dict[tuple[int, int, int], int] = {}
        self.stream, self.number = -1, 0
        self.fresh = True

    def batch(self, most: int = 1000) -> Tell:
        """The next one; of at most so many blocks."""
        if self.fresh:
            self.told, self.stream, self.number, self.fresh = {}, self.stream + 1, 0, False
        places = sorted(self.held.keys() | self.told.keys())
        changed = [one for one in places if self.held.get(one, 0) != self.told.get(one, 0)]
        parts = []
        for rank, group, number in changed[:most]:
            media = self.held.get((rank, group, number), 0)
            parts.append(now([number], media, rank, group))
            self.told[rank, group, number] = media
        first = self.number == 0
        told = Tell(
            self.node,
            self.name,
            self.life,
            self.stream,
            self.number,
            tuple(parts),
            len(changed) <= most,
            self.models if first else (),
        )
        self.number += 1
        return told

    def copies(self, int_hashes: bool = True) -> set[Copy]:
        """What a reader is to believe of it."""
        found: set[Copy] = set()
        for one in self.models:
            ranks = [value[0] for value in one.fingerprints]
            places = {(group, number) for rank, group, number in self.held if rank == ranks[0]}
            for group, number in places:
                media = 7
                for rank in ranks:
                    media &= self.held.get((rank, group, number), 0)
                name = block_hash(number)
                shown = int.from_bytes(name[-8:], "big") if int_hashes else name
                topic = f"kv@{self.node}@{one.name}"
                found |= {
                    (topic, EVENT_MEDIA[medium], group, shown, self.name)
                    for medium, bit in MEDIUM_BIT.items()
                    if media & bit
                }
        return found


class Believer:
    """A reader: what it believes from the messages that it was given."""

    def __init__(self) -> None:
        self.copies: set[Copy] = set()
        self.batches = 0

    def read(self, topic: str, batch: Mapping[str, Any] | list[Any]) -> None:
        """A batch as plain values."""
        self.batches += 1
        for event in batch[1]:  # type: ignore[index]
            self.event(topic, event)

    def event(self, topic: str, event: Mapping[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.copies.clear()
            return
        copies = {
            (topic, event["medium"], event["group_idx"], one, event["ownership"]) for one in event["block_hashes"]
        }
        if event["type"] == "BlockStored":
            self.copies |= copies
        else:
            self.copies -= copies

    def payload(self, topic: str, payload: bytes) -> None:
        self.read(topic, msgspec.msgpack.decode(payload))
