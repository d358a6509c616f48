"""What empty steps may sleep."""

from __future__ import annotations

from raykv.core.idle_pause import LONGEST_S, SETTLING_S, SHARE, IdlePause


def test_a_step_that_runs_requests_never_sleeps() -> None:
    pause = IdlePause()
    assert pause.before_step(idle=False, awaited=False, now=0.0) == 0.0
    assert pause.before_step(idle=False, awaited=True, now=100.0) == 0.0


def test_a_wait_costs_its_share_and_never_more_than_the_bound() -> None:
    pause = IdlePause()
    assert pause.before_step(idle=True, awaited=True, now=10.0) == 0.0
    assert abs(pause.before_step(idle=True, awaited=True, now=10.05) - 0.05 * SHARE) < 1e-9
    assert pause.before_step(idle=True, awaited=True, now=20.0) == LONGEST_S


def test_what_nobody_waits_for_sleeps_at_once() -> None:
    assert IdlePause().before_step(idle=True, awaited=False, now=1.0) == SETTLING_S


def test_a_wait_ends_with_the_next_step_that_runs_something() -> None:
    pause = IdlePause()
    pause.before_step(idle=True, awaited=True, now=0.0)
    pause.before_step(idle=False, awaited=True, now=5.0)
    assert pause.before_step(idle=True, awaited=True, now=6.0) == 0.0
