"""The links of an engine to a store that dies, hangs and dawdles: every question and every job ends exactly once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raykv.actors import store_asker, store_worker_link
from raykv.actors.store_link import StoreAsker, StoreWorkerLink
from raykv.errors import HostDied, StoreError
from raykv.store_messages import JobDone, LookedUp, Medium, Settle, StoreSpec, TierSpec
from raykv.types import EngineId, JobId, LeaseId
from tests.support.in_process_store import InProcessStore
from tests.support.kv_rank import E, KVRank, load_job, look_up, save_job
from tests.support.waiting import eventually

pytestmark = pytest.mark.process

SLOT = 16384
PATIENCE = 30.0
SPEC = StoreSpec("test", (TierSpec(Medium.HOST, 16 * SLOT),))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (store_asker, store_worker_link):
        monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(store_worker_link, "IDLE_CHECK_S", 0.02)


class Parts:
    """A store, and links to it that end with the test."""

    def __init__(self, folder: Path) -> None:
        self.store = InProcessStore(SPEC, folder)
        self.rank = KVRank()
        self.links: list[StoreAsker | StoreWorkerLink] = []
        self.at_end: list[Callable[[], None]] = [self.store.go_on]

    def asker(self, timeout_s: float = PATIENCE, engine: EngineId = E) -> StoreAsker:
        asker = StoreAsker(self.store, engine, timeout_s)
        self.links.append(asker)
        eventually(lambda: asker.up)
        return asker

    def link(self, timeout_s: float = PATIENCE, load_timeout_s: float = PATIENCE) -> StoreWorkerLink:
        link = StoreWorkerLink(self.store, self.rank.attach, timeout_s, load_timeout_s)
        self.links.append(link)
        link.start(PATIENCE)
        return link

    def close(self) -> None:
        for call in self.at_end:
            call()
        for link in self.links:
            link.close()
        self.store.close()
        self.rank.close()


@pytest.fixture
def p(tmp_path: Path) -> Iterator[Parts]:
    parts = Parts(tmp_path)
    yield parts
    parts.close()


def jobs_done(link: StoreWorkerLink, count: int) -> dict[JobId, JobDone]:
    """The next `count` jobs to end. More would be one that ends twice."""
    done: list[JobDone] = []
    eventually(lambda: done.extend(link.take_done()) or len(done) >= count)
    assert len(done) == count
    return {one.job: one for one in done}


def answers(asker: StoreAsker, count: int) -> dict[str, LookedUp]:
    found: list[LookedUp] = []
    eventually(lambda: found.extend(asker.take_answers()) or len(found) >= count)
    assert len(found) == count
    return {one.request: one for one in found}


# -- all is well --------------------------------------------------------------------------------------------


def test_a_block_goes_out_and_comes_back(p: Parts) -> None:
    link, asker = p.link(), p.asker()
    before = p.rank.blocks([0, 1, 2])
    link.save([save_job(0, "p", [0, 1, 2])])
    done = jobs_done(link, 1)[JobId(0)]
    assert done.ok and done.nbytes == 3 * SLOT
    asker.settle(Settle(commits=(JobId(0),)))
    eventually(lambda: p.store.store.status().tiers[0].used == 3)
    asker.ask(look_up("p", 5))
    found = answers(asker, 1)["r"]
    assert (found.num_blocks, found.store) == (3, asker.life) and link.life == asker.life
    link.load([load_job(1, found.lease, [10, 11, 12])])
    assert jobs_done(link, 1)[JobId(1)].ok
    assert p.rank.blocks([10, 11, 12]) == before
    assert found.lease is not None
    asker.release([found.lease])
    eventually(lambda: p.store.store.status().leases == 0)
    assert (link.slot_nbytes, link.pid) == (SLOT, p.store.store.status().pid)


def test_what_waits_goes_together(p: Parts) -> None:
    link, asker = p.link(), p.asker()
    p.store.hang("save", "look_ups", "settle")
    link.save([save_job(0, "p", [0])])
    eventually(lambda: p.store.calls.get("save") == 1)
    for job in range(1, 6):
        link.save([save_job(job, f"p{job}", [job])])
    settles = p.store.calls["settle"]
    asker.settle(Settle(commits=(JobId(90),)))
    eventually(lambda: p.store.calls["settle"] == settles + 1)
    for job in range(91, 96):
        asker.settle(Settle(commits=(JobId(job),), releases=(LeaseId(job),)))
    p.store.go_on()
    assert all(done.ok for done in jobs_done(link, 6).values())
    assert p.store.calls["save"] == 2
    eventually(lambda: p.store.calls["settle"] == settles + 2)


def test_loads_do_not_wait_behind_saves(p: Parts) -> None:
    link = p.link()
    p.store.hang("save")
    link.save([save_job(0, "p", [0])])
    link.load([load_job(1, LeaseId(5), [1])])
    assert not jobs_done(link, 1)[JobId(1)].ok, "no such lease, but it was asked"
    p.store.go_on()
    assert jobs_done(link, 1)[JobId(0)].ok


def test_look_ups_of_many_requests_are_each_answered(p: Parts) -> None:
    link, asker = p.link(), p.asker()
    link.save([save_job(0, "p", [0, 1])])
    jobs_done(link, 1)
    asker.settle(Settle(commits=(JobId(0),)))
    eventually(lambda: p.store.store.status().tiers[0].used == 2)
    for number in range(40):
        asker.ask(look_up("p" if number % 2 else "q", 2, f"r{number}"))
    found = answers(asker, 40)
    assert {one.num_blocks for name, one in found.items() if int(name[1:]) % 2} == {2}
    assert {one.num_blocks for name, one in found.items() if not int(name[1:]) % 2} == {0}


# -- the asker ----------------------------------------------------------------------------------------------


def test_without_a_store_every_question_is_a_miss(p: Parts) -> None:
    asker = p.asker()
    p.store.stays_dead = True
    p.store.die()
    asker.ask(look_up("p", 2, "sent"))
    eventually(lambda: not asker.up)
    asker.ask(look_up("p", 2, "at once"))
    assert {one.num_blocks for one in answers(asker, 2).values()} == {0}


def test_a_late_answer_is_a_miss_and_its_lease_is_given_back(p: Parts) -> None:
    link = p.link()
    link.save([save_job(0, "p", [0])])
    jobs_done(link, 1)
    p.store.store.settle(E, Settle(commits=(JobId(0),)))
    asker = p.asker(timeout_s=0.2)
    p.store.hang("look_ups")
    asker.ask(look_up("p", 1))
    assert answers(asker, 1)["r"].num_blocks == 0
    p.store.go_on()
    eventually(lambda: p.store.store.status().hit_blocks == 1)
    eventually(lambda: p.store.store.status().leases == 0)
    assert asker.take_answers() == []


def test_a_store_that_answers_nothing_is_not_asked_until_it_does(p: Parts) -> None:
    asker = p.asker(timeout_s=0.05)
    p.store.hang("look_ups", "settle")
    for number in range(3):
        asker.ask(look_up("p", 1, f"r{number}"))
        assert answers(asker, 1)[f"r{number}"].num_blocks == 0
    eventually(lambda: not asker.up)
    asked = p.store.calls["look_ups"]
    asker.ask(look_up("p", 1))
    assert answers(asker, 1)["r"].num_blocks == 0 and p.store.calls["look_ups"] == asked
    p.store.go_on()
    eventually(lambda: asker.up)


def test_what_is_settled_arrives_though_calls_fail(p: Parts) -> None:
    link = p.link()
    asker = p.asker(timeout_s=0.1)
    link.save([save_job(0, "p", [0]), save_job(1, "q", [1])])
    jobs_done(link, 2)
    p.store.hang("settle")
    asker.settle(Settle(commits=(JobId(0),)))
    eventually(lambda: not asker.up)
    asker.settle(Settle(aborts=(JobId(1),)))
    p.store.go_on()
    eventually(lambda: p.store.store.status().tiers[0].used == 1)
    eventually(lambda: p.store.store.status().tiers[0].writing == 0)


def test_the_asker_hears_of_the_next_life(p: Parts) -> None:
    asker = p.asker()
    first = asker.life
    p.store.die()
    asker.ask(look_up("p", 1))
    answers(asker, 1)
    eventually(lambda: asker.up and asker.life != first)
    assert asker.life == p.store.store.life


def test_an_asker_that_never_finds_a_store_ends_all_the_same(tmp_path: Path) -> None:
    def none_there() -> InProcessStore:
        raise StoreError("no store here")

    asker = StoreAsker(none_there, E, 0.1)
    asker.ask(look_up("p", 1))
    assert answers(asker, 1)["r"].num_blocks == 0 and asker.life is None
    asker.close()
    asker.close()


# -- the worker's link --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["save", "load"])
def test_a_hung_call_ends_by_the_death_of_the_store(p: Parts, kind: str) -> None:
    link = p.link(timeout_s=0.2, load_timeout_s=0.2)
    first = link.life
    p.store.hang(kind)
    if kind == "save":
        link.save([save_job(0, "p", [3, 4])])
    else:
        link.load([load_job(0, LeaseId(1), [3, 4])])
    done = jobs_done(link, 1)[JobId(0)]
    assert (done.ok, done.bad_blocks) == (False, (3, 4)) and "longer than" in done.error
    assert p.store.lives[0].gone.is_set(), "settled by its death, not before"
    p.store.go_on()
    eventually(lambda: link.life not in (None, first))
    link.save([save_job(1, "p", [0])])
    assert jobs_done(link, 1)[JobId(1)].ok


def test_no_job_ends_before_the_process_is_dead(p: Parts) -> None:
    link = p.link(timeout_s=0.1)
    started, finish = threading.Event(), threading.Event()
    store = p.store.store
    really = store.save

    def slow_save(*args: Any) -> Any:
        started.set()
        assert finish.wait(PATIENCE)
        return really(*args)

    store.save = slow_save  # type: ignore[method-assign]
    p.at_end.append(finish.set)
    link.save([save_job(0, "p", [0])])
    assert started.wait(PATIENCE)
    link.save([save_job(1, "p", [1])])
    eventually(lambda: link.life is None)
    done = jobs_done(link, 1)
    assert list(done) == [JobId(1)], "this one was never sent"
    link.save([save_job(2, "p", [2])])
    assert list(jobs_done(link, 1)) == [JobId(2)], "handed over while the store is away: ends at once"
    assert p.store.lives[0].alive() and not link.take_done()
    finish.set()
    assert not jobs_done(link, 1)[JobId(0)].ok
    assert p.store.lives[0].gone.is_set()


def test_a_death_between_calls_is_noticed(p: Parts) -> None:
    link = p.link()
    first = link.life
    p.store.die()
    eventually(lambda: link.life not in (None, first))
    link.save([save_job(0, "p", [0])])
    assert jobs_done(link, 1)[JobId(0)].ok
    assert p.store.store.status().engines == (E,)


def test_death_with_jobs_in_flight_and_waiting(p: Parts) -> None:
    link = p.link()
    p.store.hang("save", "load")
    link.save([save_job(0, "p", [0])])
    link.load([load_job(1, LeaseId(1), [1])])
    eventually(lambda: p.store.calls.get("save") == 1 and p.store.calls.get("load") == 1)
    link.save([save_job(2, "p", [2])])
    p.store.die()
    done = jobs_done(link, 3)
    assert not any(one.ok for one in done.values())
    assert [done[JobId(job)].bad_blocks for job in (0, 1, 2)] == [(0,), (1,), (2,)]
    p.store.go_on()
    eventually(lambda: link.life is not None)
    assert p.store.calls["save"] == 1, "a job of the former life is not sent to the next one"


def test_a_call_that_raises_costs_the_store_its_process(p: Parts) -> None:
    link = p.link()

    def broken(*_: Any) -> Any:
        raise KeyError("a defect")

    p.store.store.save = broken  # type: ignore[method-assign]
    link.save([save_job(0, "p", [0])])
    assert "a defect" in jobs_done(link, 1)[JobId(0)].error
    assert p.store.lives[0].gone.is_set()


def test_a_store_that_stays_away_costs_nothing(p: Parts) -> None:
    link = p.link()
    p.store.stays_dead = True
    p.store.die()
    eventually(lambda: link.life is None)
    for job in range(20):
        link.load([load_job(job, LeaseId(1), [job])])
    assert not any(done.ok for done in jobs_done(link, 20).values())
    assert link.pid is None
    p.store.stays_dead = False
    eventually(lambda: link.life is not None)


def test_a_call_delivered_to_the_next_life_is_refused(p: Parts) -> None:
    """Ray may keep a call of a dying actor and hand it to the next one."""
    link = p.link()
    first = link.life
    assert first is not None
    p.store.die()
    eventually(lambda: link.life not in (None, first))
    before = p.rank.block(3)
    _, (done,) = p.store.call("load", first, E, 0, [load_job(0, LeaseId(1), [3])], timeout=PATIENCE)
    assert not done.ok and p.rank.block(3) == before


def test_what_the_store_has_against_an_engine_is_said_at_the_start(p: Parts) -> None:
    p.link()
    large = KVRank(EngineId("large"), width=256)
    link = StoreWorkerLink(p.store, large.attach, PATIENCE, PATIENCE)
    with pytest.raises(StoreError, match="another `store` name"):
        link.start(PATIENCE)
    link.close()
    large.close()


def test_close_detaches(p: Parts) -> None:
    link = p.link()
    assert p.store.store.status().engines == (E,)
    link.close()
    link.close()
    assert p.store.store.status().engines == ()
    link.save([save_job(0, "p", [0])])
    assert not jobs_done(link, 1)[JobId(0)].ok


def test_close_while_the_store_hangs_is_bounded(p: Parts) -> None:
    link = p.link()
    p.store.hang("save", "detach")
    link.save([save_job(0, "p", [0])])
    eventually(lambda: p.store.calls.get("save") == 1)
    link.close(timeout=0.1)
    assert link.take_done() == [], "nothing is known of it, so nothing is said"
    p.store.go_on()


def test_an_error_of_the_handle_itself_is_a_failed_call(p: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    link = p.link()
    first = link.life

    def refuses(*_: Any, **__: Any) -> None:
        raise HostDied("no connection")

    monkeypatch.setattr(p.store, "submit", refuses)
    link.save([save_job(0, "p", [0])])
    assert not jobs_done(link, 1)[JobId(0)].ok
    monkeypatch.undo()
    eventually(lambda: link.life not in (None, first))
