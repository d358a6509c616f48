"""KV events as vLLM 0.32 writes them (`vllm.distributed.kv_events`), without vLLM: dicts in msgpack.

Hashes here are those of a store's keys: vLLM's own, HASH_NBYTES of them; shorter ones were padded with zeros, and what
only one engine can find (adapters, and all after a reset of its cache) has a hash that no one else can make.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from raykv.core.event_book import Event, Message
from raykv.store_messages import HASH_NBYTES

TOPIC = "kv@"
EVERYTHING = b"kv@@"
"""The topic of what is about no node in particular: all is cleared, and signs of life."""
SHORT_NBYTES = 16
"""xxhash's; what sha256 makes ends in so many zeros never."""
END = (-1).to_bytes(8, "big", signed=True)
"""The number that ends a replay."""

_NO_MORE = bytes(HASH_NBYTES - SHORT_NBYTES)
_encode = msgspec.msgpack.Encoder().encode


def topic(message: Message) -> bytes:
    """`kv@NODE@MODEL`, in which NODE is Ray's id of the node; an "@" of the model's name is written %40."""
    return f"{TOPIC}{message.node}@{message.model.name.replace('@', '%40')}".encode()


def payload(message: Message, int_hashes: bool) -> bytes:
    """A KVEventBatch. `ownership` is the store, which has a node's CPU and STORAGE once; there may be several."""
    return batch([_event(message, event, int_hashes) for event in message.events])


def cleared() -> bytes:
    """A KVEventBatch: nothing is anywhere, until it is told again."""
    return batch([{"type": "AllBlocksCleared"}])


def batch(events: Sequence[dict[str, Any]]) -> bytes:
    """A KVEventBatch of now."""
    return _encode([time.time(), events])


def _event(message: Message, event: Event, int_hashes: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "BlockStored" if event.stored else "BlockRemoved",
        "block_hashes": [external(one, int_hashes) for one in event.hashes],
        "medium": event.medium,
        "group_idx": event.group,
        "ownership": message.store,
    }
    if event.stored:  # a store knows neither a block's tokens nor what comes before it
        found |= {"parent_block_hash": None, "token_ids": [], "block_size": message.model.block_size}
        found |= {"lora_id": None, "lora_name": None}
    return found


def external(block_hash: bytes, int_hashes: bool) -> int | bytes:
    """A hash as vLLM publishes it."""
    if block_hash[SHORT_NBYTES:] == _NO_MORE:
        block_hash = block_hash[:SHORT_NBYTES]
    return int.from_bytes(block_hash[-8:], "big") if int_hashes else block_hash
