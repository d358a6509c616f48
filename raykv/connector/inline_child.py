"""The worker half of a child that runs in vLLM's worker: `run: inline`.

Its hooks run where vLLM runs them, and what they raise is vLLM's to handle: there is no process whose death
would settle them. Its completions go the same way as a hosted child's.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from raykv.config import ChildConfig
from raykv.connector import vllm_compat
from raykv.connector.metadata import ChildWorkerOutput
from raykv.core.open_loads import OpenLoads
from raykv.core.owed_sends import OwedSends
from raykv.messages import ChildEvent, ChildPlan, EventKind
from raykv.types import Incarnation, Rank, RequestId

NEVER_DUE = float("inf")


class InlineChild:
    """One inline child on one rank. The worker's thread."""

    def __init__(self, config: ChildConfig, rank: Rank, connector: KVConnectorBase_V1, saves: bool = True) -> None:
        self.index, self.rank, self.connector, self.saves = config.index, rank, connector, saves
        self.is_tier = config.is_tier
        self._loads = OpenLoads()
        self._invalid: set[int] = set()
        self._owed = OwedSends(vllm_compat.pulled_by_peers(config))
        self.bound = False

    def bind(self, meta: Any, plan: ChildPlan) -> None:
        self.connector.bind_connector_metadata(meta)
        self._loads.begin(plan.loads, NEVER_DUE)
        self._owed.owe(plan.owed_sends)
        self.bound = True

    def owe(self, plan: ChildPlan) -> None:
        """The child's own plan of this step may not run; what it owes stands."""
        self._owed.owe(plan.owed_sends)

    def clear(self) -> None:
        if self.bound:
            self.connector.clear_connector_metadata()
            self.bound = False

    def load_errors(self) -> set[int]:
        """The block ids that the child has reported as not loaded since the last `collect`."""
        self._invalid |= self.connector.get_block_ids_with_load_errors()
        return self._invalid

    def collect(self, finished: set[str]) -> tuple[list[ChildEvent], ChildWorkerOutput]:
        """The child's completions and statistics, in vLLM's order: errors are asked for after the completions,
        since many children find them there."""
        found = self.connector.get_transfer_results(finished)
        invalid, self._invalid = self.load_errors(), set()
        events = [
            ChildEvent(kind, self.index, self.rank, Incarnation(0), request, attempt)
            for kind, request, attempt in self._loads.end(
                map(RequestId, found.finished_recving), map(RequestId, found.failed_recving), invalid
            )
        ]
        asked, unasked = self._owed.done(map(RequestId, found.finished_sending))
        for kind, requests in ((EventKind.SEND_DONE, asked), (EventKind.SEND_UNASKED, unasked)):
            events += [ChildEvent(kind, self.index, self.rank, Incarnation(0), request) for request in requests]
        stats = self.connector.get_kv_connector_stats()
        output = ChildWorkerOutput(
            worker_meta=self.connector.build_connector_worker_meta(),
            kv_events=self.connector.get_kv_connector_kv_cache_events(),
            stats=None if stats is None or stats.is_empty() else stats,
        )
        return events, output
