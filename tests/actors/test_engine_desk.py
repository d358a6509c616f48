"""The desk: orders and questions wait there until the engine says that it knows them; what it told last is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.actors import engine_desk
from raykv.actors.engine_desk import EngineDesk
from raykv.engine_messages import (
    ChainOrder,
    ChildOp,
    ChildView,
    EngineView,
    Errands,
    Hashed,
    HashOrder,
    OrderState,
    Progress,
    Story,
)
from raykv.errors import IntegrityError, RayKVError
from raykv.types import EngineId, RequestId

E = EngineId("e")
PAUSE = ChainOrder("1", ChildOp.PAUSE, "files")
PATIENCE = 30.0


def story(name: str, prompt: int = 0) -> Story:
    return Story(RequestId(name), E, 0.0, prompt, ())


def child(name: str, state: str = "up", incarnation: int = 0) -> ChildView:
    return ChildView(name, "X", "actor", state, True, True, incarnation)


def view(*children: ChildView, **more: Any) -> EngineView:
    return EngineView(E, "m", ("m",), "kv_both", 1, "n", "h", 0.0, 16, 100, 1, "first", children, **more)


def state(number: str, progress: Progress = Progress.DONE, detail: str = "") -> OrderState:
    return OrderState(number, progress, detail, 1.0)


def events(desk: EngineDesk, after: int = -1) -> list[tuple[str, str, str]]:
    return [(one.what, one.name, one.state) for one in desk.watch(after, 0.0)]


def test_its_name_is_for_people() -> None:
    assert repr(EngineDesk(EngineId("prefill-0"))) == "EngineDesk(prefill-0)"
    assert EngineDesk(E).owner() is None and EngineDesk(E).info()["pid"]


# -- orders ---------------------------------------------------------------------------------------------------


def test_an_order_is_fetched_until_its_state_is_told() -> None:
    desk = EngineDesk(E)
    assert desk.fetch(0.0) == Errands()
    waiting = desk.order(PAUSE)
    assert (waiting.number, waiting.progress) == ("1", Progress.WAITING) and "not fetched" in waiting.detail
    assert desk.fetch(0.0) == desk.fetch(0.0) == Errands(orders=(PAUSE,))
    desk.push(states=[state("1", Progress.RUNNING, "its loads end")])
    assert desk.fetch(0.0) == Errands()
    assert desk.order(PAUSE) == desk.order_state("1") == state("1", Progress.RUNNING, "its loads end")
    desk.push(states=[state("1")])
    assert desk.order(PAUSE).progress is Progress.DONE and desk.orders() == (state("1"),)
    desk.push(states=[state("1", Progress.RUNNING)])
    assert desk.orders() == (state("1"),), "what is final stays"
    desk.check_integrity()


def test_a_desk_that_was_started_again_hears_of_orders_it_never_saw() -> None:
    desk = EngineDesk(E)
    desk.push(states=[state("1")])
    assert desk.order(PAUSE) == state("1") and desk.fetch(0.0) == Errands()
    assert desk.order_state("2") is None


def test_bad_orders_change_nothing() -> None:
    desk = EngineDesk(E)
    desk.order(PAUSE)
    for wrong in (replace(PAUSE, op=ChildOp.REMOVE), replace(PAUSE, number=""), "pause"):
        with pytest.raises(RayKVError, match=r"another order|no order with a number"):
            desk.order(wrong)  # type: ignore[arg-type]
    assert [one.number for one in desk.orders()] == ["1"]


def test_orders_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_desk, "MAX_ORDERS", 3)
    monkeypatch.setattr(engine_desk, "MAX_FETCHED", 2)
    desk = EngineDesk(E)
    for number in "123":
        desk.order(replace(PAUSE, number=number))
    assert [one.number for one in desk.fetch(0.0).orders] == ["1", "2"]
    with pytest.raises(RayKVError, match="3 orders wait at engine e already"):
        desk.order(replace(PAUSE, number="4"))
    desk.push(states=[state("2")])
    desk.order(replace(PAUSE, number="4"))
    assert [one.number for one in desk.orders()] == ["1", "3", "4"]
    desk.push(states=[state("9")])
    assert [one.number for one in desk.orders()] == ["3", "4", "9"]
    desk.check_integrity()


# -- questions: each waits in a thread of its own ---------------------------------------------------------------


def asking(ask: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        found.append(ask())

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


@pytest.mark.process
def test_hashes_come_from_the_engine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_desk, "ANSWER_S", PATIENCE)
    desk, order = EngineDesk(E), HashOrder("7", (1, 2, 3))
    thread, found = asking(lambda: desk.hash(order))
    assert desk.fetch(PATIENCE) == desk.fetch(0.0) == Errands(hashes=(order,))
    desk.push(hashed=[Hashed("7", b"x")])
    thread.join(PATIENCE)
    assert found == [Hashed("7", b"x")] and desk.fetch(0.0) == Errands()
    assert desk.hash(order) == Hashed("7", b"x"), "a repeat is not asked again"
    assert desk.fetch(0.0) == Errands()
    desk.check_integrity()


def test_hashes_that_do_not_come_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_desk, "ANSWER_S", 0.0)
    monkeypatch.setattr(engine_desk, "MAX_QUESTIONS", 2)
    desk = EngineDesk(E)
    assert desk.hash(HashOrder("1", (1,))) is None
    assert desk.hash(HashOrder("2", (1,))) is None
    with pytest.raises(RayKVError, match="2 prompts wait"):
        desk.hash(HashOrder("3", (1,)))
    desk.push(hashed=[Hashed(str(number)) for number in range(5)])
    assert desk.hash(HashOrder("4", (1,))) == Hashed("4")
    desk.check_integrity()


def test_stories_are_found_by_the_clients_id_too() -> None:
    desk = EngineDesk(E, last_stories=2)
    desk.push(stories=[story("cmpl-a-0-11111111"), story("cmpl-b-0-22222222"), story("cmpl-bc-0-33333333")])
    assert desk.requests() == ("cmpl-b-0-22222222", "cmpl-bc-0-33333333")
    assert [one.request for one in desk.stories(1)] == ["cmpl-bc-0-33333333"]
    found = desk.story("b")
    assert found is not None and found.request == "cmpl-b-0-22222222"
    desk.push(stories=[story("cmpl-bc-1-44444444")])
    with pytest.raises(RayKVError, match=r"'bc' fits 2 requests.*Name one"):
        desk.story("bc")
    assert desk.story("") is None


@pytest.mark.process
def test_the_story_of_a_running_request_comes_from_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_desk, "ANSWER_S", PATIENCE)
    desk = EngineDesk(E)
    asked = [asking(lambda: desk.story("b")) for _ in range(2)]
    assert desk.fetch(PATIENCE) == Errands(stories=("b",))
    desk.push(told=[("b", story("cmpl-b-0-2", 9)), ("nobody", story("c"))])
    for thread, found in asked:
        thread.join(PATIENCE)
        assert found == [story("cmpl-b-0-2", 9)]
    desk.check_integrity()
    assert desk.fetch(0.0) == Errands() and desk.requests() == ()
    thread, found = asking(lambda: desk.story("b"))
    assert desk.fetch(PATIENCE).stories == ("b",)
    desk.push(stories=[story("cmpl-b-0-2", 10)], told=[("b", None)])
    thread.join(PATIENCE)
    assert found == [story("cmpl-b-0-2", 10)], "it ended meanwhile"
    thread, found = asking(lambda: desk.story("never"))
    assert desk.fetch(PATIENCE).stories == ("never",)
    desk.push(told=[("never", None)])
    thread.join(PATIENCE)
    assert found == [None]
    desk.check_integrity()


# -- what is seen ---------------------------------------------------------------------------------------------


def test_the_last_view_is_kept_and_changes_are_events() -> None:
    desk = EngineDesk(E)
    assert desk.view() is None and events(desk) == []
    desk.push(view(child("a"), child("b")))
    desk.push()
    assert desk.view() == view(child("a"), child("b"))
    desk.push(view(child("a"), child("b", "down"), running=3))
    assert desk.view() == view(child("a"), child("b", "down"), running=3)
    desk.push(view(child("b", "up", 1)))
    desk.order(PAUSE)
    desk.push(states=[state("1", Progress.RUNNING), state("1", Progress.RUNNING)])
    assert events(desk) == [
        ("child", "a", "up"), ("child", "b", "up"), ("child", "b", "down"), ("child", "b", "up"),
        ("child", "a", "gone"), ("order", "1", "waiting"), ("order", "1", "running"),
    ]  # fmt: skip
    last = desk.watch(-1, 0.0)[-1]
    assert events(desk, last.number - 1) == [("order", "1", "running")] and desk.watch(last.number, 0.0) == ()


@pytest.mark.process
def test_a_watch_waits_for_the_next_event() -> None:
    desk = EngineDesk(E)
    desk.order(PAUSE)
    last = desk.watch(-1, 0.0)[-1].number
    thread, found = asking(lambda: desk.watch(last, PATIENCE))
    desk.push(states=[state("1")])
    thread.join(PATIENCE)
    assert [one.state for one in found[0]] == ["done"]


def test_events_are_bounded_and_a_gap_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = EngineDesk(E)
    first = desk._last_event
    for number in range(engine_desk.MAX_EVENTS + 10):
        desk.push(states=[state(f"{number}")])
    seen = desk.watch(-1, 0.0)
    assert len(seen) == engine_desk.MAX_EVENTS and seen[0].number == first + 11
    assert len(desk.orders()) == engine_desk.MAX_ORDERS
    assert EngineDesk(E)._last_event > first, "a new desk's numbers are above"
    desk.check_integrity()


def test_a_broken_desk_is_found() -> None:
    desk = EngineDesk(E)
    desk.order(PAUSE)
    desk._orders.clear()
    with pytest.raises(IntegrityError, match="to be fetched that is not known"):
        desk.check_integrity()


numbers = st.sampled_from(["1", "2", "3", "4"])
calls = st.one_of(
    st.tuples(st.just("order"), st.builds(ChainOrder, numbers, st.sampled_from(ChildOp), st.sampled_from(["a", "b"]))),
    st.tuples(st.just("hash"), st.builds(HashOrder, numbers, st.just((1,)))),
    st.tuples(st.just("story"), st.sampled_from(["r", "r1", "s", ""])),
    st.tuples(st.just("states"), st.lists(st.builds(state, numbers, st.sampled_from(Progress)), max_size=3)),
    st.tuples(st.just("hashed"), st.lists(st.builds(Hashed, numbers), max_size=3)),
    st.tuples(st.just("stories"), st.lists(st.builds(story, st.sampled_from(["r1", "r2", "s1"])), max_size=3)),
    st.tuples(st.just("fetch"), st.just(0.0)),
)


@given(st.lists(calls, max_size=60))
def test_whatever_comes_it_stays_in_order(sequence: list[tuple[str, Any]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_desk, "ANSWER_S", 0.0)
        patch.setattr(engine_desk, "MAX_ORDERS", 3)
        patch.setattr(engine_desk, "MAX_QUESTIONS", 2)
        desk = EngineDesk(E, last_stories=2)
        final: dict[str, Progress] = {}
        for method, argument in sequence:
            try:
                if method in ("states", "hashed", "stories"):
                    desk.push(**{method: argument})
                else:
                    getattr(desk, method)(argument)
            except RayKVError:
                pass
            desk.check_integrity()
            now = {one.number: one.progress for one in desk.orders() if one.progress.final}
            assert all(final[number] is now[number] for number in final.keys() & now.keys()), "a final state changed"
            final = now
