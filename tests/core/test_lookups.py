"""Who loads: scenario 8, and what keeps a queue of requests moving."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.config import LoadPolicy
from raykv.core.load_plan import Answer, Part
from raykv.core.lookups import Choice, LookupBook, Outcome
from raykv.types import RequestId
from tests.support.examples import examples

R = RequestId("r")
A, B = 0, 1
FIRST, LONGEST = LoadPolicy.FIRST, LoadPolicy.LONGEST


class Children:
    """Children that are polled as the scheduler half does: each answers from a script, its last entry for ever."""

    def __init__(self, book: LookupBook, *scripts: list[int | None]) -> None:
        self.book, self.scripts = book, [list(script) for script in scripts]
        self.asked: Counter[int] = Counter()

    def poll(self, now: float, computed: int = 0, eligible: tuple[bool, ...] | None = None) -> Choice:
        chosen = eligible or (True,) * len(self.scripts)
        for child, base in self.book.to_ask(R, computed, 10_000, dict(enumerate(chosen)), now):
            assert base == computed
            self.asked[child] += 1
            script = self.scripts[child]
            tokens = script.pop(0) if len(script) > 1 else script[0]
            self.book.answer(R, child, Answer(tokens, True, computed))
        return self.book.choose(R, now)


def hit(child: int, tokens: int) -> Choice:
    return Choice(Outcome.HIT, (Part(child, 0, tokens),), True)


PENDING, MISS = Choice(Outcome.PENDING), Choice(Outcome.MISS)


def test_scenario_8_first_takes_the_hit_that_is_there() -> None:
    children = Children(LookupBook(FIRST, [9, 9]), [64], [None, None, None, 4096])
    assert children.poll(0) == hit(A, 64)
    assert children.asked == {A: 1, B: 1}


def test_scenario_8_longest_waits_for_three_polls() -> None:
    children = Children(LookupBook(LONGEST, [9, 9]), [64], [None, None, None, 4096])
    assert [children.poll(i) for i in range(4)] == [PENDING, PENDING, PENDING, hit(B, 4096)]
    assert children.asked == {A: 1, B: 4}, "a child that has answered is not asked again"
    assert children.poll(4) == hit(B, 4096)
    assert children.asked == {A: 1, B: 4}


def test_after_clear_everybody_is_asked_again() -> None:
    children = Children(LookupBook(FIRST, [9, 9]), [64, 32], [16])
    assert children.poll(0) == hit(A, 64)
    children.book.clear()
    assert len(children.book) == 0 and children.book.chosen(R) is None
    assert children.poll(1) == hit(A, 32)
    assert children.asked == {A: 2, B: 2}


def test_scenario_8_with_a_deadline_of_one_step() -> None:
    children = Children(LookupBook(LONGEST, [9, 1]), [64], [None, None, None, 4096])
    assert [children.poll(0), children.poll(1)] == [PENDING, hit(A, 64)]
    assert children.book.timed_out == {B: 1}
    assert children.poll(2) == hit(A, 64)
    assert children.asked == {A: 1, B: 2}, "a child that was too late is not asked again"
    assert children.book.timed_out == {B: 1}


@pytest.mark.parametrize("policy", [FIRST, LONGEST])
def test_the_first_child_may_take_its_time_too(policy: LoadPolicy) -> None:
    children = Children(LookupBook(policy, [2, 9]), [None], [64])
    assert [children.poll(i) for i in range(3)] == [PENDING, PENDING, hit(B, 64)]


def test_of_two_equal_hits_the_first_child_wins() -> None:
    assert Children(LookupBook(LONGEST, [9, 9]), [64], [64]).poll(0) == hit(A, 64)


@pytest.mark.parametrize("policy", [FIRST, LONGEST])
def test_a_child_that_is_not_eligible_is_neither_chosen_nor_waited_for(policy: LoadPolicy) -> None:
    assert Children(LookupBook(policy, [9, 9]), [None], [64]).poll(0, eligible=(False, True)) == hit(B, 64)
    assert Children(LookupBook(policy, [9, 9]), [4096], [64]).poll(0, eligible=(False, True)) == hit(B, 64)
    assert Children(LookupBook(policy, [9, 9]), [4096], [64]).poll(0, eligible=(False, False)) == MISS


def test_no_hit_anywhere() -> None:
    assert Children(LookupBook(FIRST, [9, 9]), [0], [0]).poll(0) == MISS


def test_asked_once_for_each_number_of_computed_tokens() -> None:
    children = Children(LookupBook(FIRST, [9, 9]), [64], [128])
    children.poll(0)
    children.poll(1)
    assert children.asked == {A: 1, B: 1}
    children.poll(2, computed=16)
    children.poll(3, computed=16)
    assert children.asked == {A: 2, B: 2}
    children.poll(4, computed=0)
    assert children.asked == {A: 3, B: 3}


def test_a_choice_is_taken_once() -> None:
    children = Children(LookupBook(FIRST, [9, 9]), [64], [0])
    children.poll(0)
    assert children.book.chosen(R) == hit(A, 64)
    assert children.poll(1) == hit(A, 64), "blocks could not be allocated, vLLM asks again"
    assert children.book.take(R) == hit(A, 64)
    assert len(children.book) == 0
    assert children.book.take(R) == MISS, "vLLM may call a second time with 0 tokens"
    assert children.book.chosen(R) is None
    children.poll(2)
    assert children.asked == {A: 2, B: 2}, "a request that comes back is looked up anew"


def test_while_a_look_up_is_open_again_the_older_choice_is_gone() -> None:
    children = Children(LookupBook(FIRST, [9]), [64, None])
    assert children.poll(0) == hit(A, 64)
    assert children.poll(1, computed=16) == PENDING
    assert children.book.chosen(R) is None


def test_a_forgotten_request_leaves_nothing() -> None:
    book = LookupBook(FIRST, [9])
    Children(book, [64]).poll(0)
    book.forget(R)
    assert (len(book), book.chosen(R), book.take(R)) == (0, None, MISS)
    book.forget(R)


@settings(deadline=None, max_examples=examples(30))
@given(
    policy=st.sampled_from([FIRST, LONGEST]),
    limits=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    data=st.data(),
)
def test_every_look_up_ends_by_its_limits_with_the_right_child(
    policy: LoadPolicy, limits: list[int], data: st.DataObject
) -> None:
    """`late[c]`: the poll at which child c knows its `tokens[c]`."""
    size = len(limits)
    late = data.draw(st.lists(st.integers(0, 8), min_size=size, max_size=size))
    tokens = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    children = Children(LookupBook(policy, limits), *([None] * n + [t] for n, t in zip(late, tokens, strict=True)))
    choices = []
    for now in range(7):
        choices.append(children.poll(now))
        if choices[-1].outcome is not Outcome.PENDING:
            break
    final, now = choices[-1], len(choices) - 1
    assert final.outcome is not Outcome.PENDING, "all limits are over at 5"
    # Certainly known: a child that is late is given up when its turn comes, not before.
    known = [t if n <= min(limit, now) else 0 for n, t, limit in zip(late, tokens, limits, strict=True)]
    if final.outcome is Outcome.MISS:
        assert not any(known)
    else:
        (part,) = final.parts
        assert late[part.child] <= now and tokens[part.child] == final.tokens > 0
        assert final.tokens >= max(known) if policy is LONGEST else not any(known[: part.child])
    for child in range(size):
        assert children.asked[child] <= min(late[child], now) + 1
