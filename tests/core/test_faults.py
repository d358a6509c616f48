"""When a child that fails is switched off, for how long, and when that is forgotten."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.core.faults import FaultWindow, Verdict
from tests.support.examples import examples

ON = Verdict(off=False, pause_s=0.0)


def window(max_faults: int = 3) -> FaultWindow:
    return FaultWindow(max_faults, window_s=60, retry_s=5, max_retry_s=40)


def off(pause: float) -> Verdict:
    return Verdict(off=True, pause_s=pause)


def test_switched_off_at_the_last_fault_allowed_with_doubling_pauses() -> None:
    faults = window()
    assert [faults.fault(t) for t in range(7)] == [ON, ON, off(5), off(10), off(20), off(40), off(40)]


def test_one_fault_may_be_too_many() -> None:
    assert window(max_faults=1).fault(0) == off(5)


def test_faults_that_are_far_apart_do_not_add_up() -> None:
    faults = window()
    assert [faults.fault(t * 31.0) for t in range(10)] == [ON] * 10


def test_the_edge_of_the_window_is_inside() -> None:
    faults = window()
    assert [faults.fault(t) for t in (0, 30, 60)] == [ON, ON, off(5)]
    faults = window()
    assert [faults.fault(t) for t in (0, 30, 60.1)] == [ON, ON, ON]


def test_a_quiet_time_resets_the_pause() -> None:
    faults = window()
    for t in range(5):
        faults.fault(t)
    assert [faults.fault(t) for t in (50, 100)] == [off(40), ON], "not quiet long enough to forget the pauses"
    assert [faults.fault(t) for t in (101, 102)] == [off(40), off(40)]
    assert [faults.fault(t) for t in (183, 184, 185)] == [ON, ON, off(5)]


@settings(deadline=None, max_examples=examples(30))
@given(st.lists(st.floats(0, 100), max_size=30))
def test_it_is_off_exactly_when_the_window_is_full(gaps: list[float]) -> None:
    faults, now, times = window(), 0.0, []
    for gap in gaps:
        now += gap
        times.append(now)
        verdict = faults.fault(now)
        recent = [t for t in times if now - t <= 60]
        assert verdict.off == (len(recent) >= 3)
        assert (5 <= verdict.pause_s <= 40) if verdict.off else verdict.pause_s == 0
