"""The figures of a store, a Directory and a Controller as samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from raykv.cluster_messages import ClusterStatus, EngineRole
from raykv.core.histogram import SECONDS, Histogram
from raykv.directory_messages import DirectoryStatus
from raykv.observe.names import FAULTS
from raykv.observe.samples import Sample

DROPS = ("no_room", "over_quota", "over_backlog", "lost_on_the_way_down", "queue_full")
QUEUES = ("moves_waiting", "moves_running", "saves_open")


def store_samples(store: str, node: str, started: float, metrics: Mapping[str, Any]) -> Iterator[Sample]:
    """`metrics`: the answer of `NodeStore.metrics`; `started`: seconds since the epoch."""
    mine = (store, node)
    counts, gauges = Counter(metrics["counts"]), Counter(metrics["gauges"])
    bad_reads = sum(tier["bad_reads"] for tier in metrics["tiers"].values())
    faults = {**dict.fromkeys(FAULTS, 0), **metrics["faults"], "bad read": bad_reads}
    for medium, tier in metrics["tiers"].items():
        yield from _tier(mine, medium, tier)
    for at, nbytes in metrics["bytes"].items():
        yield Sample("raykv_tier_bytes_total", (*mine, *at), nbytes)
    for at, seconds in metrics["busy_s"].items():
        yield Sample("raykv_tier_busy_seconds_total", (*mine, *at), seconds)
    for at, rate in metrics["best"].items():
        yield Sample("raykv_tier_best_bytes_per_second", (*mine, *at), rate)
    none = Histogram(SECONDS).read()
    for what in ("look_up", "load", "save", "reach"):
        yield Sample(f"raykv_{what}_seconds", mine, metrics["seconds"].get(what, none))
    for name in ("look_ups", "hit_blocks", "saved_blocks", "loaded_blocks"):
        yield Sample(f"raykv_{name}_total", mine, counts[name])
    yield Sample("raykv_asked_blocks_total", mine, metrics["asked_blocks"])
    yield Sample("raykv_reusable_blocks_total", mine, metrics["reusable_blocks"])
    for why in DROPS:
        yield Sample("raykv_dropped_blocks_total", (*mine, why), counts[why])
    for direction in ("demoted", "promoted"):
        yield Sample("raykv_moved_blocks_total", (*mine, direction), counts[f"{direction}_blocks"])
    for direction, name in (("lent", "lent_blocks"), ("read", "peer_read_blocks")):
        yield Sample("raykv_peer_blocks_total", (*mine, direction), counts[name])
    for queue in QUEUES:
        yield Sample("raykv_queue", (*mine, queue), gauges[queue])
    yield Sample("raykv_save_backlog_bytes", mine, gauges["backlog_nbytes"])
    yield Sample("raykv_leases", mine, gauges["leases"])
    yield Sample("raykv_operator_pins", mine, gauges["operator_pins"])
    yield Sample("raykv_operator_pinned_blocks", mine, gauges["operator_pinned_blocks"])
    yield Sample("raykv_lent_blocks", mine, gauges["lent_now"])
    for cause, count in faults.items():
        yield Sample("raykv_faults_total", (*mine, cause), count)
    yield Sample("raykv_store_open_seconds", mine, metrics["opened_s"])
    yield Sample("raykv_store_started_seconds", mine, started)


def _tier(mine: tuple[str, str], medium: str, tier: Mapping[str, Any]) -> Iterator[Sample]:
    at = (*mine, medium)
    slot = tier["slot_nbytes"]
    taken = tier["used"] + tier["writing"] + tier["quarantined"]
    states = {name: tier[name] for name in ("used", "writing", "quarantined", "pinned")}
    yield Sample("raykv_tier_capacity_bytes", at, tier["slots"] * slot)
    yield Sample("raykv_tier_used_bytes", at, tier["used"] * slot)
    for state, count in {**states, "free": tier["slots"] - taken}.items():
        yield Sample("raykv_tier_slots", (*at, state), count)
    yield Sample("raykv_tier_up", at, not tier["off"])
    yield Sample("raykv_tier_hit_blocks_total", at, tier["hits"])
    yield Sample("raykv_tier_evicted_blocks_total", at, tier["evicted"])
    yield Sample("raykv_tier_never_read_blocks_total", at, tier["never_read"])
    yield Sample("raykv_tier_eviction_age_seconds", at, tier["age"])


def directory_samples(status: DirectoryStatus) -> Iterator[Sample]:
    """Of `Directory.status`."""
    yield Sample("raykv_directory_keys", (), status.keys)
    yield Sample("raykv_directory_stores", (), len(status.holders))
    yield Sample("raykv_directory_look_ups_total", (), status.located)
    yield Sample("raykv_directory_hits_total", (), status.hits)
    yield Sample("raykv_directory_batches_total", ("taken",), status.published)
    yield Sample("raykv_directory_batches_total", ("refused",), status.refused)


def controller_samples(status: ClusterStatus) -> Iterator[Sample]:
    """Of `Controller.status`. States that nothing is in any more become 0 where they are written."""
    for state in ("alive", "draining", "drained"):
        yield Sample("raykv_cluster_nodes", (state,), sum(row.state == state for row in status.nodes))
    engines = Counter({(str(role), "ready"): 0 for role in EngineRole})
    engines.update((str(row.role), str(row.state)) for row in status.engines)
    for at, count in engines.items():
        yield Sample("raykv_cluster_engines", at, count)
    stores = Counter(str(row.state) for row in status.stores)
    for state in {"up", "failed", *stores}:
        yield Sample("raykv_cluster_stores", (state,), stores[state])
    yield Sample("raykv_cluster_engine_restarts", (), sum(row.restarts for row in status.engines))
    yield Sample("raykv_cluster_problem", (), bool(status.problem))
