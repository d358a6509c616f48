"""Every metric of RayKV's, in one table: what is registered, drawn, alerted on and documented is read from here.

Names are as Ray is given them; on a scrape Ray puts `ray_` before each. Labels come from small fixed sets (media,
reasons, children, stores, nodes, engines), never from requests; `observe.samples.Bounded` holds them to a number.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

RAY_PREFIX = "ray_"
VLLM_PREFIX = "vllm:raykv_"


class Kind(enum.StrEnum):
    """COUNTER: a total that only grows within a life. HISTOGRAM: NAME_bucket by `le`, NAME_sum and NAME_count."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class By(enum.StrEnum):
    """Whose process reports it."""

    ENGINE = "engine"
    STORE = "store"
    DIRECTORY = "directory"
    CONTROLLER = "controller"


COMMON: Mapping[By, tuple[str, ...]] = {
    By.ENGINE: ("engine", "role", "node"),
    By.STORE: ("store", "node"),
    By.DIRECTORY: (),
    By.CONTROLLER: (),
}
"""The labels that all of a reporter's metrics have."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One name. `unit` is for people; `own_labels` come behind those of COMMON."""

    name: str
    kind: Kind
    unit: str
    help: str
    by: By
    own_labels: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """All of them, in the order of a Sample's values."""
        return (*COMMON[self.by], *self.own_labels)

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which Prometheus has it."""
        name = RAY_PREFIX + self.name
        return (f"{name}_bucket", f"{name}_sum", f"{name}_count") if self.kind is Kind.HISTOGRAM else (name,)


CHILD_COUNTERS: Mapping[str, str] = {
    "tokens_loaded": "Prompt tokens whose KV came from this child.",
    "tokens_saved": "Prompt tokens whose save to this child was completed, for connectors that say what they save.",
    "loads": "Asynchronous and synchronous loads from this child that were started.",
    "load_failures": "Loads from this child that failed and were recomputed, and hooks in which it raised.",
    "sends": "Requests whose blocks this child had promised to another engine, and that were fetched or given up.",
    "restarts": "Hosts of this child that died or had to be killed.",
    "recoveries": "Times that this child was down and came back.",
    "lookups_timed_out": "Look-ups that this child did not answer in time.",
    "reports_dropped": "Completions that were duplicates, late, or never asked for.",
    "sync_loads_refused": "Synchronous hits not used because the engine could not take their failure.",
    "hits_left": "Hits not used because computing their tokens takes less time than loading them.",
}
"""What an engine counts of each child: `raykv_child_NAME_total` through Ray, `vllm:raykv_NAME` in vLLM's /metrics."""

CHILD_TIMES: Mapping[str, str] = {
    "load_ms": "Seconds of asynchronous loads from this child that ended well, from the plan to the last rank's end.",
    "down_ms": "Seconds that this child was down before it came back.",
}
"""The same of times: counted in whole milliseconds, told in seconds (`seconds_name`). Sums, to be divided by `loads`
and `recoveries`."""

CHILD_GAUGES: Mapping[str, str] = {
    "up": "1 while this child takes part.",
    "host_pid": "Process id of rank 0's host; 0 while there is none.",
    "incarnation": "How often this child's hosts were started anew.",
}
"""`vllm:raykv_child_NAME`; through Ray from the engine's view."""

WHOLE_COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "prompt_tokens": ("Prompt tokens of requests that have ended, by where their KV came from.", ("source",)),
    "missed_tokens": ("Prompt tokens that a child did not bring, by reason.", ("raykv_child", "why")),
}
"""What vLLM's /metrics has of the engine and not of one child: `vllm:raykv_NAME`, with these labels."""

