"""The bench of `fake_worker` with a TierConnector in it: alone, or as a child of RayKV's MultiConnector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raykv.connector import fingerprint, tier_setup
from tests.support.fake_control import Control, controls
from tests.support.fake_store_link import FakeStore
from tests.support.fake_worker import Bench

TIERS = [{"medium": "host", "capacity": "1MiB"}]


def tier_child(role: str = "kv_both", raykv: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
    """The config of a TierConnector; `extra` goes into its extra config."""
    more = {} if raykv is None else {"raykv": raykv}
    return {
        "kv_connector": "TierConnector",
        "kv_connector_module_path": "raykv.connector",
        "kv_role": role,
        "kv_connector_extra_config": {"tiers": TIERS, **extra, **more},
    }


class TierBench(Bench):
    """`others`: fake children beside the TierConnector, which is then a child itself, the last or the first one."""

    def __init__(
        self,
        others: Sequence[dict[str, Any]] | None = None,
        *,
        first: bool = False,
        tier: dict[str, Any] | None = None,
        store: Any = None,
        transfer: dict[str, Any] | None = None,
        **bench: Any,
    ) -> None:
        self.alone = others is None
        self.store = FakeStore() if store is None else store
        child = tier or tier_child()
        super().__init__(others or (), transfer=transfer, **bench)
        if self.alone:
            policy = self.transfer["kv_load_failure_policy"]
            self.transfer.clear()
            self.transfer.update({**child, "engine_id": "e", "kv_load_failure_policy": policy})
        else:
            child["kv_connector_extra_config"].setdefault("raykv", {})["name"] = "tier"
            where = 0 if first else len(self.names)
            self.names.insert(where, "tier")
            self.transfer["kv_connector_extra_config"]["connectors"].insert(where, child)

    def _start(self) -> None:
        controls["tier"] = Control("tier")
        self._monkeypatch.setattr(tier_setup, "new_asker", self.store.new_asker)
        self._monkeypatch.setattr(tier_setup, "new_link", self.store.new_link)
        self._monkeypatch.setattr(fingerprint, "weights_identity", lambda *_: "test")
        super()._start()
        if self.alone:
            self.tier = self.half
        else:
            inline = next(child for child in self.half.children if child.name == "tier")
            self.tier = inline._connector._scheduler_half

    def _watch_links(self) -> None:
        if self.alone:
            self.links = {}
        else:
            super()._watch_links()

    def _watch_pool(self) -> None:
        super()._watch_pool()
        give = self.pool.get_new_blocks

        def get_new_blocks(count: int) -> list[Any]:
            blocks = give(count)
            touching = self.store.touching(block.block_id for block in blocks)
            if touching:
                self.violations.append(f"step {self.steps}: blocks were handed out that {touching} may touch")
            return blocks

        self.pool.get_new_blocks = get_new_blocks

    def tier_total(self, counter: str) -> int:
        """The sum of a counter of the TierConnector so far."""
        if self.alone:
            return sum(stats.get(counter, 0) for stats in self.stats)
        return sum(s["tier"]["own"].get(counter, 0) for s in self.stats if "tier" in s and s["tier"]["own"] is not None)

    def forget_locally(self) -> None:
        """Empty vLLM's own prefix cache; all must be done."""
        self.run()
        assert self.scheduler.reset_prefix_cache(), "blocks are still pinned"

    def check(self) -> None:
        self.store.hold_answers = self.store.hold_jobs = False
        self.run()
        assert not self.tier._jobs, "jobs are under way"
        self.tier.check_integrity()
        assert not self.connector.has_pending_push_work() and not self.connector.has_pending_block_frees()
        assert len(self.tier._look_ups) == 0 and not self.tier._known
        if self.alone:
            assert not self.violations, "\n".join(self.violations)
            assert self.used_blocks == 0, f"{self.used_blocks} blocks were lost; pinned: {self.tier._jobs.pinned()}"
            self.names = []
            self.half._pins = self.tier._jobs
        super().check()
        self.tier._look_ups.drain(0.0)
        self.store.check_empty()


@dataclass(frozen=True)
class Benches:
    """Makes benches of one kind."""

    alone: bool
    ranks: int
    overlap: bool

    def __call__(self, **options: Any) -> TierBench:
        return TierBench(None if self.alone else [], ranks=self.ranks, async_scheduling=self.overlap, **options)

    def __str__(self) -> str:
        place = "alone" if self.alone else "in-multi"
        return f"{place}-{self.ranks}-rank{'-async' if self.overlap else ''}"


BENCHES = [Benches(True, 1, False), Benches(True, 2, True), Benches(False, 1, True), Benches(False, 2, False)]
"""Each pair of: alone or as the child of a MultiConnector, ranks, whether steps overlap."""
