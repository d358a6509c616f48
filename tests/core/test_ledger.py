"""Single cases of the ledger; `test_safety` has them in any order and together with the pins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from raykv.core.ledger import Drop, Ledger, LoadState, Settled
from raykv.errors import IntegrityError
from raykv.messages import NO_ATTEMPT, ChildEvent, EventKind
from raykv.types import Attempt, Incarnation, Rank, RequestId

R, OTHER = RequestId("r"), RequestId("other")
A, B = 0, 1
NOW = 100.0


def event(
    kind: EventKind,
    child: int = A,
    rank: int = 0,
    request: RequestId | None = R,
    attempt: int = NO_ATTEMPT,
    incarnation: int = 0,
) -> ChildEvent:
    return ChildEvent(kind, child, Rank(rank), Incarnation(incarnation), request, Attempt(attempt))


def received(rank: int = 0, attempt: int = 0, child: int = A) -> ChildEvent:
    return event(EventKind.RECV_DONE, child, rank, attempt=attempt)


def failed(rank: int = 0, attempt: int = 0, child: int = A) -> ChildEvent:
    return event(EventKind.RECV_FAILED, child, rank, attempt=attempt)


def sent(rank: int = 0, child: int = A, incarnation: int = 0) -> ChildEvent:
    return event(EventKind.SEND_DONE, child, rank, incarnation=incarnation)


def died(rank: int = 0, child: int = A, incarnation: int = 0) -> ChildEvent:
    return event(EventKind.DOWN, child, rank, None, incarnation=incarnation)


def a_ledger(ranks: int = 2) -> Ledger:
    ledger = Ledger(ranks)
    ledger.request_arrived(R)
    return ledger


def incarnations(*numbers: int) -> tuple[Incarnation, ...]:
    return tuple(Incarnation(n) for n in numbers)


def nothing(settled: Settled) -> bool:
    return not (settled.tell or settled.echo or settled.sends or settled.loaded or settled.ended)


@pytest.fixture(autouse=True)
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ledger is checked after each batch of events."""
    apply: Callable[..., Settled] = Ledger.apply

    def checked(self: Ledger, *args: Any) -> Settled:
        settled = apply(self, *args)
        self.check_integrity()
        return settled

    monkeypatch.setattr(Ledger, "apply", checked)


# -- loads ----------------------------------------------------------------------------------------------------


def test_a_load_is_told_once_when_every_rank_is_through() -> None:
    ledger = a_ledger(ranks=3)
    assert ledger.open_load(R, A) == 0
    assert nothing(ledger.apply([received(rank=2), received(rank=0)]))
    assert ledger.unsettled == 1
    settled = ledger.apply([received(rank=1)])
    assert (settled.tell, settled.loaded, settled.ended) == ({R}, [(R, A)], [(R, A)])
    assert (settled.echo, ledger.unsettled, sum(ledger.dropped.values())) == (set(), 0, 0)


def test_scenario_1_the_same_receive_from_a_second_child() -> None:
    ledger = a_ledger(ranks=1)
    ledger.open_load(R, A)
    assert ledger.apply([received()]).tell == {R}
    assert nothing(ledger.apply([received(child=B, attempt=NO_ATTEMPT)]))
    assert nothing(ledger.apply([received()]))
    assert ledger.dropped == {(B, Drop.UNKNOWN): 1, (A, Drop.UNKNOWN): 1}


def test_the_loser_of_a_load_can_neither_end_nor_fail_it() -> None:
    ledger = a_ledger(ranks=1)
    ledger.open_load(R, A)
    assert nothing(ledger.apply([received(child=B), failed(child=B)]))
    assert ledger.unsettled == 1
    assert ledger.apply([received()]).loaded == [(R, A)]


