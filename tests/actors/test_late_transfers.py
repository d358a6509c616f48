"""Memory of late transfers goes back once, when they have ended."""

from __future__ import annotations

from raykv.actors.late_transfers import LateTransfers


class Work:
    def __init__(self) -> None:
        self.over: set[str] = set()
        self.given: list[str] = []

    def ended(self, name: str) -> bool:
        if name in self.over:
            self.given.append(name)
        return name in self.over


def test_what_has_ended_is_not_late() -> None:
    work = Work()
    late = LateTransfers(work.ended)
    work.over = {"a"}
    late.let_go("a")
    assert work.given == ["a"] and late.reap() == 0
    assert work.given == ["a"], "it was given back once"


def test_what_runs_is_given_back_when_it_has_ended() -> None:
    work = Work()
    late = LateTransfers(work.ended)
    late.let_go("a")
    late.let_go("b")
    assert (late.reap(), work.given) == (2, [])
    work.over = {"b"}
    assert (late.reap(), work.given) == (1, ["b"])
    work.over = {"a", "b"}
    assert (late.reap(), work.given) == (0, ["b", "a"])