TIER_COUNTERS: Mapping[str, str] = {
    "tokens_saved": "Tokens whose KV the store of this node took.",
    "blocks_skipped": "Blocks that found no room in the store, on all ranks.",
    "look_ups": "Questions for a request's prefix.",
    "look_ups_missed": "Look-ups that found nothing.",
    "look_ups_timed_out": "Look-ups that were not answered in time; they count as misses.",
    "loads": "Loads that were started.",
    "loads_failed": "Loads that failed; their requests were recomputed.",
    "saves_failed": "Steps whose save failed or was dropped on some rank.",
}
"""What a TierConnector counts in the engine: `vllm:raykv_tier_NAME`; the store has figures of its own."""

TIER_TIMES: Mapping[str, str] = {
    "look_up_ms": "Seconds from questions for a prefix to their answers, added up.",
    "load_ms": "Seconds that loads took in the store, of the slowest rank each, added up.",
}
"""`vllm:raykv_tier_NAME` in seconds."""

ENGINE = """
tokens_total | counter | tokens | source
    Prompt tokens of requests that have ended, by source: `gpu` (vLLM's own prefix cache), a medium, a hosted child's
    name, `computed`, `not run` (the request ended before). Their sum is all prompt tokens.
missed_tokens_total | counter | tokens | child why
    Prompt tokens that a child did not bring, by reason. Several children may miss the same token.
engine_look_up_seconds | histogram | s |
    From a request's arrival to the last child's answer.
engine_load_seconds | histogram | s |
    A request's loads, from the plan to the last one's end.
saved_by_loads_seconds_total | counter | s |
    What the tokens that were loaded would have taken to compute, less what it took to load them.
requests_running | gauge | requests |
    Requests that have arrived and not ended.
prefill_tokens_per_second | gauge | tokens/s |
    The measured rate of computing a prompt; 0: not known yet.
child_load_tokens_per_second | gauge | tokens/s | child
    The measured rate of loading from a child.
child_up | gauge | 0 or 1 | child connector
    1 while the child takes part.
child_state | gauge | 0 or 1 | child state
    1 for the state that the child is in, 0 for the others.
child_incarnation | gauge | count | child connector
    How often the child's hosts were started anew.
"""

STORE = """
tier_capacity_bytes | gauge | bytes | medium
    What the tier's slots hold.
tier_used_bytes | gauge | bytes | medium
    Slots that hold a block.
tier_slots | gauge | slots | medium state
    Slots by state: `used`, `writing`, `quarantined` (failed a check, out of use), `free`. `pinned` are those of the
    used ones that may not be evicted now.
tier_up | gauge | 0 or 1 | medium
    1 while the tier serves, 0 once its medium has failed.
tier_hit_blocks_total | counter | slots | medium
    Slots that look-ups found, by the tier they lie in.
tier_evicted_blocks_total | counter | slots | medium
    Blocks thrown out of the tier.
tier_never_read_blocks_total | counter | slots | medium
    Of those, the ones that no engine of the node had ever read.
tier_eviction_age_seconds | histogram | s | medium
    How long a block had been in the tier when it was thrown out.
tier_bytes_total | counter | bytes | medium direction why
    Bytes read from the medium or written to it (`direction`), for an `engine` or a `move` to another tier (`why`).
tier_busy_seconds_total | counter | s | medium direction why
    How long those copies took, added up over all threads.
tier_best_bytes_per_second | gauge | bytes/s | medium direction
    The measured limit: the best rate of one copy of 256 KiB or more since the store's start. Absent: there was none.
look_up_seconds | histogram | s |
    A call that looks up one prompt or several, inside the store.
load_seconds | histogram | s |
    One rank's part of a load, inside the store.
save_seconds | histogram | s |
    One rank's part of a save, inside the store, with the wait for the forward pass.
reach_seconds | histogram | s |
    The part of a look-up that asks other nodes' stores.
look_ups_total | counter | count |
    Look-ups of engines.
asked_blocks_total | counter | blocks |
    Blocks that look-ups asked for.
hit_blocks_total | counter | blocks |
    Of those, the ones that were held.
reusable_blocks_total | counter | blocks |
    Of those, the ones that were held or had been since the store's start: the ceiling of the hit rate, had nothing been
    thrown out.
saved_blocks_total | counter | slots |
    Blocks that were saved and committed.
loaded_blocks_total | counter | slots |
    Blocks that were loaded.
dropped_blocks_total | counter | slots | why
    Blocks that were to be kept and are not: `no_room` (all slots are pinned or being written), `over_quota` (of their
    tenant), `over_backlog` (saves come faster than memory is copied), `lost_on_the_way_down` (evicted before a slower
    tier had them), `queue_full` (the slower tier does not keep up).
moved_blocks_total | counter | slots | direction
    Blocks copied between tiers: `demoted` or `promoted`.
peer_blocks_total | counter | slots | direction
    Blocks `lent` to other nodes' stores, and `read` from them.
queue | gauge | count | queue
    What waits or runs: `moves_waiting`, `moves_running`, `saves_open`.
save_backlog_bytes | gauge | bytes |
    What saves have under way.
leases | gauge | count |
    Leases of look-ups that are not over.
operator_pins | gauge | count |
    Pins of operators.
operator_pinned_blocks | gauge | blocks |
    Blocks that pins of operators keep, each counted once for each pin.
lent_blocks | gauge | slots |
    Slots that leases of other nodes' stores keep now.
faults_total | counter | count | cause
    What went wrong and was dealt with, by cause.
store_open_seconds | gauge | s |
    How long this life of the store took to find its blocks again and to serve.
store_started_seconds | gauge | s |
    When this life of the store began, since the epoch. A change is a restart.
"""

