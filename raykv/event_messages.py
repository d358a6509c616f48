"""What stores and the event stream tell each other: which block lies in which media of which store.

Plain frozen records, as in `directory_messages`. Keys are whole here, since a reader outside knows a block by its hash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raykv.store_messages import Medium
from raykv.types import StoreLife

EVENT_MEDIA: Mapping[Medium, str] = {Medium.HOST: "CPU", Medium.DISK: "STORAGE", Medium.FS: "STORAGE"}
"""How vLLM's KV events name media. A node's own disk and a shared folder are one to it."""
MEDIUM_BIT: Mapping[Medium, int] = {Medium.HOST: 1, Medium.DISK: 2, Medium.FS: 4}
"""Media of a block in one number; 0: it is nowhere."""
EVENT_BITS: Mapping[str, int] = {"CPU": 1, "STORAGE": 6}
PORT = 5557
"""vLLM's own for events; replay is one above."""


@dataclass(frozen=True, slots=True)
class Now:
    """These blocks (`hashes`, HASH_NBYTES each) of one fingerprint and KV group (`head`) lie in these media now."""

    head: bytes
    media: int
    hashes: bytes


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What readers outside know a model's blocks by: the model's name, and how many tokens a block has (0: not known).

    `fingerprints`: of all writing ranks; a block is there if all of them have it.
    """

    name: str
    fingerprints: tuple[bytes, ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class Tell:
    """What changed in a store: the batch `number` (from 0) of a stream, as `directory_messages.Publish`.

    A stream begins with nothing, and says all that is held until `whole`; each `Now` replaces what was said before.
    `models`: of engines that have come to the store, when they come and when a stream begins.
    """

    node: str
    store: str
    life: StoreLife
    stream: int
    number: int
    now: tuple[Now, ...] = ()
    whole: bool = True
    models: tuple[ModelFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class EventsOptions:
    """Where the stream is to be had. Replay is on `port` + 1.

    `int_hashes`: hashes as the lower 64 bits of vLLM's, as vLLM publishes them unless its environment has
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    int_hashes: bool = True


@dataclass(frozen=True, slots=True)
class EventsStatus:
    """The stream in figures. `problem`: why it can't be had; empty: it can. Counts are since its process started.

    `blocks`: of stores and ranks, as they told; `unnamed`: of them those whose model no engine has named yet, and which
    are told nobody. `kept`: messages that can be replayed.
    """

    life: str
    pid: int
    address: str
    replay_address: str
    sequence: int
    stores: int
    blocks: int
    unnamed: int
    kept: int
    messages: int
    replays: int
    snapshots: int
    problem: str = ""
