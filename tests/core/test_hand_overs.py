"""Look-ups that wait for announced blocks: asked again until these are there, one answer each, no lease lost."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from raykv.core import vain_hints
from raykv.core.hand_overs import FIRST_PAUSE_S, LAST_PAUSE_S, HandOvers
from raykv.core.vain_hints import VainHints
from raykv.store_messages import HandOver, LookedUp, LookUp
from raykv.types import LeaseId, RequestId, StoreLife

WAIT_S = 10.0
LIFE = StoreLife("life")
R = RequestId("r#0")
HAND_OVER = HandOver(8, "raykv-store-x-00")
ASKED = LookUp(R, bytes(32 * 8), HAND_OVER)


def found(blocks: int, lease: int, life: StoreLife = LIFE, name: str = R) -> LookedUp:
    return LookedUp(life, RequestId(name), blocks, LeaseId(lease) if blocks else None)


def waiting() -> HandOvers:
    waits = HandOvers(WAIT_S)
    assert waits.begin(ASKED, 0.0) is ASKED
    return waits


def again(waits: HandOvers, now: float) -> LookUp:
    (asked,) = waits.due(now)
    return asked


def test_it_is_answered_when_all_is_there() -> None:
    waits = waiting()
    assert waits.next_at is None and not waits.tried(ASKED)
    assert waits.found(ASKED, found(3, 1), 1.0) is None
    assert waits.next_at == 1.0 + FIRST_PAUSE_S and waits.due(1.0) == []
    second = again(waits, waits.next_at)
    assert second.request != R and second.hashes == ASKED.hashes and waits.tried(second)
    assert waits.short(second, found(7, 9)) and not waits.short(second, found(8, 9))
    answer = waits.found(second, found(8, 2, name=second.request), 2.0)
    assert answer == found(8, 2), "under the name of the question"
    assert waits.take_spare() == [1] and waits.take_spare() == [] and not waits and waits.next_at is None


def test_what_is_not_announced_is_answered_at_once() -> None:
    waits, plain = waiting(), replace(ASKED, request=RequestId("s"), hand_over=None)
    waits.begin(plain, 0.0)
    assert waits.found(plain, found(1, 1, name="s"), 0.0) == found(1, 1, name="s")
    assert len(waits) == 1 and not waits.short(plain, found(0, 0)) and waits.time_left(plain, 0.0) > 1e9


def test_the_pauses_grow() -> None:
    waits, now, pauses = waiting(), 0.0, []
    asked = ASKED
    for _ in range(8):
        assert waits.found(asked, found(0, 0), now) is None
        assert waits.next_at is not None
        pauses.append(waits.next_at - now)
        now = waits.next_at
        asked = again(waits, now)
    assert [round(pause, 6) for pause in pauses[:4]] == [0.01, 0.02, 0.04, 0.08]
    assert max(pauses) <= LAST_PAUSE_S + 1e-6


def test_when_time_is_over_the_best_is_the_answer() -> None:
    waits = waiting()
    assert waits.found(ASKED, found(5, 1), 1.0) is None
    second = again(waits, 2.0)
    assert waits.found(second, found(2, 2), 3.0) is None, "less than before: a peer that has gone"
    assert waits.take_spare() == [2]
    assert waits.over(WAIT_S - 0.1) == [] and waits.over(WAIT_S) == [found(5, 1)]
    assert not waits and waits.due(WAIT_S) == []


def test_time_is_over_while_it_is_being_asked() -> None:
    waits = waiting()
    assert waits.found(ASKED, found(5, 1), 1.0) is None
    second = again(waits, 2.0)
    assert waits.next_at == WAIT_S and waits.over(WAIT_S) == [found(5, 1)]
    assert waits.found(second, found(8, 2), WAIT_S + 1) is None, "one answer"
    assert waits.take_spare() == [2]


def test_the_first_answer_is_waited_for() -> None:
    waits = waiting()
    assert waits.over(WAIT_S) == [] and waits.next_at is None
    assert waits.found(ASKED, found(5, 1), WAIT_S) == found(5, 1)


def test_a_store_that_is_lost_ends_it() -> None:
    waits = waiting()
    assert waits.found(ASKED, found(5, 1), 1.0) is None
    assert waits.found(again(waits, 2.0), found(0, 0), 2.0, final=True) == found(5, 1)
    waits = waiting()
    assert waits.found(ASKED, found(5, 1), 1.0) is None
    new = StoreLife("new")
    assert waits.found(again(waits, 2.0), found(0, 0, new), 2.0, final=True) == found(0, 0, new)


def test_nobody_waits_any_more() -> None:
    waits = waiting()
    assert waits.found(ASKED, found(5, 1), 1.0) is None
    second = again(waits, 2.0)
    waits.drop(R)
    waits.drop(R)
    assert waits.found(second, found(8, 2), 3.0) is None and waits.over(WAIT_S) == []
    assert waits.take_spare() == [1, 2] and waits.next_at is None


def test_hints_of_a_store_that_come_to_nothing_are_passed_over_for_a_while() -> None:
    waits, now = HandOvers(WAIT_S), 0.0

    def wait(began: float, blocks: int = 0) -> bool:
        """Whether it was waited for."""
        asked = waits.begin(ASKED, began)
        if asked.hand_over is None:
            return False
        assert waits.found(asked, found(blocks, 1), began) is None
        assert waits.over(began + WAIT_S) == [found(blocks, 1)]
        return True

    for _ in range(vain_hints.MOST_IN_VAIN):
        assert waits.given_up == [] and wait(now)
        now += WAIT_S
    assert waits.given_up == [HAND_OVER.store] and not wait(now)
    other = replace(ASKED, hand_over=HandOver(8, "raykv-store-y-00"))
    assert waits.begin(other, now) is other
    waits.drop(R)
    now += vain_hints.PAUSE_S
    assert wait(now, blocks=1), "one finds out"
    assert wait(now + WAIT_S) and wait(now + 2 * WAIT_S), "and all is forgiven"


def test_several_in_vain_at_once_count_as_one() -> None:
    hints = VainHints()
    assert [hints.in_vain("s", 0.0, now) for now in (10.0, 10.1, 10.2, 11.0)] == [False] * 4
    assert hints.may("s", 11.0)
    for number in range(2 * vain_hints.MOST_STORES):
        hints.in_vain(f"s{number}", 0.0, 10.0)
    assert len(hints._records) <= vain_hints.MOST_STORES


def test_without_a_time_nothing_waits() -> None:
    assert HandOvers(0.0).begin(ASKED, 0.0) == replace(ASKED, hand_over=None)


@given(st.lists(st.sampled_from(["short", "all", "miss", "wait", "drop", "final"]), max_size=40))
def test_one_answer_and_no_lease_is_lost(events: list[str]) -> None:
    waits, now, asked = waiting(), 0.0, [ASKED]
    granted: list[int] = []
    answers: list[LookedUp] = []
    spare: list[int] = []
    dropped = False
    for event in events:
        now += 0.5
        if event == "drop":
            waits.drop(R)
            dropped = True
        elif event == "wait":
            asked += waits.due(now)
            answers += waits.over(now)
        elif asked:
            blocks = {"short": 4, "all": 8, "miss": 0, "final": 0}[event]
            granted += [len(granted)] if blocks else []
            one = asked.pop()
            answer = waits.found(one, found(blocks, len(granted) - 1, name=one.request), now, event == "final")
            answers += [answer] if answer is not None else []
        spare += waits.take_spare()
    if asked:
        answer = waits.found(asked.pop(), found(0, 0), now, final=True)
        answers += [answer] if answer is not None else []
    answers += waits.over(float("inf"))
    spare += waits.take_spare()
    assert len(answers) == 1 or (dropped and not answers)
    held = [answer.lease for answer in answers if answer.lease is not None]
    assert sorted(spare + held) == granted and not waits
