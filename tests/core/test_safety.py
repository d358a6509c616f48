"""The safety rule (design, section 3) against everything that children, hosts and requests can do, in any order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raykv.messages import NO_ATTEMPT, ChildEvent, EventKind
from raykv.types import Attempt, Incarnation, RequestId
from tests.support.engine_model import Engine, Host, State
from tests.support.examples import examples

INDEX = st.integers(0, 11)
"""Picks one of a list of unknown length."""
CHILDREN = st.lists(st.integers(0, 2), max_size=3, unique=True)
WISHES = st.sampled_from([[0], [1], [0, 1], [1, 0], [2, 1, 0], []])


def pick(items: list[Any], index: int) -> Any:
    return items[index % len(items)]


class SafetyMachine(RuleBasedStateMachine):
    engine: Engine
    trouble = 0

    @initialize(children=st.integers(2, 3), ranks=st.integers(1, 3), blocks=st.integers(10, 24))
    def start(self, children: int, ranks: int, blocks: int) -> None:
        self.engine = Engine(children, ranks, blocks)

    def _existing(self, children: list[int]) -> list[int]:
        return [c for c in children if c < len(self.engine.children)]

    # -- requests and steps ---------------------------------------------------------------------------------

    @precondition(lambda self: len(self.engine.requests) < 5 and len(self.engine.in_state(State.WAITING)) < 3)
    @rule(family=st.integers(0, 1), wishes=WISHES, hands=st.sampled_from([1, 1, 2, 3]))
    def arrive(self, family: int, wishes: list[int], hands: int) -> None:
        self.engine.arrive(family, self._existing(wishes), hands)

    @precondition(lambda self: self.engine.requests)
    @rule(
        index=INDEX,
        delays=st.sampled_from([[0], [1], [0, 1], [0, 1, 2], []]),
        busy=st.sampled_from([True, True, False]),
    )
    def end(self, index: int, delays: list[int], busy: bool) -> None:
        """Mostly of a request that has begun: the others have nothing to lose."""
        begun = [request for request in self.engine.requests if request.state is not State.WAITING]
        if begun or not busy:
            self.engine.end(pick(begun if busy else self.engine.requests, index), self._existing(delays))

    @precondition(lambda self: len(self.engine.in_flight) < 2)
    @rule(
        grow=st.integers(0, 2),
        preempt=st.sampled_from([0, 0, 0, 1, 2]),
        window=st.integers(0, 2),
        idle=CHILDREN,
    )
    def step(self, grow: int, preempt: int, window: int, idle: list[int]) -> None:
        self.engine.step(grow, preempt, window, idle)

    @precondition(lambda self: self.engine.in_flight)
    @rule(silent=st.lists(INDEX, max_size=4), backwards=st.booleans(), turn=st.integers(0, 3))
    def finish_step(self, silent: list[int], backwards: bool, turn: int) -> None:
        """Hosts in `silent` report in a later step; events come in another order than they happened in."""
        hosts = [host for i, host in enumerate(self.engine.hosts) if i not in silent]

        def order(events: list[ChildEvent]) -> list[ChildEvent]:
            turned = events[turn:] + events[:turn]
            return turned[::-1] if backwards else turned

        self.engine.finish_step(hosts, order)

    @rule(grow=st.integers(0, 2), delay=st.integers(0, 3), preempt=st.sampled_from([0, 0, 1]))
    def go_on(self, grow: int, delay: int, preempt: int) -> None:
        """A step in which little goes wrong; `delay`: the hosts that take longer over it."""
        engine = self.engine
        if len(engine.in_flight) < 2:
            engine.step(grow, preempt, 0, ())
        for host in engine.hosts[delay:]:
            while host.queue:
                host.run_next(engine.saw)
        engine.finish_step(engine.hosts, lambda events: events)

    # -- hosts ----------------------------------------------------------------------------------------------

    def _hosts(self, having: str) -> list[Host]:
        return [host for host in self.engine.hosts if getattr(host, having)]

    @precondition(lambda self: self._hosts("queue"))
    @rule(index=INDEX, count=st.integers(1, 3))
    def run(self, index: int, count: int) -> None:
        host = pick(self._hosts("queue"), index)
        for _ in range(min(count, len(host.queue))):
            host.run_next(self.engine.saw)

    @precondition(lambda self: self._hosts("loads"))
    @rule(index=INDEX, which=INDEX, well=st.sampled_from([True, True, False]), everywhere=st.booleans())
    def end_load(self, index: int, which: int, well: bool, everywhere: bool) -> None:
        first = pick(self._hosts("loads"), index)
        request = pick(first.loads, which).request
        for host in self.engine.hosts if everywhere else [first]:
            for load in [load for load in host.loads if load.request is request]:
                host.end_load(load, well or host is not first, self.engine.saw)

    @precondition(lambda self: self._hosts("sends"))
    @rule(index=INDEX, which=INDEX)
    def end_send(self, index: int, which: int) -> None:
        host = pick(self._hosts("sends"), index)
        host.end_send(pick(list(host.sends), which))

    @precondition(lambda self: self.engine.in_state(State.RUNNING))
    @rule(index=INDEX, which=INDEX)
    def send_early(self, index: int, which: int) -> None:
        """A child says that it is through with a request before the request ends; it is believed later only."""
        request = pick(self.engine.in_state(State.RUNNING), which)
        hosts = [host for host in self.engine.hosts if self.engine.serves(host, request)]
        if hosts:
            pick(hosts, index).emit(EventKind.SEND_UNASKED, request.id)

    @precondition(lambda self: self.trouble * 3 <= self.engine.steps and self._hosts("alive"))
    @rule(index=INDEX, busy=st.booleans())
    def die(self, index: int, busy: bool) -> None:
        """Now and then only, so that there is something for it to hit."""
        self.trouble += 1
        hosts = self._hosts("alive")
        at_work = [host for host in hosts if host.queue or host.loads or host.sends]
        pick(at_work if busy and at_work else hosts, index).die(self.engine.saw)

    @precondition(lambda self: any(host.incarnation or not host.alive for host in self.engine.hosts))
    @rule(index=INDEX, seen=st.booleans())
    def recover(self, index: int, seen: bool) -> None:
        dead = [host for host in self.engine.hosts if not host.alive]
        if dead:
            pick(dead, index).come_back()
        if seen or not dead:
            for child in range(len(self.engine.children)):
                self.engine.supervise(child)

    # -- reports that nobody asked for ----------------------------------------------------------------------

    @rule(
        what=st.sampled_from(["duplicate", "receive", "send", "death", "phantom", "sync load failed"]),
        index=INDEX,
        which=st.integers(0, 40),
        well=st.booleans(),
    )
    def noise(self, what: str, index: int, which: int, well: bool) -> None:
        host = pick(self.engine.hosts, index)
        kind = EventKind.RECV_DONE if well else EventKind.RECV_FAILED
        if what == "duplicate" and self._hosts("history"):
            self._duplicate(pick(self._hosts("history"), index), which)
        elif what == "receive" and self.engine.held:
            self._false_receive(host, pick(list(self.engine.held), which), kind)
        elif what == "send" and self._hosts("sends"):  # by a process of before
            host = pick(self._hosts("sends"), index)
            before = Incarnation(host.incarnation - 1)
            host.emit(EventKind.SEND_DONE, pick(list(host.sends), which), incarnation=before)
        elif what == "death":  # of a process of before, once more
            host.emit(EventKind.DOWN, incarnation=Incarnation(host.incarnation - 1))
        elif what == "phantom":
            host.emit(EventKind.SEND_DONE if well else kind, RequestId("nobody"))
        elif what == "sync load failed" and self.engine.in_state(State.RUNNING):
            # The step's output brings it, before anything else can happen to the request.
            request = pick(self.engine.in_state(State.RUNNING), which)
            event = ChildEvent(EventKind.SYNC_FAILED, host.child, host.rank, host.incarnation, request.id)
            self.engine.ledger.apply([event])
            self.engine.failed.add((request.id, host.child))

    def _duplicate(self, host: Host, which: int) -> None:
        event = pick(host.history, which)
        alive = {request.id for request in self.engine.requests}
        if not (event.kind is EventKind.SEND_DONE and event.request in alive):
            host.events.append(event)  # (before the end it can't be told from a first report)

    def _false_receive(self, host: Host, request: RequestId, kind: EventKind) -> None:
        """Of a load that this child never had, or of an attempt that is over."""
        load = self.engine.ledger.load_of(request)
        attempt = load.attempt if load is not None else NO_ATTEMPT
        if load is not None and host.child in load.shares:
            attempt = Attempt(attempt - 1)
        host.emit(kind, request, attempt)

    # -- always and at the end ------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine") and not self.engine.broken:
            self.engine.quiesce()
            self.engine.check()


LIGHT = settings(
    max_examples=examples(15),
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# Where one is found, hypothesis takes up to five minutes to make it small.
@pytest.mark.timeout(600)
class TestSafety(SafetyMachine.TestCase):
    settings = LIGHT


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestSafetyAtLength(SafetyMachine.TestCase):
    settings = settings(LIGHT, max_examples=10_000, derandomize=False)
