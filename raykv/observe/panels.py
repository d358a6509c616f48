"""What the dashboard shows, row by row: a text table like `names`.

In a query `{S}`, `{E}` and `{C}` stand for the dashboard's choice of stores and nodes, of engines, or of the cluster
alone; labels may follow (`{S,medium="disk"}`). `[R]` is Grafana's interval for rates. Names are those of the table of
metrics. Ray adds a label for each process (`WorkerId`), so each life of a store has series of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from raykv.observe.names import RAY_PREFIX

CHOICE: Mapping[str, str] = {
    "S": 'SessionName=~"$session",store=~"$store",node=~"$node"',
    "E": 'SessionName=~"$session",engine=~"$engine"',
    "C": 'SessionName=~"$session"',
}


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL as Grafana has it, and what a line is called."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. `unit` is Grafana's; `stack`: its lines add up."""

    row: str
    title: str
    unit: str
    stack: bool
    queries: tuple[Query, ...]
    about: str = ""


TABLE = """
# Sources
Prompt tokens by source | short | stacked
    sum by (source) (rate(raykv_tokens_total{E}[R])) ; {{source}}
    > Tokens a second. What is `computed` was brought by nobody.
Share of prompt tokens that were not computed | percentunit
    sum by (source) (rate(raykv_tokens_total{E,source!~"computed|not run"}[R]))
    / scalar(sum(rate(raykv_tokens_total{E}[R]))) ; {{source}}
Hit rate of the stores, and its ceiling | percentunit
    sum(rate(raykv_hit_blocks_total{S}[R])) / sum(rate(raykv_asked_blocks_total{S}[R])) ; held
    sum(rate(raykv_reusable_blocks_total{S}[R])) / sum(rate(raykv_asked_blocks_total{S}[R])) ; held now or before
    > What lies between the two was thrown out: a larger tier would have had it.
Hits by tier | percentunit | stacked
    sum by (medium) (rate(raykv_tier_hit_blocks_total{S}[R]))
    / scalar(sum(rate(raykv_tier_hit_blocks_total{S}[R]))) ; {{medium}}
Missed tokens by reason | short | stacked
    sum by (why) (rate(raykv_missed_tokens_total{E}[R])) ; {{why}}
Missed tokens by child | short
    sum by (child) (rate(raykv_missed_tokens_total{E,child!=""}[R])) ; {{child}}
Prefill time that loads saved | s
    sum by (engine) (rate(raykv_saved_by_loads_seconds_total{E}[R])) ; {{engine}}
    > Seconds of computing a second.
Look-up, engine | s
    histogram_quantile(0.5, sum by (le) (rate(raykv_engine_look_up_seconds_bucket{E}[R]))) ; median
    histogram_quantile(0.99, sum by (le) (rate(raykv_engine_look_up_seconds_bucket{E}[R]))) ; p99
Load, engine | s
    histogram_quantile(0.5, sum by (le) (rate(raykv_engine_load_seconds_bucket{E}[R]))) ; median
    histogram_quantile(0.99, sum by (le) (rate(raykv_engine_load_seconds_bucket{E}[R]))) ; p99

# Tiers
Fill | percentunit
    sum by (medium, node) (raykv_tier_used_bytes{S}) / sum by (medium, node) (raykv_tier_capacity_bytes{S})
    ; {{medium}} {{node}}
    > A cache that is full is at work. Whether it is too small say the age at eviction and the ceiling of the hit rate.
Capacity | bytes
    sum by (medium, node) (raykv_tier_capacity_bytes{S}) ; {{medium}} {{node}}
Slots by state | short
    sum by (medium, state) (raykv_tier_slots{S}) ; {{medium}} {{state}}
Bytes by medium and direction | Bps
    sum by (medium, direction) (rate(raykv_tier_bytes_total{S}[R])) ; {{medium}} {{direction}}
    max by (medium, direction) (raykv_tier_best_bytes_per_second{S}) ; {{medium}} {{direction}}, best of one copy
Share of a second that copies take | percentunit
    sum by (medium, direction, why) (rate(raykv_tier_busy_seconds_total{S}[R])) ; {{medium}} {{direction}} {{why}}
    > Above 1 with several threads.
Evictions, and those never read | short
    sum by (medium) (rate(raykv_tier_evicted_blocks_total{S}[R])) ; {{medium}}
    sum by (medium) (rate(raykv_tier_never_read_blocks_total{S}[R])) ; {{medium}}, never read
Age at eviction | s
    histogram_quantile(0.1, sum by (le, medium) (rate(raykv_tier_eviction_age_seconds_bucket{S}[R]))) ; {{medium}} p10
    histogram_quantile(0.5, sum by (le, medium) (rate(raykv_tier_eviction_age_seconds_bucket{S}[R]))) ; {{medium}} p50
Moves between tiers | short
    sum by (direction) (rate(raykv_moved_blocks_total{S}[R])) ; {{direction}}
    sum(rate(raykv_saved_blocks_total{S}[R])) ; saved
    sum(rate(raykv_loaded_blocks_total{S}[R])) ; loaded
Dropped by reason | short | stacked
    sum by (why) (rate(raykv_dropped_blocks_total{S}[R])) ; {{why}}
Queues | short
    sum by (queue) (raykv_queue{S}) ; {{queue}}
Save backlog | bytes
    sum by (node) (raykv_save_backlog_bytes{S}) ; {{node}}
Leases and pins | short
    sum(raykv_leases{S}) ; leases
    sum by (medium) (raykv_tier_slots{S,state="pinned"}) ; pinned slots, {{medium}}
    sum(raykv_lent_blocks{S}) ; slots lent to other nodes
    sum(raykv_operator_pins{S}) ; operators' pins
    sum(raykv_operator_pinned_blocks{S}) ; blocks that operators keep
Look-up, store | s
    histogram_quantile(0.5, sum by (le) (rate(raykv_look_up_seconds_bucket{S}[R]))) ; median
    histogram_quantile(0.99, sum by (le) (rate(raykv_look_up_seconds_bucket{S}[R]))) ; p99
Load, store | s
    histogram_quantile(0.5, sum by (le) (rate(raykv_load_seconds_bucket{S}[R]))) ; median
    histogram_quantile(0.99, sum by (le) (rate(raykv_load_seconds_bucket{S}[R]))) ; p99
Save, store | s
    histogram_quantile(0.5, sum by (le) (rate(raykv_save_seconds_bucket{S}[R]))) ; median
    histogram_quantile(0.99, sum by (le) (rate(raykv_save_seconds_bucket{S}[R]))) ; p99

# Children
Up | short
    min by (engine, child) (raykv_child_up{E}) ; {{engine}} {{child}}
State | short
    sum by (child, state) (raykv_child_state{E}) ; {{child}} {{state}}
Incarnation | short
    max by (engine, child) (raykv_child_incarnation{E}) ; {{engine}} {{child}}
Tokens loaded and saved | short
    sum by (child) (rate(raykv_child_tokens_loaded_total{E}[R])) ; {{child}} loaded
    sum by (child) (rate(raykv_child_tokens_saved_total{E}[R])) ; {{child}} saved
Loads | short
    sum by (child) (rate(raykv_child_loads_total{E}[R])) ; {{child}}
    sum by (child) (rate(raykv_child_load_failures_total{E}[R])) ; {{child}}, failed
Seconds of a load, mean | s
    sum by (child) (rate(raykv_child_load_seconds_total{E}[R])) / sum by (child) (rate(raykv_child_loads_total{E}[R]))
    ; {{child}}
Rates that decide about a load | short
    max by (engine) (raykv_prefill_tokens_per_second{E}) ; {{engine}} computes
    max by (engine, child) (raykv_child_load_tokens_per_second{E}) ; {{engine}} loads from {{child}}
    > Tokens a second. A hit below the line of computing is left.
Hits not used | short
    sum by (child) (rate(raykv_child_hits_left_total{E}[R])) ; {{child}}, below the cost line
    sum by (child) (rate(raykv_child_sync_loads_refused_total{E}[R])) ; {{child}}, synchronous
    sum by (child) (rate(raykv_child_lookups_timed_out_total{E}[R])) ; {{child}}, late
Recovery time, mean | s
    sum by (child) (raykv_child_down_seconds_total{E}) / sum by (child) (raykv_child_recoveries_total{E} > 0)
    ; {{child}}

# P/D
Requests handed over | short
    sum by (engine, child) (rate(raykv_child_sends_total{E}[R])) ; {{engine}} {{child}}
    > Sends that were fetched or given up.
Tokens fetched, by connector and role | short
    sum by (connector, role) (rate(raykv_child_tokens_loaded_total{E}[R])) ; {{connector}} {{role}}
Blocks between nodes' stores | short
    sum by (direction) (rate(raykv_peer_blocks_total{S}[R])) ; {{direction}}
Asking other nodes | s
    histogram_quantile(0.99, sum by (le) (rate(raykv_reach_seconds_bucket{S}[R]))) ; p99
Look-ups at the Directory | short
    sum(rate(raykv_directory_look_ups_total{C}[R])) ; look-ups
    sum(rate(raykv_directory_hits_total{C}[R])) ; that named a holder
Batches at the Directory | short
    sum by (outcome) (rate(raykv_directory_batches_total{C}[R])) ; {{outcome}}

# Nodes
Nodes | short
    sum by (state) (raykv_cluster_nodes{C}) ; {{state}}
Engines | short
    sum by (role, state) (raykv_cluster_engines{C}) ; {{role}} {{state}}
Stores | short
    sum by (state) (raykv_cluster_stores{C}) ; {{state}}
Requests in engines | short
    sum by (engine) (raykv_requests_running{E}) ; {{engine}}
Look-ups by node | short
    sum by (node) (rate(raykv_look_ups_total{S}[R])) ; {{node}}
Keys and stores in the Directory | short
    max(raykv_directory_keys{C}) ; keys
    max(raykv_directory_stores{C}) ; stores
Age of stores | s
    time() - max by (store, node) (raykv_store_started_seconds{S}) ; {{store}} {{node}}
Time to serve again | s
    max by (store, node) (raykv_store_open_seconds{S}) ; {{store}} {{node}}
Restarts of engines | short
    max(raykv_cluster_engine_restarts{C}) ; restarts

# Faults
Faults of stores by cause | short | stacked
    sum by (cause) (increase(raykv_faults_total{S}[R])) ; {{cause}}
Faults of children | short
    sum by (child) (increase(raykv_child_load_failures_total{E}[R])) ; {{child}} failed
    sum by (child) (increase(raykv_child_restarts_total{E}[R])) ; {{child}} restarted
    sum by (child) (increase(raykv_child_reports_dropped_total{E}[R])) ; {{child}} reports dropped
Tiers that serve | short
    min by (medium, node) (raykv_tier_up{S}) ; {{medium}} {{node}}
Restarts of stores | short
    count by (store, node) (last_over_time(raykv_store_started_seconds{S}[1h])) - 1 ; {{store}} {{node}}
    > In the last hour.
Controller's problem | short
    max(raykv_cluster_problem{C}) ; 1: it can't work
"""


