"""Composed loads: scenario 9, who may stand where in one, and what is left when vLLM gives fewer tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.config import LoadPolicy
from raykv.core.load_plan import Answer, Part, cut
from raykv.core.lookups import MISS, Choice, LookupBook, Outcome
from raykv.types import RequestId
from tests.support.examples import examples

R = RequestId("r")
A, B, C = 0, 1, 2
BLOCK = 16
PENDING = Choice(Outcome.PENDING)


@dataclass
class Child:
    """It has the tokens [0, held). `kind`: loads any 'range', or to its 'own' end only, or at once ('sync')."""

    held: int
    kind: str = "range"
    late: int = 0
    """How often it says "not yet" first."""
    limit: float = 9.0


class Walked:
    """The children of one request, polled as the scheduler half does."""

    def __init__(self, *children: Child, num_tokens: int = 10_000) -> None:
        ranged = [i for i, child in enumerate(children) if child.kind == "range"]
        self.book = LookupBook(LoadPolicy.COMPOSE, [child.limit for child in children], BLOCK, ranged)
        self.children, self.num_tokens = children, num_tokens
        self.asked: list[tuple[int, int]] = []
        """(child, computed tokens) of each question, in order."""
        self.polls = [0] * len(children)

    def poll(self, now: float = 0, computed: int = 0, without: tuple[int, ...] = ()) -> Choice:
        eligible = {i: i not in without for i in range(len(self.children))}
        for i, base in self.book.to_ask(R, computed, self.num_tokens, eligible, now):
            child = self.children[i]
            self.asked.append((i, base))
            self.polls[i] += 1
            tokens = None if self.polls[i] <= child.late else max(0, child.held - base)
            self.book.answer(R, i, Answer(tokens, child.kind != "sync", base))
        return self.book.choose(R, now)


def load(*parts: tuple[int, int, int], is_async: bool = True) -> Choice:
    return Choice(Outcome.HIT, tuple(Part(*part) for part in parts), is_async)


def test_scenario_9() -> None:
    walked = Walked(Child(100), Child(512))
    assert walked.poll() == load((A, 0, 96), (B, 96, 512))
    assert walked.poll().tokens == 512
    assert walked.asked == [(A, 0), (B, 96)], "each child is asked once"


@pytest.mark.parametrize(
    ("children", "plan"),
    [
        ([Child(100), Child(512, "own")], load((A, 0, 96), (B, 96, 512))),
        ([Child(100, "own"), Child(512)], load((B, 0, 512))),  # A can't be stopped at 96
        ([Child(512, "own"), Child(100)], load((A, 0, 512))),
        ([Child(512), Child(512)], load((A, 0, 512))),  # a tie goes to the earlier child
        ([Child(512, "own"), Child(512)], load((A, 0, 512))),
        ([Child(96), Child(200), Child(512)], load((A, 0, 96), (B, 96, 192), (C, 192, 512))),
        ([Child(96), Child(200, "own"), Child(512)], load((A, 0, 96), (C, 96, 512))),
        ([Child(96), Child(512, "own"), Child(200)], load((A, 0, 96), (B, 96, 512))),
        ([Child(96), Child(300, "own"), Child(300, "own")], load((A, 0, 96), (B, 96, 300))),
        ([Child(96), Child(100, "own")], load((A, 0, 96))),  # less than a block more
        ([Child(96), Child(111, "own")], load((A, 0, 96))),
        ([Child(96), Child(112, "own")], load((A, 0, 96), (B, 96, 112))),
        ([Child(90, "own"), Child(80), Child(96)], load((A, 0, 90))),  # two would reach 6 tokens further
        ([Child(90, "own"), Child(80), Child(106)], load((B, 0, 80), (C, 80, 106))),
        ([Child(10), Child(100)], load((B, 0, 100))),  # A has no whole block
        ([Child(10), Child(0)], load((A, 0, 10))),
        ([Child(10, "own"), Child(0)], load((A, 0, 10))),
        ([Child(0), Child(512, "own")], load((B, 0, 512))),
        ([Child(0), Child(0, "sync")], MISS),
    ],
)
def test_who_loads_what(children: list[Child], plan: Choice) -> None:
    assert Walked(*children).poll() == plan


def test_what_vllm_has_itself_is_in_front() -> None:
    assert Walked(Child(100), Child(512)).poll(computed=32) == load((A, 32, 96), (B, 96, 512))
    assert Walked(Child(100), Child(512)).poll(computed=96) == load((B, 96, 512))
    assert Walked(Child(100), Child(512)).poll(computed=512) == MISS


# -- a synchronous answer -------------------------------------------------------------------------------------


def test_a_synchronous_child_wins_only_if_it_is_longer_alone() -> None:
    assert Walked(Child(96), Child(512, "sync")).poll() == load((B, 0, 512), is_async=False)
    assert Walked(Child(512, "sync"), Child(96)).poll() == load((A, 0, 512), is_async=False)
    assert Walked(Child(96), Child(300, "sync"), Child(300, "own")).poll() == load((A, 0, 96), (C, 96, 300))
    assert Walked(Child(96), Child(96, "sync")).poll() == load((A, 0, 96))
    assert Walked(Child(300, "sync"), Child(300, "sync")).poll() == load((A, 0, 300), is_async=False)


def test_a_synchronous_child_is_last_asked_for_what_it_would_load() -> None:
    walked = Walked(Child(96), Child(512, "sync"), Child(512, "own", late=1))
    assert walked.poll() == PENDING
    assert walked.asked == [(A, 0), (B, 96), (B, 0), (C, 96)]
    assert walked.poll() == load((A, 0, 96), (C, 96, 512))
    assert walked.asked[4:] == [(C, 96)]


# -- answers that are not there yet ---------------------------------------------------------------------------


def test_who_is_asked_again_when_an_earlier_child_has_answered() -> None:
    walked = Walked(Child(100, late=2), Child(512))
    assert [walked.poll(), walked.poll(), walked.poll()] == [PENDING, PENDING, load((A, 0, 96), (B, 96, 512))]
    assert walked.asked == [(A, 0), (B, 0), (A, 0), (A, 0), (B, 96)], "once for each number of computed tokens"


def test_a_late_child_that_could_bring_more_is_waited_for_within_its_limit() -> None:
    walked = Walked(Child(96), Child(512, "own", late=99, limit=5))
    assert [walked.poll(0), walked.poll(4.9)] == [PENDING, PENDING]
    assert walked.poll(5) == load((A, 0, 96))
    assert walked.book.timed_out == {B: 1}
    assert walked.poll(6) == load((A, 0, 96)) and walked.book.timed_out == {B: 1}


def test_the_first_child_may_run_out_of_time_too() -> None:
    walked = Walked(Child(96, late=99, limit=1), Child(512))
    assert [walked.poll(0), walked.poll(1)] == [PENDING, load((B, 0, 512))]


def test_a_late_child_that_can_bring_nothing_is_not_waited_for() -> None:
    assert Walked(Child(96), Child(512, late=99), num_tokens=100).poll() == load((A, 0, 96))
    assert Walked(Child(96), Child(512, late=99), num_tokens=112).poll() == PENDING, "it could have a block more"


def test_a_child_that_may_not_be_used_leaves_no_gap() -> None:
    walked = Walked(Child(96), Child(200), Child(512))
    assert walked.poll(without=(A,)) == load((B, 0, 192), (C, 192, 512))
    assert walked.poll(without=(B,)) == load((A, 0, 96), (C, 96, 512))
    assert walked.poll(without=(A, B, C)) == MISS
    assert Walked(Child(96), Child(9, late=99)).poll(without=(B,)) == load((A, 0, 96))


def test_a_child_that_does_not_answer_at_all_is_passed_over() -> None:
    """One that has never heard of the request is not asked."""
    book = LookupBook(LoadPolicy.COMPOSE, [9, 9], BLOCK, [A, B])
    for child, base in book.to_ask(R, 0, 1000, {A: True, B: True}, 0):
        if child == B:
            book.answer(R, B, Answer(64 - base, True, base))
    assert book.choose(R, 0) == load((B, 0, 64))


def test_other_computed_tokens_are_another_question() -> None:
    walked = Walked(Child(100), Child(512))
    walked.poll()
    assert walked.poll(computed=64) == load((A, 64, 96), (B, 96, 512))
    assert walked.asked == [(A, 0), (B, 96), (A, 64)], "B goes on where it did before"


# -- what is cut off ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "left"),
    [
        (512, [(A, 0, 96), (B, 96, 192), (C, 192, 512)]),
        (200, [(A, 0, 96), (B, 96, 192), (C, 192, 200)]),
        (192, [(A, 0, 96), (B, 96, 192)]),
        (97, [(A, 0, 96), (B, 96, 97)]),
        (96, [(A, 0, 96)]),
        (50, [(A, 0, 50)]),
        (0, []),
    ],
)
def test_fewer_tokens_than_promised(tokens: int, left: list[tuple[int, int, int]]) -> None:
    parts = (Part(A, 0, 96), Part(B, 96, 192), Part(C, 192, 512))
    assert cut(parts, tokens) == tuple(Part(*part) for part in left)
    assert cut((), tokens) == ()


# -- any children ---------------------------------------------------------------------------------------------

CHILDREN = st.lists(
    st.builds(
        Child,
        held=st.one_of(st.sampled_from([0, 16, 48, 64, 96]), st.integers(0, 120)),
        kind=st.sampled_from(["range", "range", "own", "sync"]),
        late=st.sampled_from([0, 0, 1, 3, 99]),
        limit=st.sampled_from([1.0, 2.0, 4.0]),
    ),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=examples(50))
@given(children=CHILDREN, computed=st.sampled_from([0, 16, 48]), without=st.sets(st.integers(0, 4)))
def test_a_plan_has_no_gap_and_reaches_as_far_as_any_child(
    children: list[Child], computed: int, without: set[int]
) -> None:
    walked = Walked(*children)
    for now in range(6):
        choice = walked.poll(now, computed, tuple(without))
        if choice.outcome is not Outcome.PENDING:
            break
    assert choice.outcome is not Outcome.PENDING, "all limits are over"
    assert walked.poll(now, computed, tuple(without)) == choice
    at = computed
    for i, part in enumerate(choice.parts):
        child, last = children[part.child], i == len(choice.parts) - 1
        assert part.begin == at < part.end <= child.held, "no gap, no overlap, nothing that it has not"
        assert part.child not in without
        assert part.end == child.held if child.kind != "range" else part.tokens >= BLOCK or last
        assert last or (child.kind == "range" and part.end % BLOCK == 0)
        assert (child.kind == "sync") == (not choice.is_async)
        # The last question to a contributor is the one for its range: it may remember that only.
        assert [base for asked, base in walked.asked if asked == part.child][-1] == part.begin
        at = part.end
    assert [part.child for part in choice.parts] == sorted({part.child for part in choice.parts})
    in_time = [c.held for i, c in enumerate(children) if c.late == 0 and i not in without]
    assert at > max([computed, *in_time]) - BLOCK
    if choice.parts and not choice.is_async:
        sync = {i for i, c in enumerate(children) if c.kind == "sync"}
        rest = Walked(*children)
        for earlier in range(now + 1):
            composed = rest.poll(earlier, computed, tuple(without | sync))
        assert at > computed + composed.tokens, "only a longer one beats what the others would load together"
    for i, child in enumerate(children):
        bases = {base for asked, base in walked.asked if asked == i}
        assert walked.polls[i] <= min(child.late, now) + len(bases) + 1
