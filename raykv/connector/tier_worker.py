"""TierConnector in vLLM's worker: hands copy jobs to the link of the node's store, and reports their ends.

No hook calls Ray or waits, but for `register_kv_caches`. The worker's thread only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from raykv.actors.processes import start_time
from raykv.connector.tier_metadata import TierHandshake, TierLoad, TierMetadata, TierWorkerMeta
from raykv.connector.worker_setup import KVCacheExport
from raykv.errors import StoreError
from raykv.store_messages import Attached, GroupLayout, JobDone, LoadJob, RankAttach, SaveJob
from raykv.types import EngineId, JobId, Rank, RequestId, StoreLife

logger = logging.getLogger("raykv")

START_TIMEOUT_S = 300.0
"""Until the store has taken this rank in: the first engine of a node waits while its pools are reserved."""


class Link(Protocol):
    """What of `actors.store_link.StoreWorkerLink` is used here. Only `start` and `close` wait."""

    @property
    def life(self) -> StoreLife | None: ...

    def start(self, timeout_s: float) -> Attached: ...

    def save(self, jobs: Sequence[SaveJob]) -> None: ...

    def load(self, jobs: Sequence[LoadJob]) -> None: ...

    def take_done(self) -> list[JobDone]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class WorkerFacts:
    """What a rank is to its store. `writes` False: another rank has the same bytes and saves them."""

    engine: EngineId
    rank: Rank
    num_ranks: int
    num_blocks: int
    groups: tuple[GroupLayout, ...]
    writes: bool = True
    model: str = ""


class TierWorker:
    """The worker half of one engine's TierConnector on one rank."""

    def __init__(
        self,
        facts: WorkerFacts,
        fingerprint: Callable[[Mapping[str, Any]], bytes],
        open_link: Callable[[RankAttach], Link],
        explain: Callable[[], str] = str,
    ) -> None:
        """`fingerprint` takes the KV caches; `open_link` makes the link that attaches with a record. `explain` says
        what is behind the fingerprint, once there is one."""
        self._facts = facts
        self._fingerprint, self._open_link, self._explain = fingerprint, open_link, explain
        self._export: KVCacheExport | None = None
        self._link: Link | None = None
        self._loads: tuple[TierLoad, ...] = ()
        self._refused: tuple[TierLoad, ...] = ()
        self._save: SaveJob | None = None
        self._loading: dict[JobId, RequestId] = {}
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._done: list[JobDone] = []
        self.handshake: TierHandshake | None = None
        """Set when the store has taken this rank in."""

    # -- set-up ---------------------------------------------------------------------------------------------

    @staticmethod
    def pool_context() -> AbstractContextManager[Any] | None:
        return KVCacheExport.pool_context()

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Share the memory with the store of this node and join it; blocks. Raises StoreError."""
        facts = self._facts
        missing = [name for group in facts.groups for name in group.layers if name not in kv_caches]
        if missing:
            raise StoreError(
                f"vLLM registered no KV cache for {', '.join(missing[:3])}, so a block of it has no whole content. "
                "Run this model without a TierConnector."
            )
        fingerprint = self._fingerprint(kv_caches)
        self._export = KVCacheExport(kv_caches)
        attach = RankAttach(
            engine=facts.engine,
            rank=facts.rank,
            num_ranks=facts.num_ranks,
            pid=os.getpid(),
            started=start_time(os.getpid()) or 0,
            fingerprint=fingerprint,
            num_blocks=facts.num_blocks,
            groups=facts.groups,
            caches=self._export.handles,
            writes=facts.writes,
            facts=self._explain(),
            model=facts.model,
        )
        self._link = self._open_link(attach)
        attached = self._link.start(START_TIMEOUT_S)
        self.handshake = TierHandshake(facts.rank, fingerprint.hex(), facts.writes)
        logger.info(
            "rank %d joined the store of this node (pid %d), KV identity %s",
            facts.rank,
            attached.pid,
            fingerprint.hex(),
        )

    # -- hooks of a step, in vLLM's order but for wait_for_save, which speculative decoding calls last ------------

    def bind(self, meta: TierMetadata) -> None:
        self._drop_save("its step was not completed")
        self._loads, self._refused, self._save = meta.loads, meta.refused, meta.save

    def start_load_kv(self) -> None:
        """Hands the step's loads over, once."""
        assert self._link is not None
        loads, self._loads = self._loads, ()
        refused, self._refused = list(self._refused), ()
        life = self._link.life
        fit = []
        for load in loads:
            self._loading[load.job.job] = load.request
            if load.life == life:
                fit.append(load.job)
            else:
                refused.append(load)
        for load in refused:
            self._end_load(load.request, _failed(load.job, "no lease of the store covers it"))
        if fit:
            self._link.load(fit)

    def wait_for_save(self) -> None:
        """The forward pass was launched: behind it the step's blocks may be read."""
        job, self._save = self._save, None
        if job is None:
            return
        if not self._facts.writes:
            self._done.append(JobDone(job.job, ok=True))
            return
        assert self._link is not None and self._export is not None
        self._export.forward_done()
        self._link.save([job])

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Loads that have ended. A failed one is named by its request, never by block ids: vLLM takes those of a
        model with one KV group only, and looks them up among whoever has the blocks by then."""
        for done in self._link.take_done() if self._link is not None else ():
            request = self._loading.get(done.job)
            if request is None:
                self._done.append(done)
            else:
                self._end_load(request, done)
        results = KVConnectorTransferResults(finished_recving=self._received, failed_recving=self._failed)
        self._received, self._failed = set(), set()
        return results

    def _end_load(self, request: RequestId, done: JobDone) -> None:
        self._loading.pop(done.job, None)
        self._received.add(request)
        if not done.ok:
            logger.warning("a load of request %s failed on rank %d: %s", request, self._facts.rank, done.error)
            self._failed.add(request)
        self._done.append(done)

    def take_meta(self) -> TierWorkerMeta | None:
        """The jobs that have ended since the last call."""
        if not self._done:
            return None
        done, self._done = self._done, []
        return TierWorkerMeta({(one.job, self._facts.rank): one for one in done})

    def clear(self) -> None:
        """The step is over. Its save was not asked for when another child's synchronous load failed in it."""
        self._drop_save("the step's forward pass can't be trusted")
        self._loads = self._refused = ()

    def _drop_save(self, why: str) -> None:
        job, self._save = self._save, None
        if job is not None:
            self._done.append(_failed(job, why))

    def shutdown(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._export is not None:
            self._export.close()
            self._export = None


def _failed(job: SaveJob | LoadJob, why: str) -> JobDone:
    bad = tuple(block for ids in job.block_ids for block in ids)
    return JobDone(job.job, ok=False, bad_blocks=bad, error=why)
