"""Turns: one of a group at a time, none forgotten, none for ever."""

from __future__ import annotations

from raykv.core.rolling import PATIENCE_S, Replica, Rolling


def replica(name: str, *, ready: bool = False, moving: bool = False, failures: int = 0, group: str = "g") -> Replica:
    return Replica(group, name, ready, moving, failures)


def old(name: str, group: str = "g") -> Replica:
    """It runs, as an older spec wanted it."""
    return replica(name, group=group)


def test_the_next_one_waits_until_the_first_is_ready() -> None:
    rolling = Rolling()
    rolling.look([old("a"), old("b")], 0)
    assert rolling.take("g", "a", 0)
    assert not rolling.take("g", "b", 0)
    rolling.look([replica("a", moving=True), old("b")], 1)  # it is being emptied, for long
    rolling.look([replica("a", moving=True), old("b")], 1000)
    assert not rolling.take("g", "b", 1000)
    rolling.look([old("a"), old("b")], 1001)  # it has ended and is not started yet
    assert not rolling.take("g", "b", 1001)
    rolling.look([replica("a", moving=True), old("b")], 1002)
    assert not rolling.take("g", "b", 1002)
    rolling.look([replica("a", ready=True), old("b")], 1003)
    assert rolling.take("g", "b", 1003)


def test_groups_do_not_wait_for_each_other() -> None:
    rolling = Rolling()
    rolling.look([old("a"), old("x", "h")], 0)
    assert rolling.take("g", "a", 0) and rolling.take("h", "x", 0)


def test_one_that_fails_in_its_turn_keeps_it() -> None:
    """A change that does not work must not take the others away."""
    rolling = Rolling()
    rolling.look([replica("a", failures=3), old("b")], 0)
    assert rolling.take("g", "a", 0)
    for minute in range(1, 60):
        rolling.look([replica("a", failures=4), old("b")], 60.0 * minute)
        assert not rolling.take("g", "b", 60.0 * minute)
    rolling.look([replica("a", failures=4, ready=True), old("b")], 4000)
    assert rolling.take("g", "b", 4000)


def test_one_that_waits_for_what_another_holds_lets_it_go_first() -> None:
    rolling = Rolling()
    rolling.look([replica("a", failures=3), old("b")], 0)
    assert rolling.take("g", "a", 0)
    rolling.look([replica("a", failures=3), old("b")], PATIENCE_S - 1)
    assert not rolling.take("g", "b", PATIENCE_S - 1)
    rolling.look([replica("a", failures=3), old("b")], PATIENCE_S)
    assert rolling.take("g", "b", PATIENCE_S)


def test_one_that_is_not_wanted_any_more_holds_nobody_up() -> None:
    rolling = Rolling()
    rolling.look([old("a"), old("b")], 0)
    assert rolling.take("g", "a", 0)
    rolling.look([old("b")], 1)
    assert rolling.take("g", "b", 1)


def test_one_that_starts_by_itself_has_its_turn() -> None:
    """Of a new Controller in the middle of a change, and of an engine that died in it."""
    rolling = Rolling()
    rolling.look([replica("a", moving=True), old("b")], 0)
    assert not rolling.take("g", "b", 0)
    rolling.look([replica("a", ready=True), old("b")], 1)
    assert rolling.take("g", "b", 1)
