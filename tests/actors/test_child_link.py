"""A child's link against hosts that raise, hang, die, report late, or do not start.

No test measures time. Limits are small where one has to pass, and far away where none may.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from raykv.actors import child_link
from raykv.actors.child_link import MAX_BATCH, ChildLink
from raykv.actors.link_parts import LinkOptions, LinkState
from raykv.errors import ChildStartError, HostRaised, RayKVError
from raykv.messages import NO_ATTEMPT, ChildEvent, EventKind, HookFault, LoadOrder, Phase, StepRecord
from raykv.types import Attempt, Incarnation, Rank, RequestId
from tests.support.fake_host import Call, FakeHost, step_record

pytestmark = pytest.mark.process

FOREVER = 60.0
"""A limit that no test reaches; the tests' own patience is below it."""
PATIENCE = 30.0
SOON = 0.02
"""A limit that a test waits for."""
RAISED = Call(raises=HostRaised("host", "ValueError", "bad", ""))


def load(request: str, attempt: int = 0, blocks: tuple[int, ...] = ()) -> LoadOrder:
    return LoadOrder(RequestId(request), Attempt(attempt), blocks)


class Rig:
    """A link, its hosts in the order of their incarnations, and all that it has put out."""

    def __init__(self, *hosts: FakeHost | Exception, **options: Any) -> None:
        limits = {"timeout_s": FOREVER, "load_timeout_s": FOREVER, "max_faults": 100, "fault_window_s": 60}
        self.hosts = list(hosts) or [FakeHost()]
        self.starts: list[int] = []
        self.dead: list[list[StepRecord]] = []
        self.events: list[ChildEvent] = []
        self.done: int | None = None
        self.may_start = threading.Event()
        self.may_start.set()
        self.link = ChildLink(
            name="fake",
            child=7,
            rank=Rank(1),
            options=LinkOptions(**(limits | {"retry_s": SOON, "max_retry_s": SOON} | options)),
            start_host=self._start,
            after_death=self._after_death,
        )
        first = self.hosts[0]
        assert isinstance(first, FakeHost)
        self.link.start(first)

    def _start(self, incarnation: Incarnation) -> FakeHost:
        self.starts.append(incarnation)
        assert self.may_start.wait(PATIENCE)
        number = len(self.starts)
        host = self.hosts[number] if number < len(self.hosts) else FakeHost(pid=100 + number)
        if isinstance(host, Exception):
            raise host
        if number >= len(self.hosts):
            self.hosts.append(host)
        return host

    def _after_death(self, records: list[StepRecord]) -> None:  # type: ignore[override]
        assert not any(e.kind is EventKind.DOWN for e in self._new_events()), "cleaned up before anybody hears of it"
        self.dead.append(list(records))

    def _new_events(self) -> list[ChildEvent]:
        return self.link._output.events

    def host(self, number: int = 0) -> FakeHost:
        host = self.hosts[number]
        assert isinstance(host, FakeHost)
        return host

    def submit(self, step: int, *loads: LoadOrder, incarnation: int = 0, owed: tuple[str, ...] = ()) -> None:
        self.link.submit(
            step_record(step, loads=loads), Incarnation(incarnation), tuple(RequestId(request) for request in owed)
        )

    def load_now(self, step: int, incarnation: int = 0) -> Future[bool]:
        """`load_now` in another thread: what the worker waits for."""
        future: Future[bool] = Future()

        def call() -> None:
            try:
                record = step_record(step, Phase.LOAD, sync=True)
                future.set_result(self.link.load_now(record, Incarnation(incarnation)))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=call, daemon=True).start()
        return future

    def drain(self) -> None:
        output = self.link.drain()
        self.events += output.events
        if output.done_step is not None:
            assert self.done is None or output.done_step >= self.done
            self.done = output.done_step

    def until(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not what():
            assert time.monotonic() < deadline, f"{self.link.state}, done {self.done}, {self.events}"
            time.sleep(0.0005)
            self.drain()
        self.drain()

    def until_done(self, step: int) -> None:
        self.until(lambda: self.done is not None and self.done >= step)

    def until_up(self, incarnation: int) -> None:
        self.until(lambda: self.link.state is LinkState.UP and self.link.incarnation == incarnation)

    def turns(self, count: int = 3) -> None:
        """Let the link do this many rounds more, whatever it has to do in them."""
        seen = 0
        real = self.link._gather

        def counted() -> Any:
            nonlocal seen
            seen += 1
            return real()

        self.link._gather = counted  # type: ignore[method-assign]
        self.until(lambda: seen > count)
        self.link._gather = real  # type: ignore[method-assign]

    def kinds(self) -> list[EventKind]:
        return [event.kind for event in self.events]

    def ends(self) -> list[tuple[EventKind, str | None, int, int]]:
        """Of loads: kind, request, attempt, incarnation."""
        return [
            (e.kind, e.request, e.attempt, e.incarnation)
            for e in self.events
            if e.kind in (EventKind.RECV_DONE, EventKind.RECV_FAILED)
        ]


DONE, FAILED = EventKind.RECV_DONE, EventKind.RECV_FAILED


@pytest.fixture
def rigs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    """Makes rigs; afterwards no thread of any link is left, and no host had two calls at once."""
    monkeypatch.setattr(child_link, "IDLE_CHECK_S", 0.005)
    made: list[Rig] = []

    def make(*args: Any, **kwargs: Any) -> Rig:
        made.append(Rig(*args, **kwargs))
        return made[-1]

    yield make
    for rig in made:
        rig.link.close(PATIENCE)
        rig.may_start.set()
        for host in rig.hosts:
            assert not isinstance(host, FakeHost) or not host.overlaps
    assert_no_threads()


def assert_no_threads() -> None:
    """A thread that starts a host ends when that start does."""
    deadline = time.monotonic() + PATIENCE
    while left := [t for t in threading.enumerate() if t.name in ("raykv-fake", "raykv-start-fake")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.001)


MakeRig = Callable[..., Rig]


# -- a healthy host -------------------------------------------------------------------------------------------


def test_records_run_in_order_and_complete_their_steps(rigs: MakeRig) -> None:
    rig = rigs()
    for step in range(5):
        rig.submit(step)
    rig.until_done(4)
    assert rig.host().steps == [0, 1, 2, 3, 4]
    assert rig.events == []
    assert rig.link.pid == 100


def test_one_call_is_in_flight_and_what_gathers_goes_as_the_next(rigs: MakeRig) -> None:
    rig = rigs(FakeHost().hang())
    rig.submit(0)
    rig.until(rig.host().in_call.is_set)
    for step in range(1, MAX_BATCH + 6):
        rig.submit(step)  # does not block
    rig.drain()
    assert rig.done is None, "nothing is completed before the host says so"
    rig.host().release()
    rig.until_done(MAX_BATCH + 5)
    assert [len(batch) for batch in rig.host().batches] == [1, MAX_BATCH, 5]
    assert rig.host().steps == list(range(MAX_BATCH + 6))


def test_of_idle_records_that_gathered_only_one_that_is_the_last_is_sent(rigs: MakeRig) -> None:
    rig = rigs(FakeHost().hang())
    rig.submit(0)
    rig.until(rig.host().in_call.is_set)
    for step, idle in ((1, True), (2, True), (3, False), (4, True), (5, True)):
        rig.link.submit(step_record(step, idle=idle), Incarnation(0))
    rig.host().release()
    rig.until_done(5)
    assert [[r.step for r in batch] for batch in rig.host().batches] == [[0], [3, 5]]


def test_loads_end_with_their_attempt(rigs: MakeRig) -> None:
    rig = rigs()
    rig.submit(0, load("a", 2), load("b", 0))
    rig.until_done(0)
    assert rig.ends() == []
    rig.host().report(receiving=["a", "b", "nobody"], failed=["b"])
    rig.until(lambda: len(rig.ends()) == 3)
    assert sorted(rig.ends(), key=str) == sorted(
        [(DONE, "a", 2, 0), (FAILED, "b", 0, 0), (DONE, "nobody", NO_ATTEMPT, 0)], key=str
    )
    assert all((e.child, e.rank) == (7, 1) for e in rig.events)


def test_an_owed_send_is_polled_for_until_it_is_reported(rigs: MakeRig) -> None:
    rig = rigs()
    rig.submit(0, owed=("a",))
    rig.until(lambda: rig.host().polls > 3)
    rig.host().report(sending=["a"])
    rig.until(lambda: rig.kinds() == [EventKind.SEND_DONE])
    polls = rig.host().polls
    rig.turns(1)
    assert rig.host().polls == polls, "an idle host is left alone"


def test_a_load_phase_does_not_complete_its_step(rigs: MakeRig) -> None:
    rig = rigs()
    assert rig.load_now(4).result(PATIENCE) is True
    rig.drain()
    assert rig.done is None, "its saves are still to come"
    rig.link.submit(step_record(4, Phase.SAVE), Incarnation(0))
    rig.until_done(4)


def test_a_synchronous_load_goes_with_what_gathered_and_nothing_behind_it(rigs: MakeRig) -> None:
    rig = rigs(FakeHost().hang())
    rig.submit(0)
    rig.until(rig.host().in_call.is_set)
    rig.submit(1)
    loaded = rig.load_now(2)
    rig.until(lambda: rig.link._queue.qsize() == 2)
    rig.submit(3)
    rig.host().release()
    assert loaded.result(PATIENCE) is True
    rig.until_done(3)
    assert [[r.step for r in batch] for batch in rig.host().batches] == [[0], [1, 2], [3]]


@pytest.mark.parametrize(
    "call", [Call(invalid_blocks=frozenset({3})), Call(fault=HookFault("start_load_kv", "bad", unsettled=False))]
)
def test_a_synchronous_load_that_failed_by_itself_leaves_the_host_alone(rigs: MakeRig, call: Call) -> None:
    rig = rigs(FakeHost().then(call))
    assert rig.load_now(0).result(PATIENCE) is False
    assert rig.load_now(1).result(PATIENCE) is True
    assert rig.host().kills == 0


# -- refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("incarnation", [-1, 1])
def test_a_record_for_another_incarnation_is_refused(rigs: MakeRig, incarnation: int) -> None:
    rig = rigs()
    rig.submit(0, load("a", 5), incarnation=incarnation)
    rig.until_done(0)
    assert rig.load_now(1, incarnation).result(PATIENCE) is False
    assert rig.host().batches == []
    assert rig.ends() == [(FAILED, "a", 5, incarnation)]
    assert rig.host().kills == 0


def test_a_refused_step_completes_after_those_before_it(rigs: MakeRig) -> None:
    rig = rigs(FakeHost().hang())
    rig.submit(0)
    rig.until(rig.host().in_call.is_set)
    rig.submit(1, incarnation=9)
    rig.drain()
    assert rig.done is None
    rig.host().hang()
    rig.submit(2)
    rig.host().release()
    rig.until_done(2)


def test_while_down_everything_is_refused(rigs: MakeRig) -> None:
    rig = rigs(FakeHost().then(Call(dies=True)))
    rig.may_start.clear()
    rig.submit(0)
    rig.until(lambda: EventKind.DOWN in rig.kinds())
    rig.submit(1, load("a"))
    rig.submit(2, incarnation=1)
    rig.until_done(2)
    assert rig.ends() == [(FAILED, "a", 0, 0)]
    assert rig.load_now(3).result(PATIENCE) is False
    assert rig.link.pid is None
    rig.may_start.set()
    rig.until_up(1)


# -- death ----------------------------------------------------------------------------------------------------


def test_death_in_a_call_settles_everything_and_a_new_incarnation_follows(rigs: MakeRig) -> None:
    rig = rigs(FakeHost().then(Call(), Call(dies=True)))
    rig.submit(0, load("a"), owed=("s",))
    rig.until_done(0)
    rig.submit(1, load("b", 3))
    rig.until_done(1)
    assert sorted(rig.ends()[:2], key=str) == sorted([(FAILED, "a", 0, 0), (FAILED, "b", 3, 0)], key=str)
    assert rig.kinds()[-1] is EventKind.DOWN and rig.events[-1].incarnation == 0
    assert [[r.step for r in records] for records in rig.dead] == [[1]]
    rig.until_up(1)
    assert (rig.starts, rig.link.pid) == ([1], 101)
    rig.submit(2, incarnation=1)
    rig.until_done(2)
    assert rig.host(1).steps == [2]


def test_death_between_calls_is_noticed_without_work(rigs: MakeRig) -> None:
    rig = rigs()
    rig.host().die()
    rig.until_up(1)
    assert rig.kinds() == [EventKind.DOWN]


def test_work_that_was_never_handed_to_a_dead_host_is_settled_too(rigs: MakeRig) -> None:
    rig = rigs(FakeHost().hang())
    rig.submit(0)
    rig.until(rig.host().in_call.is_set)
    rig.submit(1, load("a", 1))
    real = rig.link._gather

    def dies_first() -> Any:
        items = real()
        if items:
            rig.host().die()
        return items

    rig.link._gather = dies_first  # type: ignore[method-assign]
    rig.host().release()
    rig.until(lambda: rig.ends())
    assert rig.ends() == [(FAILED, "a", 1, 0)]
    rig.until_done(1)
    assert rig.host().steps == [0]


@pytest.mark.parametrize("error", [RAISED, Call(raises=KeyError("not RayKV's"))])
def test_a_call_that_raises_costs_the_host(rigs: MakeRig, error: Call) -> None:
    rig = rigs(FakeHost().then(error))
    rig.submit(0, load("a"))
    rig.until_done(0)
    assert rig.host().kills == 1
    assert rig.ends() == [(FAILED, "a", 0, 0)]
    rig.until_up(1)


def test_a_fault_that_leaves_the_step_unsettled_is_settled_by_death(rigs: MakeRig) -> None:
    rig = rigs(FakeHost(unkillable=10**9).then(Call(fault=HookFault("save_kv_layer", "bad", unsettled=True))))
    rig.submit(0, load("a"))
    rig.until(lambda: rig.host().kills)
    assert (rig.kinds(), rig.done) == ([EventKind.FAULT], None)
    rig.host().unkillable = 0
    rig.until_done(0)
    assert rig.kinds() == [EventKind.FAULT, FAILED, EventKind.DOWN]
    assert [len(records) for records in rig.dead] == [1]


def test_faults_that_move_no_data_are_counted_until_it_is_too_much(rigs: MakeRig) -> None:
    fault = Call(fault=HookFault("get_transfer_results", "bad", unsettled=False))
    rig = rigs(FakeHost().then(*[fault] * 3), max_faults=3)
    for step in range(2):
        rig.submit(step)
        rig.until_done(step)
    assert (rig.kinds(), rig.host().kills) == ([EventKind.FAULT] * 2, 0)
    rig.submit(2)
    rig.until(lambda: rig.kinds() == [*[EventKind.FAULT] * 3, EventKind.DOWN])
    assert rig.done == 2
    rig.until_up(1)


def test_the_metadata_of_a_save_phase_came_with_its_load_phase(rigs: MakeRig) -> None:
    rig = rigs(FakeHost().then(Call(), Call(dies=True)))
    assert rig.load_now(3).result(PATIENCE)
    rig.link.submit(step_record(3, Phase.SAVE), Incarnation(0))
    rig.until_done(3)
    assert [[(r.step, r.phase) for r in records] for records in rig.dead] == [[(3, Phase.LOAD), (3, Phase.SAVE)]]


def test_a_completed_step_is_not_cleaned_up(rigs: MakeRig) -> None:
    rig = rigs()
    assert rig.load_now(3).result(PATIENCE)
    rig.link.submit(step_record(3, Phase.SAVE), Incarnation(0))
    rig.until_done(3)
    rig.host().die()
    rig.until(lambda: rig.dead)
    assert rig.dead == [[]]


def test_cleaning_up_may_fail(rigs: MakeRig) -> None:
    rig = rigs(FakeHost().then(Call(dies=True)))

    def broken(records: object) -> None:
        raise OSError("disk full")

    rig.link._after_death = broken
    rig.submit(0, load("a"))
    rig.until_done(0)
    assert rig.kinds() == [FAILED, EventKind.DOWN]


# -- hangs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("silent", [True, False])
def test_a_host_that_hangs_is_killed(rigs: MakeRig, silent: bool) -> None:
    rig = rigs(FakeHost().hang(silent=silent), timeout_s=SOON)
    rig.submit(0, load("a"))
    rig.until_done(0)
    assert rig.host().kills == 1
    assert rig.kinds() == [FAILED, EventKind.DOWN]
    rig.until_up(1)


def test_a_host_whose_hooks_go_on_is_not_hung(rigs: MakeRig) -> None:
    rig = rigs(FakeHost().hang(ticking=True), timeout_s=SOON)
    rig.submit(0)
    rig.until(lambda: rig.host().ticks > 20)  # each tick: a look after a part of the limit
    rig.host().release()
    rig.until_done(0)
    assert rig.host().kills == 0


def test_one_look_without_an_answer_is_no_proof(rigs: MakeRig) -> None:
    host = FakeHost().hang(ticking=True)
    host.silent_looks = 2
    rig = rigs(host, timeout_s=0.4)
    rig.submit(0)
    rig.until(lambda: host.ticks > 2)
    host.release()
    rig.until_done(0)
    assert host.kills == 0


def test_a_load_that_takes_too_long_costs_the_host(rigs: MakeRig) -> None:
    rig = rigs(load_timeout_s=SOON)
    rig.submit(0, load("a"))
    rig.until(lambda: EventKind.DOWN in rig.kinds())
    assert rig.host().kills == 1
    assert rig.ends() == [(FAILED, "a", 0, 0)]
    assert "load_timeout_s" in rig.events[-1].detail


@pytest.mark.parametrize("call", [Call(hangs=True), RAISED, Call(raises=KeyError()), Call(dies=True)])
def test_a_synchronous_load_fails_only_when_nothing_can_write_any_more(rigs: MakeRig, call: Call) -> None:
    rig = rigs(FakeHost(unkillable=10**9).then(call), timeout_s=SOON)
    loaded = rig.load_now(0)
    rig.until(lambda: rig.host().kills > 2)
    assert not loaded.done()
    assert rig.done is None and rig.events == []
    rig.host().unkillable = 0
    assert loaded.result(PATIENCE) is False
    assert not rig.host().alive()
    rig.until(lambda: rig.kinds() == [EventKind.DOWN])


def test_a_host_that_can_not_be_killed_keeps_what_it_holds(rigs: MakeRig) -> None:
    rig = rigs(FakeHost(unkillable=10**9).hang(), timeout_s=SOON)
    rig.submit(0, load("a"))
    rig.until(lambda: rig.host().kills > 0)
    rig.submit(1, load("b"))
    assert rig.load_now(2).result(PATIENCE) is False, "it was never handed over, so the engine need not wait"
    rig.until(lambda: rig.ends())
    kills = rig.host().kills
    rig.until(lambda: rig.host().kills > kills + 2)
    assert rig.ends() == [(FAILED, "b", 0, 0)]
    assert rig.done is None, "step 0 may still be running, so no later one counts as completed"
    assert rig.starts == []
    rig.host().unkillable = 0
    rig.until_done(2)
    assert rig.ends() == [(FAILED, "b", 0, 0), (FAILED, "a", 0, 0)]
    assert rig.kinds().count(EventKind.DOWN) == 1
    assert [[r.step for r in records] for records in rig.dead] == [[0]]
    rig.until_up(1)


# -- return ---------------------------------------------------------------------------------------------------


def test_a_start_that_fails_is_tried_again(rigs: MakeRig) -> None:
    rig = rigs(FakeHost(), ChildStartError("no"), ChildStartError("no"), FakeHost(pid=55))
    rig.host().die()
    rig.until_up(1)
    assert (rig.starts, rig.link.pid) == ([1, 1, 1], 55)
    assert rig.kinds() == [EventKind.DOWN], "nothing more was lost"


def test_too_many_faults_are_answered_by_a_pause(rigs: MakeRig) -> None:
    rig = rigs(max_faults=2, retry_s=FOREVER, max_retry_s=FOREVER)
    rig.host().die()
    rig.until_up(1)
    rig.host(1).die()
    rig.until(lambda: rig.kinds() == [EventKind.DOWN] * 2)
    rig.turns(2)
    assert (rig.link.state, rig.starts) == (LinkState.DOWN, [1])
    rig.link._restart_at = 0.0  # the pause is over
    rig.until_up(2)


def test_retire_ends_the_incarnation_it_names_and_no_other(rigs: MakeRig) -> None:
    rig = rigs()
    rig.submit(0, load("a"))
    rig.until_done(0)
    rig.link.retire(Incarnation(0))
    rig.until_up(1)
    assert rig.host().kills == 1
    assert rig.kinds() == [FAILED, EventKind.DOWN]
    rig.link.retire(Incarnation(0))
    rig.submit(1, incarnation=1)
    rig.until_done(1)
    rig.turns(1)
    assert (rig.host(1).kills, rig.link.incarnation) == (0, 1)
    rig.link.retire(Incarnation(1))
    rig.until_up(2)


# -- the end --------------------------------------------------------------------------------------------------


def test_close_ends_host_and_thread_and_may_be_repeated(rigs: MakeRig) -> None:
    rig = rigs()
    rig.submit(0)
    rig.link.close(PATIENCE)
    rig.link.close(PATIENCE)
    assert rig.host().closed and rig.link.state is LinkState.CLOSED
    assert_no_threads()
    with pytest.raises(RayKVError):
        rig.link.load_now(step_record(1, Phase.LOAD), Incarnation(0))


def test_close_while_a_call_hangs(rigs: MakeRig) -> None:
    rig = rigs(FakeHost().hang())
    rig.submit(0)
    rig.until(rig.host().in_call.is_set)
    rig.link.close(SOON)  # the thread waits for the call; closing the host ends it
    assert_no_threads()
    assert rig.host().closed and rig.starts == []
    assert rig.link.state is LinkState.CLOSED


def test_close_while_a_host_can_not_be_killed(rigs: MakeRig) -> None:
    rig = rigs(FakeHost(unkillable=10**9), retry_s=FOREVER)
    rig.link.retire(Incarnation(0))
    rig.until(lambda: rig.host().kills)
    rig.link.close(PATIENCE)
    assert_no_threads()


def test_close_while_a_host_is_being_started(rigs: MakeRig) -> None:
    rig = rigs()
    rig.may_start.clear()
    rig.host().die()
    rig.until(lambda: rig.starts)
    rig.link.close(PATIENCE)
    rig.may_start.set()
    assert_no_threads()
    assert rig.host(1).closed, "nobody would end it otherwise"


def test_close_during_a_pause(rigs: MakeRig) -> None:
    rig = rigs(max_faults=1, retry_s=FOREVER, max_retry_s=FOREVER)
    rig.host().die()
    rig.until(lambda: rig.kinds() == [EventKind.DOWN])
    rig.link.close(PATIENCE)
    assert_no_threads()
    assert rig.starts == []


@pytest.mark.parametrize("rounds", range(8))
def test_close_at_any_moment(rigs: MakeRig, rounds: int) -> None:
    """Hosts die one after the other, by themselves and in calls, while somebody closes."""
    rig = rigs(*[FakeHost(pid=n).then(Call(dies=True)) for n in range(1, 6)], retry_s=0.001)
    for step in range(rounds):
        rig.submit(step, incarnation=rig.link.incarnation)
        time.sleep(0.001 * (rounds % 3))  # no test of time: only another moment in each round
    rig.link.close(PATIENCE)
    assert_no_threads()
    started = [host for host in rig.hosts[: len(rig.starts) + 1] if isinstance(host, FakeHost)]
    assert not any(host.alive() for host in started)
