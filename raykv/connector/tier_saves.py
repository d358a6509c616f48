"""What a TierConnector saves: the blocks that a step completes, pinned until every rank has read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raykv.admin_messages import NO_TENANT
from raykv.connector.events import TierEvents
from raykv.connector.tier_jobs import Ended, TierJobs
from raykv.connector.tier_known import KnownRequests
from raykv.store_messages import GroupLayout, SaveJob
from raykv.types import JobId

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class TierSaves:
    """The saves of one engine. EngineCore's thread only."""

    def __init__(
        self,
        jobs: TierJobs,
        known: KnownRequests,
        groups: Sequence[GroupLayout],
        block_size: int,
        counters: Counter[str],
    ) -> None:
        """`counters`: the connector's, counted up here."""
        self._jobs, self._known, self._counters = jobs, known, counters
        self._num_groups, self._block_size = len(groups), block_size
        self._tokens: dict[JobId, int] = {}
        self.events: TierEvents | None = None
        """Where saves are told of; None: vLLM publishes no KV events."""
        self._manager: Any = None
        self._pool: Any = None

    def bind(self, kv_cache_manager: Any) -> None:
        self._manager, self._pool = kv_cache_manager, kv_cache_manager.block_pool

    def plan(self, output: SchedulerOutput) -> SaveJob | None:
        """The blocks that this step's tokens complete, pinned. Only those of accepted tokens have a hash; a block may
        be hit locally by several requests of the step, and is saved once."""
        hashes: list[list[bytes]] = [[] for _ in range(self._num_groups)]
        targets: list[list[int]] = [[] for _ in range(self._num_groups)]
        tenants: list[list[tuple[bytes, int]]] = [[] for _ in range(self._num_groups)]
        seen: set[tuple[int, bytes]] = set()
        positions = 0
        for name, scheduled in output.num_scheduled_tokens.items():
            known = self._known.get(name)
            if known is None:
                continue
            request = known.request
            # vLLM counts the step's own tokens as computed only after it has asked for this plan.
            full = min((request.num_computed_tokens + scheduled) // self._block_size, len(request.block_hashes))
            if full <= known.saved:
                continue
            new = range(known.saved, full)
            keys = self._known.keys(known, new)
            for group, ids in enumerate(self._manager.get_block_ids(name)):
                places = []
                for place, key, block_id in zip(new, keys, ids[known.saved : full], strict=False):
                    # A null block is one that the window has left, or that was never loaded.
                    if not self._pool.blocks[block_id].is_null and (group, key) not in seen:
                        seen.add((group, key))
                        hashes[group].append(key)
                        targets[group].append(block_id)
                        places.append(place)
                if places:
                    tenants[group].append((known.tenant, len(places)))
                if self.events is not None and places and not self._known.is_private(known):
                    self.events.planned(request, group, places)
            positions += len(new)
            known.saved = full
            known.given += len(new)
        blocks = [self._pool.blocks[block_id] for ids in targets for block_id in ids]
        if not blocks:
            return None
        self._pool.touch(blocks)
        job = self._jobs.begin(blocks)
        self._tokens[job] = positions * self._block_size
        if self.events is not None:
            self.events.begun(job)
        somebodys = any(tag != NO_TENANT for runs in tenants for tag, _ in runs)
        return SaveJob(
            job,
            tuple(b"".join(keys) for keys in hashes),
            tuple(tuple(ids) for ids in targets),
            tuple(map(tuple, tenants)) if somebodys else (),
        )

    def ended(self, ended: Ended, store: str = "") -> None:
        """Every rank has read the job's blocks, or never will. `store`: the name of its actor."""
        self._pool.free_blocks(ended.unpin)
        tokens = self._tokens.pop(ended.job)
        skipped = [one.skipped for one in ended.reports]
        self._counters["blocks_skipped"] += sum(skipped)
        if self.events is not None:
            self.events.ended(ended.job, ended.ok and not any(skipped), store)
        if ended.ok:
            self._counters["tokens_saved"] += max(0, tokens - max(skipped) // self._num_groups * self._block_size)
        else:
            self._counters["saves_failed"] += 1