DIRECTORY = """
directory_keys | gauge | keys |
    Block keys in its index.
directory_stores | gauge | count |
    Stores that publish to it.
directory_look_ups_total | counter | count |
    Questions for a holder.
directory_hits_total | counter | count |
    Of those, the ones that named a holder.
directory_batches_total | counter | count | outcome
    Batches that stores published: `taken`, or `refused` (a new stream is asked for).
"""

CONTROLLER = """
cluster_nodes | gauge | count | state
    Nodes by state: `alive`, `draining`, `drained`.
cluster_engines | gauge | count | role state
    Engines by role and state.
cluster_stores | gauge | count | state
    Stores by state.
cluster_engine_restarts | gauge | count |
    How often the engines that are wanted now were started again.
cluster_problem | gauge | 0 or 1 |
    1 while the Controller can't do its work, as while the head is away.
"""

FAULTS = ("load failed", "save failed", "move failed", "tier off", "bad read", "bad peer block")
"""The causes that a store knows. All are reported from the start, at 0: a first fault must be a rise."""


def seconds_name(counter: str) -> str:
    """What a counter of milliseconds is called where it is told in seconds."""
    return counter.removesuffix("_ms") + "_seconds"


def _read(by: By, text: str) -> Iterator[Metric]:
    for row, about in re.findall(r"^(\S.*)\n((?:    .+\n)+)", text, re.MULTILINE):
        name, kind, unit, labels = (part.strip() for part in row.split("|"))
        yield Metric(f"raykv_{name}", Kind(kind), unit, " ".join(about.split()), by, tuple(labels.split()))


def _children() -> Iterator[Metric]:
    labels = ("child", "connector")
    for name, about in CHILD_COUNTERS.items():
        unit = "tokens" if "tokens" in name else "count"
        yield Metric(f"raykv_child_{name}_total", Kind.COUNTER, unit, about, By.ENGINE, labels)
    for name, about in CHILD_TIMES.items():
        yield Metric(f"raykv_child_{seconds_name(name)}_total", Kind.COUNTER, "s", about, By.ENGINE, labels)


METRICS: tuple[Metric, ...] = (
    *_read(By.ENGINE, ENGINE),
    *_children(),
    *_read(By.STORE, STORE),
    *_read(By.DIRECTORY, DIRECTORY),
    *_read(By.CONTROLLER, CONTROLLER),
)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