def test_one_rank_that_reports_twice_does_not_stand_for_two() -> None:
    ledger = a_ledger()
    ledger.open_load(R, A)
    assert nothing(ledger.apply([received(rank=0), received(rank=0), failed(rank=0)]))
    assert ledger.apply([received(rank=1)]).loaded == [(R, A)]
    assert ledger.dropped == {(A, Drop.UNKNOWN): 2}


@pytest.mark.parametrize("order", list(permutations([failed(0), received(1), received(2)])))
def test_a_load_has_failed_if_one_rank_failed_in_whatever_order(order: tuple[ChildEvent, ...]) -> None:
    ledger = a_ledger(ranks=3)
    ledger.open_load(R, A)
    settled = ledger.apply(order)
    assert (settled.echo, settled.tell, settled.loaded, settled.ended) == ({R}, set(), [], [(R, A)])
    load = ledger.load_of(R)
    assert load is not None and load.state is LoadState.ECHO
    assert not ledger.may_load(R, A) and ledger.may_load(R, B)
    assert ledger.failures == {A: 1}
    # What comes while it waits for its echo changes nothing.
    assert nothing(ledger.apply([received(0), failed(1)]))
    assert ledger.echoed({R, OTHER}) == {R}
    assert ledger.echoed({R}) == set()
    assert ledger.unsettled == 0


# -- loads of several children --------------------------------------------------------------------------------

ALL_WELL = [received(0), received(1), received(0, child=B), received(1, child=B)]


@pytest.mark.parametrize("order", list(permutations(ALL_WELL)))
def test_a_composed_load_is_told_once_when_every_child_is_through_on_every_rank(order: tuple[ChildEvent, ...]) -> None:
    ledger = a_ledger()
    ledger.open_load(R, A, B)
    for i, report in enumerate(order):
        assert ledger.unsettled_loads == 1
        assert (ledger.is_loading(A), ledger.is_loading(B)) == tuple(
            any(e.child == c for e in order[i:]) for c in (A, B)
        )
        settled = ledger.apply([report])
        last = i == len(order) - 1
        assert (settled.tell, settled.loaded) == (({R}, [(R, A), (R, B)]) if last else (set(), []))
        through = report.child not in {later.child for later in order[i + 1 :]}
        assert settled.ended == ([(R, report.child)] if through else [])
        assert settled.well == set(settled.ended)
    assert ledger.unsettled == 0


@pytest.mark.parametrize("bad", range(4))
@pytest.mark.parametrize("turn", range(4))
def test_a_composed_load_fails_only_after_the_others_have_ended(bad: int, turn: int) -> None:
    ledger = a_ledger()
    ledger.open_load(R, A, B)
    reports = [replace(e, kind=EventKind.RECV_FAILED) if i == bad else e for i, e in enumerate(ALL_WELL)]
    reports = reports[turn:] + reports[:turn]
    settled = [ledger.apply([report]) for report in reports]
    assert all(not (one.echo or one.tell or one.loaded) for one in settled[:-1])
    assert (settled[-1].echo, settled[-1].tell, settled[-1].loaded) == ({R}, set(), [])
    loser = ALL_WELL[bad].child
    assert {key for one in settled for key in one.well} == {(R, B if loser == A else A)}
    assert (ledger.may_load(R, A), ledger.may_load(R, B)) == (loser != A, loser != B)
    assert ledger.failures == {loser: 1}
    assert ledger.echoed({R}) == {R} and ledger.unsettled == 0
    assert ledger.open_load(R, A, B) == 1


def test_a_share_that_ended_ends_no_other_one() -> None:
    ledger = a_ledger(ranks=1)
    ledger.open_load(R, A, B)
    assert ledger.apply([received()]).ended == [(R, A)]
    assert nothing(ledger.apply([received(), failed(), received(child=B, attempt=NO_ATTEMPT)]))
    assert ledger.dropped == {(A, Drop.UNKNOWN): 2, (B, Drop.LATE): 1}
    assert ledger.apply([received(child=B)]).tell == {R}


