"""What the two halves of a TierConnector tell each other through vLLM: one record for each direction."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from raykv.store_messages import JobDone, LoadJob, SaveJob
from raykv.types import JobId, Rank, RequestId, StoreLife


@dataclass(frozen=True)
class TierLoad:
    """A request's load. `life` gave the lease: another life of the store must not be asked for it."""

    request: RequestId
    life: StoreLife
    job: LoadJob


@dataclass
class TierHandshake(KVConnectorHandshakeMetadata):
    """A rank to the scheduler half, once it has joined the store: its fingerprint there, in hexadecimal."""

    rank: Rank
    fingerprint: str
    writes: bool


@dataclass
class TierMetadata(KVConnectorMetadata):
    """Scheduler half to worker halves, once a step."""

    loads: tuple[TierLoad, ...] = ()
    refused: tuple[TierLoad, ...] = ()
    """Loads of blocks that no lease covers: nothing runs, and they have failed."""
    save: SaveJob | None = None


@dataclass
class TierWorkerMeta(KVConnectorWorkerMetadata):
    """Worker halves to scheduler half: the jobs that have ended, by rank."""

    done: dict[tuple[JobId, Rank], JobDone] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> TierWorkerMeta:
        assert isinstance(other, TierWorkerMeta)
        self.done.update(other.done)
        return self
