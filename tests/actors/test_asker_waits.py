"""The asker waits for announced blocks: here, then at the store that is named, and no longer than it may."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from raykv.actors.store_call import Done
from raykv.actors.store_link import StoreAsker
from raykv.core.vain_hints import MOST_IN_VAIN
from raykv.errors import HostDied
from raykv.store_messages import Attached, HandOver, LookedUp, LookUp, Medium, Settle
from raykv.types import EngineId, LeaseId, RequestId, StoreLife
from tests.support.waiting import eventually

pytestmark = pytest.mark.process

E, LIFE = EngineId("e"), StoreLife("life")
PATIENCE = 30.0
HERE, THERE = "raykv-store-default-00", "raykv-store-default-11"


class Store:
    """Has so many blocks, and so many at the other node; each answer has a lease of its own, which must come back."""

    name = HERE

    def __init__(self) -> None:
        self.here = self.there = 0
        self.more = False
        self.dead = False
        self.asked: list[LookUp] = []
        self.reached: list[LookUp] = []
        self.leases: set[LeaseId] = set()
        self.unanswered: list[Done] = []
        self.hold = False
        self._numbers = 0
        self._lock = threading.Lock()

    def grant(self, look_up: LookUp, blocks: int, medium: Medium) -> LookedUp:
        if not blocks:
            return LookedUp(LIFE, look_up.request, 0, more=self.more)
        with self._lock:
            self._numbers += 1
            self.leases.add(LeaseId(self._numbers))
        return LookedUp(LIFE, look_up.request, blocks, LeaseId(self._numbers), (medium,) * blocks, self.more)

    def submit(self, method: str, *args: Any, done: Done) -> None:
        if self.dead:
            done(None, HostDied("gone"))
        elif method == "look_ups":
            self.asked += args[1]
            if self.hold:
                self.unanswered.append(done)
                return
            done([self.grant(one, self.here, Medium.HOST) for one in args[1]], None)
        elif method == "reach":
            look_up, have = args[1:3]
            self.reached.append(look_up)
            done(self.grant(look_up, self.there, Medium.PEER) if self.there and not have.lease else have, None)
        else:
            settle: Settle = args[1]
            self.leases -= set(settle.releases)
            done(LIFE, None)

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        raise AssertionError(method)

    def process(self, attached: Attached) -> None:
        return None


class Waits:
    def __init__(self) -> None:
        self.store = Store()
        self.askers: list[StoreAsker] = []
        self.found: list[LookedUp] = []

    def start(self, wait_s: float = 1000.0, reach_s: float = 0.0) -> StoreAsker:
        self.asker = StoreAsker(lambda: self.store, E, PATIENCE, reach_s, wait_s)
        self.askers.append(self.asker)
        assert self.asker.wait_tried(PATIENCE) and self.asker.store == HERE
        return self.asker

    def ask(self, blocks: int = 4, at: str = HERE, name: str = "r#0") -> RequestId:
        self.asker.ask(LookUp(RequestId(name), bytes(32 * 4), HandOver(blocks, at)))
        return RequestId(name)

    def answer(self) -> LookedUp:
        eventually(self.look)
        return self.found.pop()

    def look(self) -> list[LookedUp]:
        self.found += self.asker.take_answers()
        return self.found


@pytest.fixture
def w() -> Iterator[Waits]:
    waits = Waits()
    yield waits
    for asker in waits.askers:
        asker.close()


def test_it_asks_until_the_blocks_are_there(w: Waits) -> None:
    w.start()
    w.store.here = 2
    name = w.ask()
    eventually(lambda: len(w.store.asked) > 4)
    assert w.look() == []
    w.store.here = 4
    answer = w.answer()
    assert (answer.request, answer.num_blocks) == (name, 4)
    eventually(lambda: w.store.leases == {answer.lease})
    assert len({one.request for one in w.store.asked}) == len(w.store.asked), "a lease of a name ends the one before"


def test_the_limit_gives_what_there_is(w: Waits) -> None:
    w.start(wait_s=0.1)
    w.store.here = 2
    w.ask()
    answer = w.answer()
    assert answer.num_blocks == 2 and len(w.store.asked) > 1
    eventually(lambda: w.store.leases == {answer.lease})


def test_what_never_comes_is_not_waited_for_again_and_again(w: Waits) -> None:
    w.start(wait_s=0.1)
    for number in range(MOST_IN_VAIN):
        w.ask(name=f"r#{number}")
        assert w.answer().num_blocks == 0
    asked = len(w.store.asked)
    w.ask(name="s#0")
    assert w.answer().num_blocks == 0 and len(w.store.asked) == asked + 1


def test_a_quiet_asker_counts_from_the_question_on(w: Waits) -> None:
    w.start(wait_s=0.3)
    time.sleep(0.5)
    w.ask()
    assert w.answer().num_blocks == 0 and len(w.store.asked) > 1


def test_other_questions_do_not_wait(w: Waits) -> None:
    w.start()
    w.ask()
    eventually(lambda: len(w.store.asked) > 1)
    w.asker.ask(LookUp(RequestId("s"), bytes(32)))
    assert w.answer().request == "s"


@pytest.mark.parametrize("at", [HERE, THERE])
def test_the_named_store_is_asked_without_the_directory(w: Waits, at: str) -> None:
    w.start(reach_s=PATIENCE)
    w.ask(at=at)
    eventually(lambda: len(w.store.asked) > 2)
    assert bool(w.store.reached) == (at == THERE), "one that is here is no peer"
    if at == THERE:
        w.store.there = 4
        assert w.answer().media == (Medium.PEER,) * 4
        assert w.store.reached[-1].hand_over == HandOver(4, THERE)


def test_the_directory_is_asked_once(w: Waits) -> None:
    """A store that shares this node's own is the one that is waited for."""
    w.start(reach_s=PATIENCE)
    w.store.more = True
    w.ask()
    eventually(lambda: len(w.store.asked) > 3)
    assert len(w.store.reached) == 1


def test_nobody_waits_any_more(w: Waits) -> None:
    w.start()
    w.store.here = 2
    name = w.ask()
    eventually(lambda: len(w.store.asked) > 1)
    w.asker.forget(name)
    eventually(lambda: not w.asker._hand_overs and not w.store.leases)
    assert w.look() == []


def test_the_store_dies(w: Waits) -> None:
    w.start()
    w.ask()
    eventually(lambda: len(w.store.asked) > 1)
    w.store.dead = True
    assert w.answer().num_blocks == 0
    assert not w.asker._hand_overs


def test_the_end_answers_what_waits(w: Waits) -> None:
    w.start()
    w.store.here = 2
    w.ask()
    eventually(lambda: len(w.store.asked) > 1)
    w.asker.close()
    assert [one.num_blocks for one in w.look()] == [2]


def test_an_answer_after_the_limit_gives_its_lease_back(w: Waits) -> None:
    w.start(wait_s=0.2)
    w.store.here = 2
    w.ask()
    eventually(lambda: w.store.asked)
    w.store.hold = True
    answer = w.answer()
    assert answer.num_blocks == 2
    for done in w.store.unanswered:
        done([w.store.grant(w.store.asked[-1], 4, Medium.HOST)], None)
    w.asker.settle(Settle())
    eventually(lambda: w.store.leases == {answer.lease})
