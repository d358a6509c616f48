"""TierConnector in EngineCore: what of a prompt the node's store holds, what is loaded from it, what is saved.

It asks and tells the store through a link that never waits, and plans copy jobs for the worker halves. All of it is
keyed by vLLM's own block hashes, so that nothing here needs to know a request's tokens. EngineCore's thread only.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from raykv.connector import tier_hints
from raykv.connector.events import TierEvents
from raykv.connector.tier_jobs import Ended, TierJobs
from raykv.connector.tier_known import Known, KnownRequests
from raykv.connector.tier_lookups import Asker, Outcome, TierLookUps
from raykv.connector.tier_metadata import TierLoad, TierMetadata, TierWorkerMeta
from raykv.connector.tier_saves import TierSaves
from raykv.connector.tier_stats import TierStats, loaded
from raykv.core.idle_pause import IdlePause
from raykv.core.stalls import StallWatch
from raykv.store_messages import GroupLayout, LoadJob, LookedUp, Medium, Settle
from raykv.types import JobId, LeaseId, RequestId, StoreLife

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("raykv")

FIRST_CONTACT_S = 30.0
"""A first store is there in 2 to 4 s; it imports torch."""
NO_LEASE = LookedUp(StoreLife(""), RequestId(""), 0, LeaseId(-1))
"""For a load that was promised and that nothing covers any more: no life of a store has such a lease."""
SOURCES = {
    Medium.HOST: CacheHitSource.HOST,
    Medium.DISK: CacheHitSource.DISK,
    Medium.PEER: CacheHitSource.P2P,
    Medium.FS: CacheHitSource.EXTERNAL_UNSPECIFIED,
}


@dataclass(frozen=True, slots=True)
class _Load:
    request: RequestId
    lease: LeaseId
    media: tuple[Medium, ...]


class TierScheduler:
    """The scheduler half of one engine's TierConnector."""

    def __init__(
        self,
        asker: Asker,
        groups: Sequence[GroupLayout],
        block_size: int,
        num_ranks: int,
        *,
        loads: bool = True,
        saves: bool = True,
        lookup_timeout_s: float = 1.0,
        lease_s: float = 60.0,
        events: TierEvents | None = None,
    ) -> None:
        self._asker, self._groups, self._block_size = asker, tuple(groups), block_size
        self._may_load = loads
        self._look_ups = TierLookUps(asker, lookup_timeout_s, lease_s)
        self._jobs = TierJobs(num_ranks)
        self._stalls = StallWatch()
        self._idle_pause = IdlePause()
        self._is_inner = False
        self._known = KnownRequests()
        self._planned: list[TierLoad] = []
        self._refused: list[TierLoad] = []
        self._loads: dict[JobId, _Load] = {}
        self._counters: Counter[str] = Counter()
        self._saves = TierSaves(self._jobs, self._known, groups, block_size, self._counters) if saves else None
        self._events = events
        if self._saves is not None:
            self._saves.events = events
        self._pool: Any = None

    def is_inner(self) -> None:
        """Another connector of RayKV is around this one, and watches over idle steps and promises that stall."""
        self._is_inner = True

    def bind(self, kv_cache_manager: Any) -> None:
        """The last call before requests come; waits for the store, so that the first of them can hit."""
        self._pool = kv_cache_manager.block_pool
        if self._saves is not None:
            self._saves.bind(kv_cache_manager)
        if not self._asker.wait_tried(FIRST_CONTACT_S):
            logger.warning("the store of this node does not answer yet: until it does, nothing is loaded from it")

    # -- look-ups -------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        request_id = RequestId(request.request_id)
        self._look_ups.drop(request_id)
        self._ask(request_id, self._known.add(request), arrives=True)

    def _ask(self, request_id: RequestId, known: Known, arrives: bool = False) -> bool:
        """Ask for what may be loaded: whole blocks, and not all tokens, since one must be computed to go on from. A
        request that arrives may wait for what a prefill engine is saving for it."""
        request = known.request
        count = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        if not self._may_load or count < 1 or request.skip_reading_prefix_cache:
            return False
        hashes = b"".join(self._known.keys(known, range(count)))
        hand_over = None
        if arrives and not self._known.is_private(known):
            hand_over = tier_hints.read_hint(request.kv_transfer_params, self._block_size, count)
        self._look_ups.ask(request_id, hashes, time.monotonic(), hand_over, known.tenant)
        return True

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        request_id = RequestId(request.request_id)
        known = self._known.get(request_id)
        if known is None or not known.may_load:
            return 0, False
        known.computed = num_computed_tokens
        if known.taken or request.num_preemptions > known.preemptions:
            known.taken, known.preemptions = False, request.num_preemptions
            self._ask(request_id, known)  # its blocks are gone, and what was saved meanwhile can come back
        outcome, held = self._look_ups.poll(request_id, time.monotonic())
        known.why = self._look_ups.why_missed(request_id)
        if outcome is Outcome.STALE and self._ask(request_id, known):
            return None, False
        if outcome is Outcome.PENDING:
            waits_for = self._look_ups.waits_for(request_id) * self._block_size
            if not 0 < waits_for <= num_computed_tokens:
                return None, False
            self._look_ups.drop(request_id)  # what would be handed over is here
            return 0, False
        tokens = held * self._block_size - num_computed_tokens
        if tokens <= 0 or self._stalls.is_withdrawn(request_id):
            return 0, False
        self._stalls.promised(request_id)
        return tokens, True

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Called with 0 when nothing is loaded, and once more with 0 after a load. With more it must end as a load
        does, whatever happened since the promise: vLLM waits for it."""
        request_id = RequestId(request.request_id)
        known = self._known.get(request_id)
        if known is None:
            if num_external_tokens <= 0:
                return
            known = Known(request, b"")
        self._stalls.taken(request_id)
        answer = self._look_ups.take(request_id)
        known.taken |= answer is not None
        if answer is None or answer.lease is None:
            if num_external_tokens <= 0:
                return
            answer = NO_LEASE
        known.saved = max(known.saved, answer.num_blocks)
        assert answer.lease is not None
        if num_external_tokens <= 0:
            self._asker.release([answer.lease])
            return
        self._plan_load(request_id, known, answer, answer.lease, blocks.get_block_ids(), num_external_tokens)

    def _plan_load(
        self, request_id: RequestId, known: Known, answer: LookedUp, lease: LeaseId, ids: Any, tokens: int
    ) -> None:
        first, rest = divmod(known.computed, self._block_size)
        last, more = divmod(known.computed + tokens, self._block_size)
        indices: list[tuple[int, ...]] = []
        targets: list[tuple[int, ...]] = []
        covered = not rest and not more and last <= answer.num_blocks
        for group, layout in enumerate(self._groups):
            real = [i for i in range(first, min(last, len(ids[group]))) if not self._pool.blocks[ids[group][i]].is_null]
            if layout.window_blocks:
                covered &= all(i >= answer.num_blocks - layout.window_blocks for i in real)
            else:
                covered &= len(ids[group]) >= last
            indices.append(tuple(real))
            targets.append(tuple(ids[group][i] for i in real))
        job = LoadJob(self._jobs.begin(), lease, tuple(indices), tuple(targets))
        (self._planned if covered else self._refused).append(TierLoad(request_id, answer.store, job))
        known.media, known.peer = answer.media[first:last], answer.peer
        self._loads[job.job] = _Load(request_id, lease, known.media)
        self._counters["loads"] += 1

    def hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """From where the tokens of the load that was just planned come."""
        known = self._known.get(RequestId(request.request_id))
        found: Counter[CacheHitSource] = Counter()
        for medium in known.media if known is not None else ():
            found[SOURCES[medium]] += self._block_size
        if found.total() != num_external_tokens:
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens} if num_external_tokens else {}
        return dict(found)

    # -- a step ---------------------------------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> TierMetadata:
        self._look_ups.drain(time.monotonic())
        idle = not output.total_num_scheduled_tokens and not self._is_inner
        awaited = bool(self._loads or self._look_ups.pending)
        pause = self._idle_pause.before_step(idle and bool(self._jobs or awaited), awaited, time.monotonic())
        if pause:
            time.sleep(pause)
        self._stalls.step_planned(idle=idle and not self._jobs)
        save = self._saves.plan(output) if self._saves is not None else None
        meta = TierMetadata(tuple(self._planned), tuple(self._refused), save)
        self._planned, self._refused = [], []
        return meta

    # -- reports --------------------------------------------------------------------------------------------

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        meta = output.kv_connector_worker_meta
        commits: list[JobId] = []
        aborts: list[JobId] = []
        releases: list[LeaseId] = []
        for (_, rank), done in meta.done.items() if isinstance(meta, TierWorkerMeta) else ():
            ended = self._jobs.report(rank, done)
            if ended is None:
                continue
            if ended.job in self._loads:
                releases.append(self._load_ended(ended))
            else:
                assert self._saves is not None
                self._saves.ended(ended, self._asker.store)
                (commits if ended.ok else aborts).append(ended.job)
        if commits or aborts or releases:
            self._asker.settle(Settle(tuple(commits), tuple(aborts), tuple(releases)))
        self._look_ups.drain(time.monotonic())

    def _load_ended(self, ended: Ended) -> LeaseId:
        load = self._loads.pop(ended.job)
        self._counters["load_ms"] += round(1000 * max((report.seconds for report in ended.reports), default=0.0))
        if ended.ok:
            for medium in load.media:
                self._counters[loaded(medium)] += self._block_size
            return load.lease
        self._counters["loads_failed"] += 1
        known = self._known.get(load.request)
        if known is not None:  # what failed once is not hit again, and what the request computes instead is saved
            known.may_load, known.saved = False, 0
        return load.lease

    # -- the end of a request, and questions of the engine --------------------------------------------------

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """vLLM may free its blocks at once: the pins of its saves hold them. Returns what an engine that goes on with
        this request is told."""
        request_id = RequestId(request.request_id)
        hint = self._hint(request, self._known.get(request_id))
        self._look_ups.drop(request_id)
        self._stalls.taken(request_id)
        self._known.forget(request_id)
        return hint

    def _hint(self, request: Request, known: Known | None) -> dict[str, Any] | None:
        """None where nobody asked, or nobody else can find it."""
        if known is None or not known.saved or self._known.is_private(known) or not self._asker.store:
            return None
        if not tier_hints.is_wanted(request.kv_transfer_params):
            return None
        return tier_hints.hint(self._asker.store, known.saved * self._block_size)

    def has_pending_block_frees(self) -> bool:
        return self._jobs.frees_soon()

    def has_pending_push_work(self) -> bool:
        """Whether an engine without requests must keep stepping: something is pinned or not settled."""
        return bool(self._jobs)

    def reset_cache(self) -> bool:
        """What is in the store is nobody's any more (new weights, most likely): from here on all has other keys, and
        requests that have begun with what was before take no part."""
        for request_id in self._look_ups.requests():
            self._look_ups.drop(request_id)
        self._known.reset()
        return True

    def take_stats(self) -> TierStats | None:
        """What has happened since the last call; None if nothing."""
        counters = Counter(self._counters)
        self._counters.clear()
        look_ups = self._look_ups
        counters += Counter(
            look_ups=look_ups.asks,
            look_ups_missed=look_ups.misses,
            look_ups_timed_out=look_ups.timed_out,
            look_up_ms=round(1000 * look_ups.waited_s),
        )
        look_ups.asks = look_ups.misses = look_ups.timed_out = 0
        look_ups.waited_s = 0.0
        return TierStats(data=dict(counters)) if counters else None

    def take_events(self) -> list[Any]:
        """vLLM's KV events of what was saved since the last call; empty where vLLM publishes none."""
        return self._events.take() if self._events is not None else []

    def shutdown(self) -> None:
        self._asker.close()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless jobs and pins are consistent."""
        self._jobs.check_integrity()

    @property
    def quiet(self) -> bool:
        """Nothing pinned, and nothing under way."""
        return not self._jobs
