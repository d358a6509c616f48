"""What RayKV's two halves tell each other through vLLM: one record for each direction, for all children."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from raykv.config import ChildConfig
from raykv.messages import ChildEvent, ChildIndex, ChildPlan
from raykv.types import Incarnation, Rank, RequestId, StepId

NO_STEP = StepId(-1)


@dataclass(frozen=True)
class ChainAdd:
    """Every rank makes this child's worker half, in the background where it can, and reports how that went.

    `life` keeps its engine ids and its hosts apart from those of children before it; its hosts begin with it.
    """

    index: ChildIndex
    config: ChildConfig
    life: Incarnation


@dataclass(frozen=True)
class ChainEnd:
    """Every rank shuts this child's worker half down, and reports a DOWN of its incarnation when nothing is left."""

    index: ChildIndex
    incarnations: tuple[Incarnation, ...]


@dataclass(frozen=True)
class ChildStart:
    """How the start of an added child went on a rank. `error`: why it could not be started; then nothing of it is left.
    `handshake`: an inline child's metadata for its scheduler half; a hosted one's comes from its hosts."""

    error: str = ""
    handshake: Any = None


@dataclass
class RayMultiMetadata(KVConnectorMetadata):
    """Scheduler half to worker halves, once a step. A child without work in the step has no plan.

    `sync_failed`: a synchronous load of the step before failed on some rank. `echo`: the asynchronous loads to report
    as failed, with the blocks that have nothing; no blocks where it can't be said, and all of the load is lost.
    `changes`: of the chain, before anything else of the step; no child has a plan in the step that ends it.
    """

    step: StepId
    plans: dict[ChildIndex, ChildPlan]
    forward: bool = True
    echo: dict[RequestId, tuple[int, ...]] = field(default_factory=dict)
    retire: dict[ChildIndex, tuple[Incarnation, ...]] = field(default_factory=dict)
    sync_failed: bool = False
    changes: tuple[ChainAdd | ChainEnd, ...] = ()


@dataclass
class RayMultiHandshake(KVConnectorHandshakeMetadata):
    """One rank's handshake metadata, by child: each child gets its own of every rank and nobody else's."""

    rank: Rank
    children: dict[ChildIndex, KVConnectorHandshakeMetadata]


@dataclass
class ChildWorkerOutput:
    """What one child's worker halves gave in a step, aggregated over ranks the way vLLM would for it alone.

    `kv_events` are of one rank and of the step `step`; they are taken out before ranks come together.
    """

    worker_meta: KVConnectorWorkerMetadata | None = None
    stats: Any = None
    kv_events: Any = None
    step: StepId = NO_STEP

    @property
    def is_empty(self) -> bool:
        return self.worker_meta is None and self.stats is None and self.kv_events is None

    def add(self, other: ChildWorkerOutput) -> None:
        """Take in a later report of the same rank, or another rank's."""
        if other.worker_meta is not None:
            mine = self.worker_meta
            self.worker_meta = other.worker_meta if mine is None else mine.aggregate(other.worker_meta)
        if other.stats is not None:
            self.stats = other.stats if self.stats is None else self.stats.aggregate(other.stats)


@dataclass(frozen=True)
class EventPart:
    """A container of KV events that one rank of a child gave for a step."""

    child: ChildIndex
    rank: Rank
    step: StepId
    events: Any


@dataclass
class RayMultiWorkerMeta(KVConnectorWorkerMetadata):
    """Worker halves to scheduler half. `done`: by (child, rank) the last step that its host has completed."""

    events: list[ChildEvent] = field(default_factory=list)
    done: dict[tuple[ChildIndex, Rank], StepId] = field(default_factory=dict)
    outputs: dict[ChildIndex, ChildWorkerOutput] = field(default_factory=dict)
    kv_events: list[EventPart] = field(default_factory=list)
    saved_tokens: dict[ChildIndex, int] = field(default_factory=dict)
    host_pids: dict[tuple[ChildIndex, Rank], int] = field(default_factory=dict)
    started: dict[tuple[ChildIndex, Rank], ChildStart] = field(default_factory=dict)

    def add_output(self, child: ChildIndex, rank: Rank, output: ChildWorkerOutput) -> None:
        """A report of a child's worker half on this rank."""
        if output.kv_events is not None:
            self.kv_events.append(EventPart(child, rank, output.step, output.kv_events))
            output.kv_events = None
        if output.is_empty:
            return
        if child in self.outputs:
            self.outputs[child].add(output)
        else:
            self.outputs[child] = output

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RayMultiWorkerMeta:
        assert isinstance(other, RayMultiWorkerMeta)
        self.events.extend(other.events)
        self.done.update(other.done)
        self.host_pids.update(other.host_pids)
        self.started.update(other.started)
        self.kv_events.extend(other.kv_events)
        for child, output in other.outputs.items():
            if child in self.outputs:
                self.outputs[child].add(output)
            else:
                self.outputs[child] = output
        return self

    def is_empty(self) -> bool:
        return not (self.events or self.done or self.outputs or self.kv_events or self.host_pids or self.started)


def dump(obj: Any) -> bytes:
    """Pickle for another process of the same engine (the same trust: vLLM's own worker pipe pickles too)."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Plain tensors as their bytes. torch pickles each as an archive of its storage, which takes ten times as long on
    both sides, and a forward pass waits for that where metadata with tensors orders a synchronous load."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or not _is_plain(obj):
            return NotImplemented
        data = obj.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, obj.dtype, tuple(obj.shape))


def _is_plain(tensor: torch.Tensor) -> bool:
    """A tensor that is its bytes, its type and its shape."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.numel() > 0
    )


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def load(data: bytes) -> Any:
    """The inverse of `dump`. Only for bytes that came from this engine's own processes."""
    return pickle.loads(data)