def test_an_aborted_composed_load_is_told_after_its_last_child() -> None:
    ledger = a_ledger(ranks=1)
    ledger.open_load(R, A, B)
    ledger.apply([failed()])
    ledger.request_ended(R)
    assert ledger.unsettled == 1
    settled = ledger.apply([received(child=B)])
    assert (settled.tell, settled.echo, settled.loaded) == ({R}, set(), [])
    assert ledger.unsettled == 0


@pytest.mark.parametrize("children", [(), (A, A)])
def test_a_load_has_children_each_once(children: tuple[int, ...]) -> None:
    ledger = a_ledger()
    with pytest.raises(IntegrityError):
        ledger.open_load(R, *children)
    assert ledger.unsettled == 0


# -- a load that failed and whose part others may have ---------------------------------------------------------


def spoiled() -> Ledger:
    """One rank; A has failed its share of a load, B has not."""
    ledger = a_ledger(ranks=1)
    ledger.open_load(R, A, B)
    settled = ledger.apply([failed(), received(child=B)], lambda request, who: (request, who) == (R, {A}))
    assert settled.retry == {R: {A}} and not settled.echo and not settled.tell and not settled.loaded
    assert ledger.failed_shares(R) == {A} and ledger.unsettled_loads == 1
    return ledger


@pytest.mark.parametrize("again", [B, 2])
def test_another_child_loads_what_failed(again: int) -> None:
    ledger = spoiled()
    assert nothing(ledger.apply([received(), received(child=again)])), "nobody loads meanwhile"
    assert ledger.retry(R, again) == 1 and ledger.is_loading(again)
    assert nothing(ledger.apply([received(child=again), failed(child=B)])), "they are of the attempt before"
    settled = ledger.apply([received(attempt=1, child=again)])
    assert (settled.tell, settled.echo) == ({R}, set())
    assert settled.loaded == [(R, child) for child in sorted({B, again})]
    assert ledger.unsettled == 0 and not ledger.may_load(R, A)


def test_who_stands_in_may_fail_too() -> None:
    ledger = spoiled()
    ledger.retry(R, 2)
    settled = ledger.apply([failed(attempt=1, child=2)])
    assert (settled.echo, settled.retry) == ({R}, {}) and not ledger.may_load(R, 2)
    assert ledger.retry(R, B) is None and not ledger.give_up(R)
    assert ledger.echoed({R}) == {R} and ledger.unsettled == 0


def test_nobody_has_what_failed() -> None:
    ledger = spoiled()
    assert ledger.give_up(R) and not ledger.give_up(R)
    assert ledger.retry(R, B) is None
    assert ledger.echoed({R}) == {R} and ledger.unsettled == 0


@pytest.mark.parametrize("retried", [False, True])
def test_an_abort_in_a_retry_is_told_once(retried: bool) -> None:
    ledger = spoiled()
    if retried:
        ledger.retry(R, 2)
    ledger.request_ended(R)
    assert ledger.retry(R, 2) is None and not ledger.give_up(R)
    settled = ledger.apply([failed(attempt=1, child=2)] if retried else [], lambda *_: True)
    assert (settled.tell, settled.echo, settled.retry) == ({R}, set(), {})
    assert ledger.unsettled == 0 and nothing(ledger.apply([]))


# -- what is not, or no longer, a load's ----------------------------------------------------------------------


def test_an_echo_that_was_not_asked_for_ends_no_load() -> None:
    ledger = a_ledger()
    ledger.open_load(R, A)
    assert ledger.echoed({R}) == set()
    assert ledger.unsettled == 1


def test_a_report_of_an_older_attempt_is_late() -> None:
    ledger = a_ledger(ranks=1)
    ledger.open_load(R, A)
    ledger.apply([received()])
    assert ledger.open_load(R, A) == 1  # preempted meanwhile
    assert nothing(ledger.apply([received(attempt=0), failed(attempt=0), received(attempt=NO_ATTEMPT)]))
    assert ledger.dropped == {(A, Drop.LATE): 3}
    assert ledger.apply([received(attempt=1)]).tell == {R}


