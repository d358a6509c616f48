"""One worker's KV cache in shared memory, as an engine would attach it to a store."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import cloudpickle
import torch

from raykv.actors.processes import start_time
from raykv.kvcache.blocks import LayerLayout, read_blocks
from raykv.kvcache.fence import CpuFence
from raykv.kvcache.handles import CacheHandles
from raykv.kvcache.share import export_kv_caches
from raykv.store_messages import GroupLayout, LoadJob, LookUp, RankAttach, SaveJob
from raykv.types import EngineId, JobId, LeaseId, Rank, RequestId

E = EngineId("engine")


def digest(text: str) -> bytes:
    """A block hash."""
    return hashlib.sha256(text.encode()).digest()


def hashes(prompt: str, count: int) -> list[bytes]:
    """The hashes of a prompt's first blocks; prompts of different names share none."""
    return [digest(f"{prompt}/{i}") for i in range(count)]


def look_up(prompt: str, count: int, request: str = "r") -> LookUp:
    return LookUp(RequestId(request), b"".join(hashes(prompt, count)))


class KVRank:
    """`blocks` of random bytes in `layers` per KV group; the layers of group 1 have half the heads."""

    def __init__(
        self,
        engine: EngineId = E,
        rank: int = 0,
        num_ranks: int = 1,
        *,
        blocks: int = 24,
        windows: Sequence[int] = (0,),
        layers: int = 2,
        width: int = 64,
        model: str = "model",
        writes: bool = True,
        pid: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(hash((str(engine), rank)) % 2**31)
        self.tensors = {
            f"g{group}.l{layer}": torch.randn(blocks, 4 // (group + 1), 8, width, generator=generator)
            for group in range(len(windows))
            for layer in range(layers)
        }
        self.shared = export_kv_caches(self.tensors)
        pid = pid or os.getpid()
        groups = tuple(
            GroupLayout(tuple(f"g{group}.l{layer}" for layer in range(layers)), window)
            for group, window in enumerate(windows)
        )
        fingerprint = digest(f"{model}, rank {rank if writes else 0}")[:16]
        self.attach = RankAttach(
            engine=engine,
            rank=Rank(rank),
            num_ranks=num_ranks,
            pid=pid,
            started=start_time(pid) or 0,
            fingerprint=fingerprint,
            num_blocks=blocks,
            groups=groups,
            caches=cloudpickle.dumps(CacheHandles(self.shared.handle, CpuFence().handle)),
            writes=writes,
        )
        self._layouts = [[LayerLayout.of(self.tensors[name], blocks) for name in group.layers] for group in groups]

    def block(self, block_id: int, group: int = 0) -> bytes:
        """All bytes of a block."""
        parts = []
        for layout in self._layouts[group]:
            out = torch.empty((1, layout.block_nbytes), dtype=torch.uint8)
            read_blocks(layout.planes, torch.tensor([block_id]), out)
            parts.append(out.numpy().tobytes())
        return b"".join(parts)

    def blocks(self, block_ids: Sequence[int], group: int = 0) -> list[bytes]:
        return [self.block(block_id, group) for block_id in block_ids]

    def wipe(self, block_ids: Sequence[int]) -> None:
        for tensor in self.tensors.values():
            tensor[list(block_ids)] = 0

    def close(self) -> None:
        self.shared.close()


def save_job(job: int, prompt: str, *block_ids: Sequence[int]) -> SaveJob:
    """The first blocks of a prompt, by group, from these blocks."""
    return SaveJob(
        JobId(job),
        tuple(b"".join(hashes(prompt, len(ids))) for ids in block_ids),
        tuple(tuple(ids) for ids in block_ids),
    )


def load_job(job: int, lease: LeaseId | None, *block_ids: Sequence[int]) -> LoadJob:
    """The first blocks of a leased prefix, by group, into these blocks."""
    assert lease is not None
    return LoadJob(
        JobId(job), lease, tuple(tuple(range(len(ids))) for ids in block_ids), tuple(tuple(ids) for ids in block_ids)
    )