def full(query: str) -> str:
    """A query of the table as Prometheus and Grafana take it: choices filled in, names as they are scraped."""
    query = re.sub(r"\{([SEC])(,[^{}]*)?\}", lambda m: "{" + CHOICE[m[1]] + (m[2] or "") + "}", query)
    query = re.sub(r"(?<![\w:])raykv_", f"{RAY_PREFIX}raykv_", query)
    return query.replace("[R]", "[$__rate_interval]")


def _queries(lines: list[str]) -> Iterator[Query]:
    pending = ""
    for line in lines:
        pending = f"{pending} {line.strip()}".strip()
        expr, semicolon, legend = pending.rpartition(" ; ") if not pending.startswith("; ") else ("", "", "")
        if semicolon:
            yield Query(full(expr.strip()), legend.strip())
            pending = ""
    if pending:
        raise ValueError(f"a query without a legend: {pending}")


def _read(text: str) -> Iterator[Panel]:
    row = ""
    for head, body in re.findall(r"^(\S.*)\n((?:    .*\n)*)", text, re.MULTILINE):
        if head.startswith("# "):
            row = head[2:]
            continue
        title, unit, *more = (part.strip() for part in head.split("|"))
        lines = body.splitlines()
        about = " ".join(line.strip()[2:] for line in lines if line.strip().startswith("> "))
        queries = tuple(_queries([line for line in lines if not line.strip().startswith("> ")]))
        yield Panel(row, title, unit, "stacked" in more, queries, about)


PANELS: tuple[Panel, ...] = tuple(_read(TABLE))