def test_a_request_has_one_load_at_a_time() -> None:
    ledger = a_ledger()
    ledger.open_load(R, A)
    with pytest.raises(IntegrityError):
        ledger.open_load(R, B)
    assert ledger.unsettled == 1
    ledger.apply([failed(0), failed(1)])
    with pytest.raises(IntegrityError):  # vLLM has not heard of the failure yet
        ledger.open_load(R, B)
    ledger.echoed({R})
    assert ledger.open_load(R, B) == 1


@pytest.mark.parametrize("last", [received(1), failed(1)])
def test_the_load_of_an_aborted_request_ends_as_a_plain_end(last: ChildEvent) -> None:
    ledger = a_ledger()
    ledger.open_load(R, A)
    ledger.apply([failed(0) if last.kind is EventKind.RECV_FAILED else received(0)])
    ledger.request_ended(R)
    assert ledger.unsettled == 1
    settled = ledger.apply([last])
    assert (settled.tell, settled.echo) == ({R}, set())
    assert ledger.unsettled == 0


def test_a_request_that_is_aborted_after_its_load_failed_is_told_by_the_echo() -> None:
    ledger = a_ledger(ranks=1)
    ledger.open_load(R, A)
    assert ledger.apply([failed()]).echo == {R}
    ledger.request_ended(R)
    assert ledger.unsettled == 1
    assert ledger.echoed({R}) == {R}
    assert ledger.unsettled == 0


def test_a_failed_synchronous_load_is_remembered_and_counted_once() -> None:
    ledger = a_ledger()
    both = [event(EventKind.SYNC_FAILED, rank=0), event(EventKind.SYNC_FAILED, rank=1)]
    assert nothing(ledger.apply(both))
    assert not ledger.may_load(R, A)
    assert ledger.failures == {A: 1}
    ledger.request_ended(R)
    ledger.apply(both)
    ledger.request_arrived(R)
    assert ledger.may_load(R, A), "a request that has ended leaves nothing behind"


def test_faults_count() -> None:
    ledger = a_ledger()
    ledger.apply([event(EventKind.FAULT, child=B, request=None)])
    assert ledger.failures == {B: 1}


# -- sends ----------------------------------------------------------------------------------------------------


def test_scenario_3_a_send_is_owed_by_each_child_and_each_rank() -> None:
    ledger = a_ledger()
    ledger.open_send(R, A, incarnations(0, 0), NOW)
    ledger.open_send(R, B, incarnations(0, 0), NOW)
    ledger.request_ended(R)
    assert nothing(ledger.apply([sent(0), sent(0), sent(0, B)]))
    assert ledger.apply([sent(1)]).sends == {(R, A)}
    assert nothing(ledger.apply([sent(1)]))
    assert ledger.apply([sent(1, B)]).sends == {(R, B)}
    assert ledger.unsettled == 0
    assert ledger.dropped[(A, Drop.UNKNOWN)] == 2


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("order", list(permutations([received(child=A), sent(child=B)])))
def test_scenario_2_aborted_with_a_load_and_a_send_open(order: tuple[ChildEvent, ...], together: bool) -> None:
    ledger = a_ledger(ranks=1)
    ledger.open_load(R, A)
    ledger.open_send(R, B, incarnations(0), NOW)
    ledger.request_ended(R)
    results = [ledger.apply(order)] if together else [ledger.apply([e]) for e in order]
    assert [r.tell for r in results if r.tell] == [{R}]
    assert [r.sends for r in results if r.sends] == [{(R, B)}]
    assert ledger.unsettled == 0


