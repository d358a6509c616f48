"""The asker holds an answer back while the store looks at other nodes: one answer a question, within its own limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raykv.actors.store_call import Done
from raykv.actors.store_link import StoreAsker
from raykv.errors import HostDied
from raykv.store_messages import Attached, LookedUp, LookUp, Medium, Settle
from raykv.types import EngineId, LeaseId, RequestId, StoreLife
from tests.support.waiting import eventually

E, LIFE = EngineId("e"), StoreLife("life")
PATIENCE = 30.0
ASKED = LookUp(RequestId("r"), bytes(96))
HERE = LookedUp(LIFE, ASKED.request, 1, LeaseId(5), (Medium.HOST,), more=True)
MISS = LookedUp(LIFE, ASKED.request, 0, more=True)
ALL = LookedUp(LIFE, ASKED.request, 3, LeaseId(5), (Medium.HOST, Medium.PEER, Medium.PEER))


class Store:
    """Answers at once; `reach` is answered by the test."""

    name = "here"

    def __init__(self, have: LookedUp) -> None:
        self.have = have
        self.reaches: list[tuple[tuple[Any, ...], Done]] = []
        self.released: list[LeaseId] = []

    def submit(self, method: str, *args: Any, done: Done) -> None:
        if method == "reach":
            self.reaches.append((args, done))
        elif method == "look_ups":
            done([self.have for _ in args[1]], None)
        else:
            settle: Settle = args[1]
            self.released += settle.releases
            done(LIFE, None)

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        raise AssertionError(method)

    def process(self, attached: Attached) -> None:
        return None


@pytest.fixture
def ask() -> Iterator[Callable[..., tuple[Store, StoreAsker, list[LookedUp]]]]:
    askers: list[StoreAsker] = []

    def start(have: LookedUp, reach_s: float) -> tuple[Store, StoreAsker, list[LookedUp]]:
        store = Store(have)
        asker = StoreAsker(lambda: store, E, PATIENCE, reach_s)
        askers.append(asker)
        assert asker.wait_tried(PATIENCE)
        asker.ask(ASKED)
        return store, asker, []

    yield start
    for asker in askers:
        asker.close()


Ask = Callable[..., tuple[Store, StoreAsker, list[LookedUp]]]


def test_the_longer_answer_is_given_alone(ask: Ask) -> None:
    store, asker, found = ask(HERE, PATIENCE)
    eventually(lambda: store.reaches)
    assert asker.take_answers() == []
    (engine, look_up, have, limit), done = store.reaches[0]
    assert (engine, look_up, have) == (E, ASKED, HERE) and 0 < limit <= PATIENCE
    done(ALL, None)
    eventually(lambda: found.extend(asker.take_answers()) or found)
    assert found == [ALL]


def test_an_error_leaves_the_answer_that_there_was(ask: Ask) -> None:
    store, asker, found = ask(HERE, PATIENCE)
    eventually(lambda: store.reaches)
    store.reaches[0][1](None, HostDied("gone"))
    eventually(lambda: found.extend(asker.take_answers()) or found)
    assert found == [HERE]


@pytest.mark.parametrize("have", [HERE, MISS])
def test_late_is_never_and_is_given_back_if_nobody_has_its_lease(ask: Ask, have: LookedUp) -> None:
    store, asker, found = ask(have, 0.1)
    eventually(lambda: store.reaches)
    eventually(lambda: found.extend(asker.take_answers()) or found)
    assert found == [have]
    store.reaches[0][1](ALL, None)
    asker.settle(Settle(releases=(LeaseId(99),)))
    eventually(lambda: LeaseId(99) in store.released)
    assert (LeaseId(5) in store.released) == (have is MISS), "a lease in use must not be given back"
    assert asker.take_answers() == []


def test_other_questions_do_not_wait_for_it(ask: Ask) -> None:
    store, asker, found = ask(HERE, PATIENCE)
    eventually(lambda: store.reaches)
    store.have = LookedUp(LIFE, RequestId("s"), 0)
    asker.ask(LookUp(RequestId("s"), bytes(32)))
    eventually(lambda: found.extend(asker.take_answers()) or found)
    assert [one.request for one in found] == ["s"]


def test_it_is_not_asked_for_where_it_is_off(ask: Ask) -> None:
    store, asker, found = ask(HERE, 0.0)
    eventually(lambda: found.extend(asker.take_answers()) or found)
    assert found == [HERE] and not store.reaches


def test_the_end_answers_what_is_open(ask: Ask) -> None:
    store, asker, _ = ask(HERE, PATIENCE)
    eventually(lambda: store.reaches)
    closer = threading.Thread(target=asker.close)
    closer.start()
    closer.join(PATIENCE)
    assert asker.take_answers() == [HERE]
