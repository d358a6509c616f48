"""When somebody should look: alert rules for Prometheus, each with what it means and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raykv.observe.panels import full


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires when `value` meets `condition` (such as "> 0") for `lasts`, while `only`, if given, has any result.

    Both are PromQL over all of the cluster, names as in the table of metrics.
    """

    name: str
    value: str
    condition: str
    lasts: str
    severity: str
    summary: str
    means: str
    do: str
    only: str = ""

    @property
    def expr(self) -> str:
        """As Prometheus takes it."""
        expr = full(f"{self.value} {self.condition}")
        return f"({expr}) and on (store, node) ({full(self.only)})" if self.only else expr


_BY = "sum by (store, node)"
_HELD = f"{_BY} (rate(raykv_hit_blocks_total[15m]))"
_ASKED = f"({_BY} (rate(raykv_asked_blocks_total[15m])) > 0)"
_REUSABLE = f"{_BY} (rate(raykv_reusable_blocks_total[15m]))"

ALERTS: tuple[Alert, ...] = (
    Alert(
        "RayKVHitRateLow",
        f"{_HELD} / {_ASKED}",
        "< 0.1",
        "30m",
        "info",
        "Store {{ $labels.store }} of node {{ $labels.node }} holds less than a tenth of the blocks that are asked for",
        "Engines ask for blocks that the store hardly ever has. If the ceiling of the hit rate is low as well, the "
        "prompts have little in common; else see RayKVHitRateBelowCeiling.",
        "Look at the misses by reason. `other fingerprint`: engines that should share don't (another model, block "
        "size, dtype or hash seed). `never stored`: prompts are new, or a router sends them to other nodes.",
    ),
    Alert(
        "RayKVHitRateBelowCeiling",
        f"({_REUSABLE} - {_HELD}) / {_ASKED}",
        "> 0.2",
        "30m",
        "warning",
        "Store {{ $labels.store }} of node {{ $labels.node }} threw out a fifth of the blocks that are asked for",
        "The tiers are too small for what is used again.",
        "Make the largest tier larger, or add a disk or fs tier. Look at the age at eviction to see by how much.",
    ),
    Alert(
        "RayKVTierFull",
        "histogram_quantile(0.5, sum by (store, node, medium, le) (rate(raykv_tier_eviction_age_seconds_bucket[15m])))",
        "< 300",
        "30m",
        "warning",
        "The {{ $labels.medium }} tier of store {{ $labels.store }}, node {{ $labels.node }}, throws out blocks "
        "that are minutes old",
        "The tier is full, which is as it should be, and turns over within minutes, which is not: half of what it "
        "throws out has been there for less than 5 minutes.",
        "Make it larger, put a larger one below it, or let engines whose prompts never return save nothing.",
        only="sum by (store, node) (raykv_tier_used_bytes) / sum by (store, node) (raykv_tier_capacity_bytes) > 0.9",
    ),
    Alert(
        "RayKVSavesDropped",
        "sum by (store, node, why) (rate(raykv_dropped_blocks_total{why!='over_quota'}[10m]))",
        "> 0",
        "15m",
        "warning",
        "Store {{ $labels.store }} of node {{ $labels.node }} drops blocks: {{ $labels.why }}",
        "Blocks that were to be kept are not: they will be computed again. (Those over their tenant's quota aside.)",
        "`no_room`: leases and pins keep the whole tier, make it larger. `over_backlog`: engines save faster than the "
        "node copies memory. `queue_full`, `lost_on_the_way_down`: the slower tier is too slow for what comes down.",
    ),
    Alert(
        "RayKVTierOff",
        "min by (store, node, medium) (raykv_tier_up)",
        "== 0",
        "1m",
        "critical",
        "The {{ $labels.medium }} tier of store {{ $labels.store }}, node {{ $labels.node }}, is switched off",
        "Its medium failed for good, as when a disk is full or gone. The store serves on without it.",
        "The store's log says why. Mend the medium, then end the store (`raykv stop`); an engine starts it again.",
    ),
    Alert(
        "RayKVChildOff",
        "min by (engine, child) (raykv_child_up)",
        "== 0",
        "2m",
        "critical",
        "The child {{ $labels.child }} of engine {{ $labels.engine }} takes no part",
        "Its host died and does not come back, it was switched off after repeated faults, or an operator has paused "
        "it. The engine goes on, and computes what the child would have brought.",
        "The engine's log says why. See to the child's server, disk or network; it is started again by itself.",
    ),
    Alert(
        "RayKVChildRestarts",
        "sum by (engine, child) (increase(raykv_child_restarts_total[15m]))",
        "> 3",
        "0m",
        "warning",
        "Hosts of the child {{ $labels.child }} of engine {{ $labels.engine }} keep dying",
        "Each death costs the loads that were under way, which are computed instead.",
        "Look at the log of the ConnectorHost actor in Ray's dashboard: a crash, or a time limit (`timeout_s`) that is "
        "too short for this child.",
    ),
    Alert(
        "RayKVFaults",
        "sum by (store, node, cause) (increase(raykv_faults_total[10m]))",
        "> 0",
        "0m",
        "warning",
        "Store {{ $labels.store }} of node {{ $labels.node }}: {{ $labels.cause }}",
        "Something failed and was dealt with: no wrong token was served. `bad read` and `bad peer block` are bytes "
        "that failed their check.",
        "One is no cause for alarm. Bad reads that go on mean a failing disk or memory; failed loads and saves mean a "
        "medium or a peer that is too slow or gone: see the store's log.",
    ),
    Alert(
        "RayKVLoadsFail",
        "sum by (engine, child) (increase(raykv_child_load_failures_total[10m]))",
        "> 0",
        "10m",
        "warning",
        "Loads of engine {{ $labels.engine }} from the child {{ $labels.child }} fail",
        "Their requests were computed instead, so they were late and not wrong.",
        "See what the child says in the engine's log, and whether its server or peer is well.",
    ),
    Alert(
        "RayKVLookUpSlow",
        "histogram_quantile(0.99, sum by (store, node, le) (rate(raykv_look_up_seconds_bucket[10m])))",
        "> 0.05",
        "10m",
        "warning",
        "Look-ups in store {{ $labels.store }} of node {{ $labels.node }} take more than 50 ms (p99)",
        "Requests wait for their answer; one that is too late counts as a miss.",
        "The node's CPUs are busy, or an fs tier's folder is slow to open files. Leave the store a core.",
    ),
    Alert(
        "RayKVStoreRestarted",
        "count by (store, node) (last_over_time(raykv_store_started_seconds[15m]))",
        "> 1",
        "0m",
        "warning",
        "Store {{ $labels.store }} of node {{ $labels.node }} was started again",
        "Its process died or was killed. It found its blocks again; what was being saved or loaded was computed.",
        "Look for the out-of-memory killer on the node, and for the dead actor's log in Ray's dashboard.",
    ),
    Alert(
        "RayKVControllerStuck",
        "max(raykv_cluster_problem)",
        "> 0",
        "5m",
        "critical",
        "RayKV's Controller can't do its work",
        "What runs goes on; nothing that fails is started again.",
        "`raykv status` names the problem. Is Ray's head up? `raykv restart-head`.",
    ),
)


def rules() -> dict[str, Any]:
    """The file for Prometheus's `rule_files`, as data."""
    return {
        "groups": [
            {
                "name": "raykv",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expr,
                        "for": alert.lasts,
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.summary, "description": f"{alert.means} {alert.do}"},
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }
