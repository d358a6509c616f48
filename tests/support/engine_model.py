"""An engine with hosted children, reduced to blocks and completions, around the real Ledger and PinTable.

`Engine` stands for vLLM's scheduler with RayKV's scheduler half (the same order of calls on ledger and pins as
`connector.scheduler_half`), `Host` for a child's link and process on one rank. A host is as bad as the rules
allow: from the moment a step is planned until the host has completed it, it may read every block of every request
that the child knows and that was scheduled before, and write the blocks of its loads. What breaks the safety
rule raises `Violation`.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from raykv.core.ledger import Ledger
from raykv.core.pins import PinTable
from raykv.messages import NO_ATTEMPT, ChildEvent, EventKind
from raykv.types import Attempt, Incarnation, Rank, RequestId, StepId
from tests.support.block_pool import Block, BlockPool

FIRST, NEVER = Incarnation(0), StepId(-1)
FULL, WINDOWED = 0, 1
PREFIX, TAIL = 2, 1
"""Blocks at the start of a request: those that others of its family share, and its own behind them."""


class Violation(AssertionError):
    """What RayKV must never do."""


def violated(engine: Engine, what: str) -> Violation:
    engine.broken = True
    return Violation(what)


class State(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"
    READY = "ready"  # loaded, holds its blocks, was not scheduled yet
    RUNNING = "running"
    PREEMPTED = "preempted"
    ENDED = "ended"


@dataclass(eq=False)
class Request:
    id: RequestId
    family: int
    wishes: list[int]
    hands: int = 1
    """How many of its wishes a load takes at once."""
    state: State = State.WAITING
    blocks: dict[int, list[Block]] = field(default_factory=lambda: {FULL: [], WINDOWED: []})
    targets: list[Block] = field(default_factory=list)
    readable: set[int] = field(default_factory=set)  # by its children, from the next plan on

    def all_blocks(self) -> list[Block]:
        return [*self.blocks[FULL], *self.blocks[WINDOWED]]


@dataclass(eq=False)
class Load:
    """What one child loads of a load on one rank."""

    request: Request
    child: int
    attempt: Attempt
    blocks: frozenset[int]


@dataclass(eq=False)
class Record:
    step: StepId
    incarnation: Incarnation
    reads: frozenset[int]
    loads: list[Load]


@dataclass(eq=False)
class Host:
    """A child's link and process on one rank."""

    child: int
    rank: Rank
    incarnation: Incarnation = FIRST
    alive: bool = True
    queue: deque[Record] = field(default_factory=deque)
    loads: list[Load] = field(default_factory=list)
    sends: dict[RequestId, frozenset[int]] = field(default_factory=dict)
    events: list[ChildEvent] = field(default_factory=list)
    done: StepId | None = None
    history: list[ChildEvent] = field(default_factory=list)

    def reads(self) -> set[int]:
        """Blocks that the process may read, now or later."""
        found: set[int] = set()
        if self.alive:
            found.update(*(r.reads for r in self.queue if r.incarnation == self.incarnation), *self.sends.values())
        return found

    def writes(self) -> set[int]:
        if not self.alive:
            return set()
        waiting = [load for r in self.queue if r.incarnation == self.incarnation for load in r.loads]
        return {block for load in (*waiting, *self.loads) for block in load.blocks}

    # -- what can happen to it ------------------------------------------------------------------------------

    def run_next(self, truth: Callable[[Load, Rank, bool], None]) -> None:
        """Complete the next record, or refuse it as a link does."""
        record = self.queue.popleft()
        if self.alive and record.incarnation == self.incarnation:
            self.loads += record.loads
        else:
            for load in record.loads:
                truth(load, self.rank, False)
                self.emit(EventKind.RECV_FAILED, load.request.id, load.attempt, record.incarnation)
        self.done = record.step

    def end_load(self, load: Load, well: bool, truth: Callable[[Load, Rank, bool], None]) -> None:
        self.loads.remove(load)
        truth(load, self.rank, well)
        self.emit(EventKind.RECV_DONE if well else EventKind.RECV_FAILED, load.request.id, load.attempt)

    def end_send(self, request: RequestId) -> None:
        del self.sends[request]
        self.emit(EventKind.SEND_DONE, request)

    def die(self, truth: Callable[[Load, Rank, bool], None]) -> None:
        """The process is gone and the link has confirmed it."""
        self.alive = False
        for load in self.loads:
            truth(load, self.rank, False)
            self.emit(EventKind.RECV_FAILED, load.request.id, load.attempt)
        self.emit(EventKind.DOWN)
        self.loads, self.sends = [], {}

    def come_back(self) -> None:
        self.incarnation = Incarnation(self.incarnation + 1)
        self.alive = True

    def emit(
        self,
        kind: EventKind,
        request: RequestId | None = None,
        attempt: Attempt = NO_ATTEMPT,
        incarnation: Incarnation | None = None,
    ) -> None:
        incarnation = self.incarnation if incarnation is None else incarnation
        event = ChildEvent(kind, self.child, self.rank, incarnation, request, attempt)
        self.events.append(event)
        self.history.append(event)


@dataclass(eq=False)
class Child:
    """What the scheduler half keeps of a child."""

    incarnations: tuple[Incarnation, ...]
    done: dict[Rank, StepId]
    up: bool = True
    planned: StepId = NEVER
    known: set[RequestId] = field(default_factory=set)
    loads: list[tuple[Request, Attempt, frozenset[int]]] = field(default_factory=list)

    def mark_down(self) -> None:
        self.up = False
        self.known.clear()


class Engine:
    """vLLM's scheduler and RayKV's scheduler half."""

    def __init__(self, num_children: int, num_ranks: int, num_blocks: int) -> None:
        self.ranks = [Rank(r) for r in range(num_ranks)]
        self.children = [Child((FIRST,) * num_ranks, dict.fromkeys(self.ranks, NEVER)) for _ in range(num_children)]
        self.hosts = [Host(c, r) for c in range(num_children) for r in self.ranks]
        self.ledger = Ledger(num_ranks)
        self.pins = PinTable()
        self.pool = BlockPool(num_blocks, self._check_new_owner)
        self.requests: list[Request] = []  # all that have not ended, in order of arrival
        self.held: dict[RequestId, Request] = {}  # those that vLLM holds for a load
        self.in_flight: deque[set[RequestId]] = deque()  # of planned steps: what their outputs will echo
        self.truth: dict[tuple[RequestId, Attempt], dict[tuple[int, Rank], bool]] = {}
        self.loaders: dict[tuple[RequestId, Attempt], list[int]] = {}
        self.failed: set[tuple[RequestId, int]] = set()
        self.steps = 0
        self.broken = False
        self._step = NEVER
        self._echo: set[RequestId] = set()
        self._early_events: list[ChildEvent] = []
        self._count = 0

    def host(self, child: int, rank: int) -> Host:
        return self.hosts[child * len(self.ranks) + rank]

    def serves(self, host: Host, request: Request) -> bool:
        """Whether this process knows the request."""
        child = self.children[host.child]
        return host.alive and host.incarnation == child.incarnations[host.rank] and request.id in child.known

    def in_state(self, *states: State) -> list[Request]:
        return [r for r in self.requests if r.state in states]

    # -- the safety rule ------------------------------------------------------------------------------------

    def _check_new_owner(self, block: Block) -> None:
        for host in self.hosts:
            if block.block_id in host.reads() | host.writes():
                raise violated(self, f"block {block.block_id} got a new owner while {host} may touch it")

    def _check_hit(self, block: Block) -> None:
        if any(block.block_id in host.writes() for host in self.hosts):
            raise violated(self, f"block {block.block_id} was hit while a load may still write it")

    def check(self) -> None:
        """Nobody may touch a free block, which could get an owner now; books and reference counts agree."""
        free = {b.block_id for b in self.pool.blocks if not b.ref_cnt}
        for host in self.hosts:
            if not free.isdisjoint(host.reads() | host.writes()):
                raise violated(self, f"blocks {free} are free while {host} may touch some of them")
        self.ledger.check_integrity()
        self.pins.check_integrity()
        owned = self.pins.pinned()
        for request in (*self.requests, *(r for r in self.held.values() if r.state is State.ENDED)):
            owned.update(b.block_id for b in request.all_blocks())
        counts = {b.block_id: b.ref_cnt for b in self.pool.blocks if b.ref_cnt}
        if counts != {block: n for block, n in owned.items() if n}:
            raise violated(self, f"reference counts {counts} differ from the owners' {owned}")
        if self.pins.frees_soon() and not any(
            b.ref_cnt and b.ref_cnt == self.pins.pinned()[b.block_id] for b in self.pool.blocks
        ):
            raise violated(self, "no block is held by pins alone, yet one is said to come free")

    def saw(self, load: Load, rank: Rank, well: bool) -> None:
        self.truth[(load.request.id, load.attempt)][(load.child, rank)] = well

    # -- requests -------------------------------------------------------------------------------------------

    def arrive(self, family: int, wishes: list[int], hands: int = 1) -> None:
        request = Request(RequestId(f"r{self._count}"), family, wishes, hands)
        self._count += 1
        self.requests.append(request)
        self.ledger.request_arrived(request.id)
        for child in self.children:
            if child.up:
                child.known.add(request.id)

    def end(self, request: Request, delays: Iterable[int]) -> None:
        """Finish or abort, at any moment; the children in `delays` still read its blocks."""
        owed = [c for c in delays if self.children[c].up and request.id in self.children[c].known]
        blocks = frozenset(b.block_id for b in request.all_blocks())
        for c in owed:
            for rank in self.ranks:
                host = self.host(c, rank)
                if self.serves(host, request):
                    host.sends[request.id] = blocks
        for c in owed:
            self.ledger.open_send(request.id, c, self.children[c].incarnations, 0.0)
        self.ledger.request_ended(request.id)
        if owed and not self.pins.is_open(request.id):
            self._pin(request, request.blocks)
        self.pins.close(request.id, self._fence(), owed)
        if request.id not in self.held:
            self._vllm_frees(request)
        request.state = State.ENDED
        self.requests.remove(request)

    def _vllm_frees(self, request: Request) -> None:
        for group in request.blocks:
            self.pool.free_blocks(reversed(request.blocks[group]))
            request.blocks[group] = []

    # -- a step ---------------------------------------------------------------------------------------------

    def step(self, grow: int, preempt: int, window: int, idle: Iterable[int]) -> None:
        """Schedule and plan one step, as `schedule` and `build_connector_meta` do."""
        for request in list(reversed(self.in_state(State.RUNNING)))[:preempt]:
            self._vllm_frees(request)
            request.state = State.PREEMPTED
        preempted = {request.id for request in self.in_state(State.PREEMPTED)}
        all_blocks, more_blocks, left = [], [], []
        for request in self.in_state(State.RUNNING):
            if self.pool.num_free < 2 * grow:
                continue
            new = {group: self.pool.new(grow) for group in (FULL, WINDOWED)}
            for group in new:
                request.blocks[group] += new[group]
            more_blocks.append((request, new))
            self._cache(request)
        for request in self.in_state(State.WAITING, State.READY, State.PREEMPTED):
            if (not preempt or request.id not in preempted) and self._admit(request):
                all_blocks.append(request)
        for request in self.in_state(State.RUNNING):  # behind the window: vLLM takes the block away
            for _ in range(min(window, len(request.blocks[WINDOWED]) - 1)):
                block = request.blocks[WINDOWED].pop(0)
                self.pool.free_blocks([block])
                left.append((request, block.block_id))
        for request in self.in_state(State.RUNNING):
            request.readable |= {b.block_id for b in request.all_blocks()}
        self._plan(all_blocks, more_blocks, set(idle))
        for request in self.in_state(State.PREEMPTED):
            request.readable.clear()
        for request, block_id in left:
            request.readable.discard(block_id)

    def _admit(self, request: Request) -> bool:
        """Whether it is scheduled now; a request that starts a load is not."""
        if request.state is not State.READY:
            hits: list[Block] = []
            for i in range(PREFIX):
                block = self.pool.cached((request.family, i))
                if block is None:
                    break
                self._check_hit(block)
                hits.append(block)
            needs = 1 + PREFIX + TAIL - len(hits) + sum(1 for b in hits if b.ref_cnt == 0)
            if self.pool.num_free < needs:
                return False
            self.pool.touch(hits)
            request.blocks[FULL] = [*hits, *self.pool.new(PREFIX + TAIL - len(hits))]
            request.blocks[WINDOWED] = self.pool.new(1)
            request.targets = request.blocks[FULL][len(hits) :]
            if self._begin_load(request):
                return False
        request.state = State.RUNNING
        self._cache(request)
        return True

    def _begin_load(self, request: Request) -> bool:
        loaders = []
        for c in request.wishes:
            child = self.children[c]
            may = self.ledger.may_load(request.id, c)
            if may == ((request.id, c) in self.failed):
                raise violated(self, f"{request.id} may load from {c}: {may}, though it failed there: {not may}")
            if may and child.up and request.id in child.known:
                loaders.append(c)
        loaders = loaders[: min(request.hands, len(request.targets))]
        if not loaders:
            return False
        attempt = self.ledger.open_load(request.id, *loaders)
        self.truth[(request.id, attempt)] = {}
        self.loaders[(request.id, attempt)] = loaders
        rest = request.targets
        for left, c in zip(range(len(loaders) - 1, -1, -1), loaders, strict=True):
            mine, rest = (rest[:1], rest[1:]) if left else (rest, [])
            self.children[c].loads.append((request, attempt, frozenset(block.block_id for block in mine)))
        request.state = State.LOADING
        self.held[request.id] = request
        return True

    def _cache(self, request: Request) -> None:
        for i, block in enumerate(request.blocks[FULL][:PREFIX]):
            self.pool.cache(block, (request.family, i))

    def _plan(self, full: list[Request], more: list[tuple[Request, dict[int, list[Block]]]], idle: set[int]) -> None:
        self._step = StepId(self._step + 1)
        self.steps += 1
        for request in full:
            self.pins.close(request.id, self._fence())
            self._pin(request, request.blocks)
        for request, new in more:
            if self.pins.is_open(request.id):
                self._pin(request, new)
        for c, child in enumerate(self.children):
            if child.loads or (child.up and c not in idle):
                readable = [request.readable for request in self.requests if request.id in child.known]
                self._plan_child(c, child, frozenset().union(*readable))
        for request in self.in_state(State.PREEMPTED):
            self.pins.close(request.id, self._fence())
        for request in self.in_state(State.RUNNING):
            self.pins.trim(request.id, WINDOWED, self._fence())
        self.in_flight.append(self._echo)
        self._echo = set()

    def _plan_child(self, c: int, child: Child, readable: frozenset[int]) -> None:
        loads, child.loads = child.loads, []
        for rank in self.ranks:
            host, incarnation = self.host(c, rank), child.incarnations[rank]
            mine = [Load(request, c, attempt, blocks) for request, attempt, blocks in loads]
            if child.up:
                host.queue.append(Record(self._step, incarnation, readable, mine))
            else:  # no metadata: nothing runs
                for load in mine:
                    self.saw(load, rank, False)
                    host.emit(EventKind.RECV_FAILED, load.request.id, load.attempt, incarnation)
        if child.up:
            child.planned = self._step

    def _fence(self) -> dict[int, StepId]:
        return {c: child.planned for c, child in enumerate(self.children)}

    def _pin(self, request: Request, blocks: dict[int, list[Block]]) -> None:
        for group, new in blocks.items():
            self.pool.touch(self.pins.grow(request.id, group, new))

    # -- reports --------------------------------------------------------------------------------------------

    def finish_step(self, hosts: Iterable[Host], order: Callable[[list[ChildEvent]], list[ChildEvent]]) -> None:
        """The oldest step's output arrives, with what these hosts have to report; the events in any order."""
        echoed = self.in_flight.popleft()
        heard = self.ledger.echoed(echoed)
        events, self._early_events = self._early_events, []
        done: dict[tuple[int, Rank], StepId] = {}
        for host in hosts:
            events += host.events
            if host.done is not None:
                done[(host.child, host.rank)] = host.done
            host.events, host.done = [], None
        events = order(events)
        for event in events:
            if (
                event.kind is EventKind.DOWN
                and event.incarnation == self.children[event.child].incarnations[event.rank]
            ):
                self.children[event.child].mark_down()
        settled = self.ledger.apply(events)
        self._echo |= settled.echo
        for request_id, c in settled.sends:
            self.pins.send_settled(request_id, c)
        for (c, rank), step in done.items():
            self.children[c].done[rank] = max(self.children[c].done[rank], step)
        completed = {c: StepId(min(child.done.values())) for c, child in enumerate(self.children)}
        self.pool.free_blocks(self.pins.release(completed))
        for request_id, c in settled.ended:
            if request_id in self.held and not self._truth_of(request_id, c):
                self.failed.add((request_id, c))
        for request_id in settled.tell:
            self._hear(request_id, well=True)
        for request_id in heard:
            self._hear(request_id, well=False)

    def _attempt(self, request_id: RequestId) -> Attempt:
        return max(a for r, a in self.truth if r == request_id)

    def _truth_of(self, request_id: RequestId, c: int) -> bool:
        """Whether the child's share of the request's last load went well. It must have ended on every rank."""
        ends = self.truth[(request_id, self._attempt(request_id))]
        mine = [ends.get((c, rank)) for rank in self.ranks]
        if None in mine:
            raise violated(self, f"the share of child {c} of the load of {request_id} has not ended: {ends}")
        return all(mine)

    def _hear(self, request_id: RequestId, well: bool) -> None:
        """vLLM gets `finished_recving`; `well`: without `failed_recving`."""
        request = self.held.pop(request_id, None)
        if request is None:
            raise violated(self, f"vLLM heard of {request_id}, which it does not hold for a load")
        if any(b.block_id in host.writes() for host in self.hosts for b in request.targets):
            raise violated(self, f"vLLM heard of {request_id} while its load may still write")
        if request.state is State.ENDED:
            self._vllm_frees(request)
            return
        loaders = self.loaders[(request_id, self._attempt(request_id))]
        if well != all([self._truth_of(request_id, c) for c in loaders]):
            raise violated(
                self, f"the load of {request_id} was told as {'good' if well else 'failed'}, but was {self.truth}"
            )
        if well:
            request.state = State.READY
            self._cache(request)
        else:
            self._vllm_frees(request)
            request.state = State.WAITING

    # -- the supervisor -------------------------------------------------------------------------------------

    def supervise(self, c: int) -> None:
        """As `connector.supervisor` does: all ranks on one new incarnation, or the one behind has to go."""
        child = self.children[c]
        hosts = [self.host(c, rank) for rank in self.ranks]
        if child.up:
            if all(h.alive and h.incarnation == i for h, i in zip(hosts, child.incarnations, strict=True)):
                return
            child.mark_down()
        target = max([h.incarnation for h in hosts if h.alive] + [max(child.incarnations) + 1])
        for host in hosts:
            if host.alive and host.incarnation < target:
                host.die(self.saw)
        if any(not h.alive or h.incarnation != target for h in hosts):
            return
        self._early_events += [ChildEvent(EventKind.DOWN, c, rank, child.incarnations[rank]) for rank in self.ranks]
        child.incarnations = (Incarnation(target),) * len(self.ranks)
        child.up = True
        for rank in self.ranks:
            child.done[rank] = max(child.done[rank], child.planned)

    # -- the end --------------------------------------------------------------------------------------------

    def quiesce(self) -> None:
        """Every request ends, every host completes or has died: nothing may be left."""
        everyone = range(len(self.children))
        while self.requests:
            self.end(self.requests[-1], everyone)
        for _ in range(20):
            for host in self.hosts:
                while host.queue:
                    host.run_next(self.saw)
                for load in list(host.loads):
                    host.end_load(load, True, self.saw)
                for request_id in list(host.sends):
                    host.end_send(request_id)
            if not self.in_flight:
                self.step(0, 0, 0, everyone)
            self.finish_step(self.hosts, lambda events: events)
            if not (self.in_flight or self.ledger.unsettled or self.pins.closing or self.held):
                break
        left = (self.ledger.unsettled, self.pins.pinned(), self.held)
        if self.ledger.unsettled or self.pins.pinned() or self.held:
            raise violated(self, f"something is never settled: {left}")
        if self.pool.num_free != len(self.pool.blocks):
            raise violated(self, "blocks are lost")
