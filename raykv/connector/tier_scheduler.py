"""TierConnector in EngineCore: what of a prompt the node's store holds, what is loaded from it, what is saved.

It asks and tells the store through a link that never waits, and plans copy jobs for the worker halves. All of it is
keyed by vLLM's own block hashes, so that nothing here needs to know a request's tokens. EngineCore's thread only.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from raykv.connector.tier_jobs import Ended, TierJobs
from raykv.connector.tier_lookups import Asker, Outcome, TierLookUps
from raykv.connector.tier_metadata import TierLoad, TierMetadata, TierWorkerMeta
from raykv.connector.tier_stats import TierStats, loaded
from raykv.core.idle_pause import IdlePause
from raykv.core.stalls import StallWatch
from raykv.store_messages import HASH_NBYTES, GroupLayout, LoadJob, LookedUp, Medium, SaveJob, Settle
from raykv.types import JobId, LeaseId, RequestId

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("raykv")

SALT_NBYTES = 16
FIRST_CONTACT_S = 30.0
"""A first store is there in 2 to 4 s; it imports torch."""
SOURCES = {
    Medium.HOST: CacheHitSource.HOST,
    Medium.DISK: CacheHitSource.DISK,
    Medium.PEER: CacheHitSource.P2P,
    Medium.FS: CacheHitSource.EXTERNAL_UNSPECIFIED,
}


@dataclass(slots=True, eq=False)
class _Known:
    """A request, from its arrival to its end. Its first `saved` blocks are in the store or on their way to it.

    `taken`: its look-up has ended with an allocation. If vLLM asks once more, the request has lost its blocks.
    """

    request: Request
    salt: bytes
    computed: int = 0
    saved: int = 0
    may_load: bool = True
    taken: bool = False
    preemptions: int = 0
    media: tuple[Medium, ...] = ()


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
    ) -> None:
        self._asker, self._groups, self._block_size = asker, tuple(groups), block_size
        self._may_load, self._may_save = loads, saves
        self._look_ups = TierLookUps(asker, lookup_timeout_s, lease_s)
        self._jobs = TierJobs(num_ranks)
        self._stalls = StallWatch()
        self._idle_pause = IdlePause()
        self._known: dict[RequestId, _Known] = {}
        self._planned: list[TierLoad] = []
        self._refused: list[TierLoad] = []
        self._loads: dict[JobId, _Load] = {}
        self._save_tokens: dict[JobId, int] = {}
        self._counters: Counter[str] = Counter()
        self._salt = b""
        # An adapter is hashed by its name and path, not by its content, which may change while a store lives on.
        self._adapter_salt = os.urandom(SALT_NBYTES)
        self._manager: Any = None
        self._pool: Any = None

    def bind(self, kv_cache_manager: Any) -> None:
        """The last call before requests come; waits for the store, so that the first of them can hit."""
        self._manager, self._pool = kv_cache_manager, kv_cache_manager.block_pool
        if not self._asker.wait_tried(FIRST_CONTACT_S):
            logger.warning("the store of this node does not answer yet: until it does, nothing is loaded from it")

    # -- look-ups -------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        request_id = RequestId(request.request_id)
        self._look_ups.drop(request_id)
        self._known[request_id] = known = _Known(request, self._adapter_salt if request.lora_request else b"")
        self._ask(request_id, known)

    def _ask(self, request_id: RequestId, known: _Known) -> bool:
        """Ask for what may be loaded: whole blocks, and not all tokens, since one must be computed to go on from."""
        request = known.request
        count = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        if not self._may_load or count < 1 or request.skip_reading_prefix_cache:
            return False
        hashes = b"".join(self._keys(known, range(count)))
        self._look_ups.ask(request_id, hashes, time.monotonic())
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
        if outcome is Outcome.STALE and self._ask(request_id, known):
            return None, False
        if outcome is Outcome.PENDING:
            return None, False
        tokens = held * self._block_size - num_computed_tokens
        if tokens <= 0 or self._stalls.is_withdrawn(request_id):
            return 0, False
        self._stalls.promised(request_id)
        return tokens, True

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Called with 0 when nothing is loaded, and once more with 0 after a load."""
        request_id = RequestId(request.request_id)
        known = self._known.get(request_id)
        if known is None:
            return
        self._stalls.taken(request_id)
        answer = self._look_ups.take(request_id)
        known.taken |= answer is not None
        if answer is None or answer.lease is None:
            return
        known.saved = max(known.saved, answer.num_blocks)
        if num_external_tokens <= 0:
            self._asker.release([answer.lease])
            return
        self._plan_load(request_id, known, answer, answer.lease, blocks.get_block_ids(), num_external_tokens)

    def _plan_load(
        self, request_id: RequestId, known: _Known, answer: LookedUp, lease: LeaseId, ids: Any, tokens: int
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
        known.media = answer.media[first:last]
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
        idle = not output.total_num_scheduled_tokens
        awaited = bool(self._loads or self._look_ups.pending)
        pause = self._idle_pause.before_step(idle and bool(self._jobs or awaited), awaited, time.monotonic())
        if pause:
            time.sleep(pause)
        self._stalls.step_planned(idle=idle and not self._jobs)
        save = self._plan_save(output) if self._may_save else None
        meta = TierMetadata(tuple(self._planned), tuple(self._refused), save)
        self._planned, self._refused = [], []
        return meta

    def _plan_save(self, output: SchedulerOutput) -> SaveJob | None:
        """The blocks that this step's tokens complete. Only those of accepted tokens have a hash; a block may be hit
        locally by several requests of the step, and is saved once."""
        hashes: list[list[bytes]] = [[] for _ in self._groups]
        targets: list[list[int]] = [[] for _ in self._groups]
        seen: set[tuple[int, bytes]] = set()
        positions = 0
        for name, scheduled in output.num_scheduled_tokens.items():
            known = self._known.get(RequestId(name))
            if known is None:
                continue
            request = known.request
            # vLLM counts the step's own tokens as computed only after it has asked for this plan.
            full = min((request.num_computed_tokens + scheduled) // self._block_size, len(request.block_hashes))
            if full <= known.saved:
                continue
            new = range(known.saved, full)
            keys = self._keys(known, new)
            for group, ids in enumerate(self._manager.get_block_ids(name)):
                for key, block_id in zip(keys, ids[known.saved : full], strict=False):
                    # A null block is one that the window has left, or that was never loaded.
                    if not self._pool.blocks[block_id].is_null and (group, key) not in seen:
                        seen.add((group, key))
                        hashes[group].append(key)
                        targets[group].append(block_id)
            positions += len(new)
            known.saved = full
        blocks = [self._pool.blocks[block_id] for ids in targets for block_id in ids]
        if not blocks:
            return None
        self._pool.touch(blocks)
        job = self._jobs.begin(blocks)
        self._save_tokens[job] = positions * self._block_size
        return SaveJob(job, tuple(b"".join(keys) for keys in hashes), tuple(tuple(ids) for ids in targets))

    def _keys(self, known: _Known, places: Iterable[int]) -> list[bytes]:
        """What the store knows these blocks of a request by: vLLM's hashes, HASH_NBYTES each."""
        salt = self._salt + known.salt
        return [block_key(known.request.block_hashes[i], salt) for i in places]

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
                self._save_ended(ended)
                (commits if ended.ok else aborts).append(ended.job)
        if commits or aborts or releases:
            self._asker.settle(Settle(tuple(commits), tuple(aborts), tuple(releases)))
        self._look_ups.drain(time.monotonic())

    def _load_ended(self, ended: Ended) -> LeaseId:
        load = self._loads.pop(ended.job)
        if ended.ok:
            for medium in load.media:
                self._counters[loaded(medium)] += self._block_size
            return load.lease
        self._counters["loads_failed"] += 1
        known = self._known.get(load.request)
        if known is not None:  # what failed once is not hit again, and what the request computes instead is saved
            known.may_load, known.saved = False, 0
        return load.lease

    def _save_ended(self, ended: Ended) -> None:
        self._pool.free_blocks(ended.unpin)
        tokens = self._save_tokens.pop(ended.job)
        skipped = [one.skipped for one in ended.reports]
        self._counters["blocks_skipped"] += sum(skipped)
        if ended.ok:
            self._counters["tokens_saved"] += max(0, tokens - max(skipped) // len(self._groups) * self._block_size)
        else:
            self._counters["saves_failed"] += 1

    # -- the end of a request, and questions of the engine --------------------------------------------------

    def request_finished(self, request: Request) -> None:
        """vLLM may free its blocks at once: the pins of its saves hold them."""
        request_id = RequestId(request.request_id)
        self._look_ups.drop(request_id)
        self._stalls.taken(request_id)
        self._known.pop(request_id, None)

    def has_pending_block_frees(self) -> bool:
        return self._jobs.frees_soon()

    def has_pending_push_work(self) -> bool:
        """Whether an engine without requests must keep stepping: something is pinned or not settled."""
        return bool(self._jobs)

    def reset_cache(self) -> bool:
        """What is in the store is nobody's any more (new weights, most likely): from here on all has other keys, and
        requests that have begun with what was before take no part."""
        self._salt = os.urandom(SALT_NBYTES)
        for request_id in self._look_ups.requests():
            self._look_ups.drop(request_id)
        self._known.clear()
        return True

    def take_stats(self) -> TierStats | None:
        """What has happened since the last call; None if nothing."""
        counters, self._counters = self._counters, Counter()
        look_ups = self._look_ups
        counters += Counter(
            look_ups=look_ups.asks, look_ups_missed=look_ups.misses, look_ups_timed_out=look_ups.timed_out
        )
        look_ups.asks = look_ups.misses = look_ups.timed_out = 0
        return TierStats(data=dict(counters)) if counters else None

    def shutdown(self) -> None:
        self._asker.close()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless jobs and pins are consistent."""
        self._jobs.check_integrity()

    @property
    def quiet(self) -> bool:
        """Nothing pinned, and nothing under way."""
        return not self._jobs


def block_key(block_hash: bytes, salt: bytes = b"") -> bytes:
    """vLLM's hash of a block in HASH_NBYTES. A salt keeps what must not be shared apart."""
    raw = bytes(block_hash)
    if salt or len(raw) > HASH_NBYTES:
        return hashlib.blake2b(raw, digest_size=HASH_NBYTES, key=salt).digest()
    return raw.ljust(HASH_NBYTES, b"\0")
