"""When a hit is left alone: measured rates, and the way back."""

from __future__ import annotations

import pytest

from raykv.core.load_cost import LEAST_TOKENS, TRY_AGAIN, LoadCost
from raykv.types import RequestId

R = RequestId("r")
A, B = 0, 1


def measured(loads: float, computes: float) -> LoadCost:
    """Rates in tokens a second."""
    cost = LoadCost()
    load(cost, loads)
    compute(cost, computes)
    return cost


def load(cost: LoadCost, rate: float, child: int = A, well: bool = True) -> None:
    cost.load_begun(R, child, 1000, 5.0)
    cost.loads_ended([(R, child)], [(R, child)] if well else [], 5.0 + 1000 / rate)


def compute(cost: LoadCost, rate: float, tokens: int = 1000, at: float = 50.0) -> None:
    cost.step_begun(tokens, at)
    cost.step_ended(at + tokens / rate)


def test_a_child_that_loads_sooner_than_the_engine_computes_is_worth_it() -> None:
    cost = measured(loads=2000, computes=1000)
    assert all(cost.worth_it(A, 512) for _ in range(100))
    assert measured(loads=1000, computes=1000).worth_it(A, 512), "a tie is a hit"


def test_a_slow_child_is_left_alone_but_tried_again_now_and_then() -> None:
    cost = measured(loads=500, computes=1000)
    verdicts = [cost.worth_it(A, 512) for _ in range(3 * TRY_AGAIN)]
    assert [i + 1 for i, worth in enumerate(verdicts) if worth] == [TRY_AGAIN, 2 * TRY_AGAIN, 3 * TRY_AGAIN]
    assert cost.worth_it(B, 512), "nothing is known of B"


def test_a_slow_child_comes_back_when_its_tries_go_well() -> None:
    cost = measured(loads=500, computes=1000)
    asked = 0
    while not (cost.worth_it(A, 512) and cost.worth_it(A, 512)):
        asked += 1
        assert asked < 10 * TRY_AGAIN
        if asked % TRY_AGAIN == 0:
            load(cost, 4000)
    assert cost.load_rates[A] >= 1000


@pytest.mark.parametrize("known", ["nothing", "load", "compute"])
def test_nothing_is_left_alone_before_both_rates_are_known(known: str) -> None:
    cost = LoadCost()
    if known == "load":
        load(cost, 1)
    elif known == "compute":
        compute(cost, 1e6)
    assert all(cost.worth_it(A, 512) for _ in range(3 * TRY_AGAIN))


def test_a_failed_load_is_no_measure() -> None:
    cost = measured(loads=2000, computes=1000)
    load(cost, 1, well=False)
    cost.loads_ended([(R, B)], [(R, B)], 99.0)  # planned before rates were measured
    assert cost.load_rates == {A: 2000}


def test_the_newest_measure_counts_most_but_not_alone() -> None:
    cost = measured(loads=1000, computes=1000)
    load(cost, 2000)
    assert cost.load_rates[A] == pytest.approx(1200)
    compute(cost, 500, at=90.0)
    assert cost.prefill_rate == pytest.approx(900)


def test_a_step_of_decodes_tells_nothing_of_prompts() -> None:
    cost = measured(loads=1000, computes=1000)
    compute(cost, 1, tokens=LEAST_TOKENS - 1, at=90.0)
    assert cost.prefill_rate == 1000
    cost.step_ended(95.0)  # an output without a plan
    assert cost.prefill_rate == 1000


def test_a_step_planned_ahead_begins_when_the_one_before_it_ends() -> None:
    cost = LoadCost()
    cost.step_begun(1000, 10.0)
    cost.step_begun(1000, 10.1)
    cost.step_ended(11.0)
    cost.step_ended(12.0)
    assert cost.prefill_rate == pytest.approx(1000)