def test_a_send_that_was_reported_before_it_was_owed_settles_nothing() -> None:
    ledger = a_ledger()
    unasked = replace(sent(1), kind=EventKind.SEND_UNASKED)
    assert nothing(ledger.apply([sent(1), unasked]))
    ledger.open_send(R, A, incarnations(0, 0), NOW)
    ledger.request_ended(R)
    assert nothing(ledger.apply([unasked, sent(0)])), "rank 1 still reads, whatever it said too early"
    assert ledger.apply([sent(1)]).sends == {(R, A)}
    assert ledger.dropped[(A, Drop.UNKNOWN)] == 3


def test_a_send_is_settled_by_the_incarnation_that_reads_only() -> None:
    ledger = a_ledger(ranks=1)
    ledger.open_send(R, A, incarnations(1), NOW)
    ledger.request_ended(R)
    assert nothing(ledger.apply([sent(incarnation=0), sent(incarnation=2)]))
    assert ledger.dropped == {(A, Drop.LATE): 2}
    assert ledger.apply([sent(incarnation=1)]).sends == {(R, A)}


def test_death_settles_what_this_process_and_older_ones_owed_and_nothing_else() -> None:
    ledger = a_ledger()
    ledger.open_send(R, A, incarnations(1, 1), NOW)
    ledger.open_send(R, B, incarnations(1, 1), NOW)
    ledger.request_ended(R)
    older = [died(0, A, incarnation=0), died(1, A, incarnation=0)]
    assert nothing(ledger.apply(older)), "older processes held none of this"
    assert nothing(ledger.apply([died(0, A, incarnation=1)])), "rank 1 still reads"
    assert ledger.apply([died(1, A, incarnation=2)]).sends == {(R, A)}
    assert ledger.unsettled == 1, "the other child"
    assert nothing(ledger.apply([died(0, A, incarnation=1)]))


def test_death_settles_every_request() -> None:
    ledger = a_ledger(ranks=1)
    ledger.request_arrived(OTHER)
    for request in (R, OTHER):
        ledger.open_send(request, A, incarnations(0), NOW)
        ledger.request_ended(request)
    assert ledger.apply([died()]).sends == {(R, A), (OTHER, A)}


def test_an_id_that_is_used_again_before_the_first_send_is_settled() -> None:
    ledger = a_ledger()
    for _ in range(2):
        ledger.request_arrived(R)
        ledger.open_send(R, A, incarnations(0, 0), NOW)
        ledger.request_ended(R)
    assert ledger.unsettled == 2
    assert nothing(ledger.apply([sent(0), sent(0)]))
    assert ledger.apply([sent(1)]).sends == {(R, A)}
    assert ledger.apply([sent(1)]).sends == {(R, A)}
    assert ledger.unsettled == 0


def test_scenario_4_a_broken_promise_is_overdue_and_a_late_report_is_harmless() -> None:
    ledger = a_ledger(ranks=1)
    ledger.open_send(R, A, incarnations(0), NOW)
    ledger.open_send(R, B, incarnations(0), NOW)
    ledger.request_ended(R)
    limits = {A: 10.0, B: 20.0}
    assert ledger.overdue(NOW + 10, limits.__getitem__) == set()
    assert ledger.overdue(NOW + 11, limits.__getitem__) == {A}
    assert ledger.overdue(NOW + 21, limits.__getitem__) == {A, B}
    assert ledger.apply([died()]).sends == {(R, A)}
    assert ledger.overdue(NOW + 15, limits.__getitem__) == set()
    assert nothing(ledger.apply([sent()]))


def test_what_nobody_knows_is_dropped_and_counted() -> None:
    ledger = a_ledger()
    phantoms = [
        event(kind, request=OTHER) for kind in (EventKind.RECV_DONE, EventKind.RECV_FAILED, EventKind.SEND_DONE)
    ]
    assert nothing(ledger.apply([*phantoms, event(EventKind.SYNC_FAILED, request=OTHER), died()]))
    assert ledger.dropped == {(A, Drop.UNKNOWN): 3}
    assert not ledger.failures
