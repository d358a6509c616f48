"""What a test holds of a fake child: its script, what it was asked, and which blocks its hosts may touch.

Both halves of a fake child find their `Control` by name, so a test can direct them while they run. `Holds` is the
truth that the storm checks RayKV against: a block is held from the plan that names it until the host of every rank
has done with it, or is dead.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


class ProcessDeath(BaseException):
    """Raised in the thread of a fake host that was killed: nothing after it runs."""


class Scripted(RuntimeError):
    """A hook raised because the script says so."""


local = threading.local()
"""`local.host` is the fake host whose thread this is; unset in vLLM's own threads."""


class Holds:
    """Who may still touch which block: (child, rank, engine id, job) to block ids. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, int, str, Any], frozenset[int]] = {}
        self._dead: set[tuple[str, int, str]] = set()

    def take(self, child: str, ranks: int, engine_id: str, job: Any, blocks: Iterable[int]) -> None:
        with self._lock:
            for rank in range(ranks):
                if (child, rank, engine_id) not in self._dead:
                    self._held[(child, rank, engine_id, job)] = frozenset(blocks) - {0}

    def drop(self, child: str, rank: int, engine_id: str, job: Any) -> None:
        with self._lock:
            self._held.pop((child, rank, engine_id, job), None)

    def died(self, child: str, rank: int, engine_id: str) -> None:
        with self._lock:
            self._dead.add((child, rank, engine_id))
            for key in [k for k in self._held if k[:3] == (child, rank, engine_id)]:
                del self._held[key]

    def of(self, blocks: Iterable[int]) -> list[tuple[str, int, str, Any]]:
        """The holders of any of these blocks."""
        wanted = set(blocks)
        with self._lock:
            return [key for key, held in self._held.items() if not held.isdisjoint(wanted)]


holds = Holds()


@dataclass(repr=False)
class Control:
    """The script of one child. Times and counts are in polls and calls, never in seconds."""

    name: str
    asynchronous: bool = True
    hits: dict[str, int] = field(default_factory=dict)
    """By request: tokens of its prompt that the child has. `hit` is the answer for the others."""
    hit: int = 0
    search: bool = False
    """Look hits up in `store` instead."""
    pending: int = 0
    """How often a look-up answers "not yet" first; -1 for ever."""
    auto: bool = True
    """Loads end at the next poll; else when a test says so."""
    failing: str = ""
    """How loads fail: 'request' (named as failed) or 'blocks' (its block ids). Empty: they do not."""
    failing_ranks: tuple[int, ...] | None = None
    saves: bool = False
    """Saves each full prompt block in the step that computes it."""
    late: bool = False
    """Reads what it saves some polls after the step, at the latest when the request is preempted or has ended."""
    owes: bool = False
    """Says at a request's end that it still reads the blocks, until a test (or `auto_send`) says it has."""
    auto_send: bool = False
    returns: dict[str, Any] | None = None
    """What `request_finished` returns as `kv_transfer_params`."""
    pd: bool = False
    """Behaves as a P/D consumer: a request with `do_remote_prefill` hits up to its prompt's last token."""
    handshake: bool = False
    stats: bool = False
    events: str = ""
    """'worker' or 'scheduler': where it emits a KV event for each stored block."""
    raises: Counter[str] = field(default_factory=Counter)
    """How often each hook still raises."""
    hangs: set[str] = field(default_factory=set)
    """Hooks that never return."""

    store: dict[tuple[int, str, int], Any] = field(default_factory=dict)
    """(rank, layer, fingerprint of the prefix that a block ends) to the block's slots."""
    calls: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    """Look-ups by request, "not yet" included."""
    answered: Counter[str] = field(default_factory=Counter)
    allocated: list[tuple[str, int]] = field(default_factory=list)
    """(request, external tokens) of each `update_state_after_alloc`."""
    told: list[str] = field(default_factory=list)
    """Requests for which the worker half of rank 0 only told the other side that nothing is fetched."""
    emitted: int = 0
    """Statistics given away by worker halves so far."""
    evicted: list[int] = field(default_factory=list)
    """Fingerprints whose removal is to be published, by each rank or by the scheduler half."""
    written: list[tuple[str, int]] = field(default_factory=list)
    """(request, block id) of each block that a load wrote, on rank 0."""
    wrong: list[tuple[Any, int]] = field(default_factory=list)
    """(job, block id) of each read that found other bytes than the request's."""
    seen_params: list[dict[str, Any] | None] = field(default_factory=list)
    heard: list[Any] = field(default_factory=list)
    """Copies of what `update_connector_output` got, in order."""
    handshakes: dict[Any, Any] = field(default_factory=dict)
    configs: list[Any] = field(default_factory=list)
    """The KVTransferConfig of each object that was made."""
    to_report: list[tuple[str, str, tuple[int, ...] | None]] = field(default_factory=list)
    """Reports that a test orders: ('recv' or 'send' or 'recv_failed', request, ranks left to report)."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    hung: threading.Event = field(default_factory=threading.Event)

    def enter(self, hook: str) -> None:
        """At the start of each hook."""
        host = getattr(local, "host", None)
        if host is not None and host.dead.is_set():
            raise ProcessDeath
        self.calls[hook] += 1
        if hook in self.hangs and host is not None:
            self.hung.set()
            host.dead.wait()
            raise ProcessDeath
        with self.lock:
            if self.raises[hook] > 0:
                self.raises[hook] -= 1
                raise Scripted(f"{self.name} raises in {hook}")

    def report(self, kind: str, request: str, ranks: Sequence[int] | None = None, times: int = 1) -> None:
        """Have the worker halves of `ranks` (None: all) report this at their next poll."""
        with self.lock:
            self.to_report += [(kind, request, None if ranks is None else tuple(ranks))] * times

    def take_reports(self, rank: int, ranks: int) -> list[tuple[str, str]]:
        """The reports that this rank owes now."""
        mine, left = [], []
        with self.lock:
            for kind, request, todo in self.to_report:
                waiting = list(range(ranks)) if todo is None else list(todo)
                if rank in waiting:
                    mine.append((kind, request))
                    waiting.remove(rank)
                if waiting:
                    left.append((kind, request, tuple(waiting)))
            self.to_report = left
        return mine


controls: dict[str, Control] = {}


def control_of(name: str, script: dict[str, Any]) -> Control:
    """The test's control of this name, or in another process a new one from the config's script."""
    if name not in controls:
        script = dict(script)
        raises = Counter(script.pop("raises", {}))
        controls[name] = Control(name, raises=raises, **script)
    return controls[name]
