"""The engine's end of its desk: errands are done, what there is to tell is told, and no loss of the desk is felt."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from raykv.connector import desk_link, desk_setup
from raykv.connector.desk_link import DeskLink
from raykv.connector.engine_view import EngineSight, NoChain, TierFacts
from raykv.connector.prompt_hashes import PromptHashes
from raykv.core.load_cost import LoadCost
from raykv.core.stories import Stories
from raykv.engine_messages import (
    ChainOrder,
    ChildOp,
    ChildView,
    EngineView,
    Hashed,
    HashOrder,
    OrderState,
    Progress,
)
from raykv.types import EngineId, RequestId
from tests.core.test_stories import Source
from tests.support.desk_in_process import DesksInProcess
from tests.support.fake_config import child, kv_cache_config, vllm_config
from tests.support.fake_store_link import split
from tests.support.fake_worker import Bench
from tests.support.tier_bench import TierBench, tier_child
from tests.support.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.process]

E = EngineId("e")
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a clock waits less."""
    for name, value in {
        "PUSH_S": 0.02,
        "BUSY_S": 0.01,
        "QUIET_S": 0.1,
        "FIRST_PAUSE_S": 0.01,
        "LAST_PAUSE_S": 0.05,
    }.items():
        monkeypatch.setattr(desk_link, name, value)


class FakeChain:
    """What carries orders out (`engine_view.Chain`), when a test lets it."""

    def __init__(self) -> None:
        self.found: dict[str, OrderState] = {}
        self.taken: list[ChainOrder] = []
        self.children = [ChildView("files", "ExampleConnector", "actor", "up", True, True, 0)]
        self.broken = False

    def order(self, order: ChainOrder) -> None:
        if self.broken:
            raise TypeError("a defect")
        if order.number not in self.found:
            self.taken.append(order)
            self.found[order.number] = OrderState(order.number, Progress.WAITING, "", 1.0)

    def states(self) -> list[OrderState]:
        return list(self.found.values())

    def views(self) -> list[ChildView]:
        return list(self.children)


class Engine:
    """A link with all that is behind it."""

    def __init__(self, last: int = 1000, needs_ray: bool = True) -> None:
        self.chain, self.desks = FakeChain(), DesksInProcess(last_stories=last)
        self.stories = Stories(E, 16, last, key=lambda one, salt: one)
        self.rates = LoadCost()
        self.hashed: list[HashOrder] = []
        config = vllm_config({"kv_connector": "RayMultiConnector", "kv_role": "kv_both", "engine_id": "e"})
        sight = EngineSight(
            config, 1, "first", self.chain.views, lambda: TierFacts("raykv-store-x", ("ab",)), self.stories, self.rates,
            lambda: {0: "files"}, 5.0,
        )  # fmt: skip
        self.link = DeskLink(self.desks.open, sight, self.chain, self._hash, needs_ray)

    def _hash(self, order: HashOrder) -> Hashed:
        self.hashed.append(order)
        return Hashed(order.number, bytes(order.token_ids))

    def request(self, name: str, ends: bool = True) -> None:
        self.stories.arrived(RequestId(name), Source(num_output_tokens=1, block_hashes=[b"h" * 32] * 4), 64)
        if ends:
            self.stories.ended(RequestId(name))

    def up(self) -> None:
        eventually(lambda: self.desks.lives and self.desks.desk.view() is not None)


@pytest.fixture
def engine() -> Iterator[Engine]:
    one = Engine()
    one.link.start()
    yield one
    one.link.close()
    assert not one.link._thread.is_alive()


# -- what is told ---------------------------------------------------------------------------------------------


def test_the_view_says_what_the_engine_is(engine: Engine) -> None:
    engine.rates.load_rates[0], engine.rates.prefill_rate = 5.0, 7.0
    engine.request("r0")
    engine.request("r1", ends=False)
    eventually(lambda: engine.desks.lives and engine.desks.desk.view() and engine.desks.desk.view().running == 1)
    eventually(lambda: engine.desks.desk.view().load_rates)  # type: ignore[union-attr]
    view = engine.desks.desk.view()
    assert isinstance(view, EngineView)
    assert (view.engine, view.role, view.node, view.load_policy) == ("e", "kv_both", "node-1", "first")
    assert (view.block_size, view.max_tokens, view.ranks, view.groups) == (16, 2048, 1, 1)
    assert view.model and view.served and all(isinstance(one, str) for one in view.served)
    assert (view.store, view.fingerprints, view.started) == ("raykv-store-x", ("ab",), 5.0)
    assert (view.prefill_rate, view.load_rates, view.tokens) == (7.0, {"files": 5.0}, {"computed": 64})
    assert [one.name for one in view.children] == ["files"] and view.seen > 1e9


def test_stories_are_told_as_requests_end(engine: Engine) -> None:
    for number in range(250):
        engine.request(f"r{number}")
    eventually(lambda: engine.desks.lives and len(engine.desks.desk.requests()) == 250)
    assert engine.desks.desk.requests()[:2] == ("r0", "r1")
    assert engine.desks.desk.stories(1)[0].hashes == b"h" * 128


def test_the_story_of_a_running_request_is_told(engine: Engine) -> None:
    engine.request("cmpl-a-0-11111111", ends=False)
    engine.up()
    found = engine.desks.desk.story("a")
    assert found is not None and found.request == "cmpl-a-0-11111111" and found.ended == 0
    assert engine.desks.desk.story("b") is None


def test_pushes_are_no_more_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing new: only the sign of life. Stories are cut into pushes of a bounded size."""
    monkeypatch.setattr(desk_link, "PUSH_S", 3600.0)
    monkeypatch.setattr(desk_link, "MAX_NBYTES", 10_000)
    one = Engine()
    for number in range(100):
        one.request(f"r{number}")
    one.link.start()
    eventually(lambda: one.desks.lives and one.desks.desk.requests())
    one.desks.desk.hash(HashOrder("1", (1,)))  # has been answered: so the link went round
    one.link.close()
    assert 0 < len(one.desks.desk.requests()) < 100
    assert one.desks.calls["bytes of push"] / one.desks.calls["push"] < 30_000
    assert one.desks.calls["push"] <= 3


def test_nothing_is_kept_where_nothing_is_wanted() -> None:
    one = Engine(last=0)
    one.link.start()
    one.request("r0")
    eventually(lambda: one.desks.lives and one.desks.desk.view() and one.desks.desk.view().tokens == {"computed": 64})
    assert one.desks.desk.requests() == ()
    one.link.close()


# -- errands --------------------------------------------------------------------------------------------------


def test_orders_are_carried_out_once_and_followed(engine: Engine) -> None:
    engine.up()
    order = ChainOrder("1", ChildOp.PAUSE, "files")
    engine.desks.desk.order(order)
    eventually(lambda: engine.chain.taken == [order])
    engine.chain.found["1"] = OrderState("1", Progress.RUNNING, "its loads end", 2.0)
    eventually(lambda: engine.desks.desk.order(order).detail == "its loads end")
    engine.chain.found["1"] = OrderState("1", Progress.DONE, "", 3.0)
    eventually(lambda: engine.desks.desk.order(order).progress is Progress.DONE)
    assert engine.chain.taken == [order]


def test_who_hears_that_an_order_is_done_sees_what_it_did(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain as it has become is told at the latest with the order's end, and not at the next view's turn."""
    monkeypatch.setattr(desk_link, "PUSH_S", 0.01)
    engine.up()
    engine.desks.desk.order(ChainOrder("1", ChildOp.PAUSE, "files"))
    eventually(lambda: bool(engine.chain.taken))
    seen = engine.desks.desk.view()
    engine.link._view_at = time.monotonic() + 3600.0
    engine.chain.found["1"] = OrderState("1", Progress.DONE, "", 3.0)
    eventually(lambda: engine.desks.desk.orders()[0].progress is Progress.DONE)
    assert engine.desks.desk.view().seen > seen.seen


def test_many_orders_at_once_each_once(engine: Engine) -> None:
    engine.up()
    orders = [ChainOrder(str(number), ChildOp.RESTART, "files") for number in range(60)]
    for order in orders:
        engine.desks.desk.order(order)
    eventually(lambda: len(engine.chain.taken) == 60)
    assert engine.chain.taken == orders
    eventually(lambda: engine.desks.desk.fetch(0.0).orders == ())


def test_an_order_that_the_chain_can_t_take_is_refused(engine: Engine) -> None:
    engine.up()
    engine.chain.broken = True
    engine.desks.desk.order(ChainOrder("1", ChildOp.PAUSE, "files"))
    eventually(lambda: engine.desks.desk.orders()[0].progress is Progress.REFUSED)
    assert "TypeError: a defect" in engine.desks.desk.orders()[0].detail
    fetches = engine.desks.calls["fetch"]
    engine.desks.desk.hash(HashOrder("1", (1,)))
    assert engine.desks.calls["fetch"] <= fetches + 3, "it is not fetched over and over"


def test_a_prompt_is_hashed(engine: Engine) -> None:
    engine.up()
    assert engine.desks.desk.hash(HashOrder("1", (1, 2))) == Hashed("1", b"\1\2")
    assert engine.desks.desk.hash(HashOrder("1", (1, 2))) == Hashed("1", b"\1\2")
    assert len(engine.hashed) == 1


# -- loss -----------------------------------------------------------------------------------------------------


def test_a_desk_that_dies_is_started_again_and_told_all(engine: Engine, raykv_log: list[str]) -> None:
    for number in range(3):
        engine.request(f"r{number}")
    engine.up()
    order = ChainOrder("1", ChildOp.PAUSE, "files")
    engine.desks.desk.order(order)
    eventually(lambda: engine.chain.taken and len(engine.desks.desk.requests()) == 3)
    engine.chain.found["1"] = OrderState("1", Progress.DONE, "", 3.0)
    engine.desks.lives[0].die()
    eventually(lambda: len(engine.desks.lives) > 1 and len(engine.desks.desk.requests()) == 3)
    assert engine.desks.desk.requests() == ("r0", "r1", "r2")
    engine.request("r3")
    eventually(lambda: engine.desks.desk.order(order).progress is Progress.DONE)
    eventually(lambda: engine.desks.desk.requests() == ("r0", "r1", "r2", "r3"))
    assert engine.desks.desk.view() is not None and engine.chain.taken == [order]
    assert [line for line in raykv_log if "lost its desk" in line]


def test_while_the_head_is_away_it_is_tried_again(engine: Engine, raykv_log: list[str]) -> None:
    engine.up()
    engine.desks.away = True
    engine.desks.lives[0].die()
    tries = engine.desks.tries
    eventually(lambda: engine.desks.tries > tries + 3)
    for number in range(1500):
        engine.request(f"r{number}")
    eventually(lambda: not engine.stories._ended and len(engine.link._ring) == 1000)  # they don't pile up meanwhile
    assert not engine.link._untold
    engine.desks.away = False
    eventually(lambda: len(engine.desks.lives) == 2 and len(engine.desks.desk.requests()) == 1000)
    assert engine.desks.desk.requests()[-1] == "r1499"
    assert len([line for line in raykv_log if "has no desk" in line]) == 1, "it is said once"


def test_a_desk_that_hangs_is_given_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.up()
    monkeypatch.setattr(desk_link, "LATE_S", 0.05)
    engine.desks.lives[0].silent = True
    eventually(lambda: len(engine.desks.lives) == 2)
    assert engine.desks.lives[0].ended
    engine.up()


def test_an_engine_that_needs_no_ray_seeks_it_once(raykv_log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_link.logger, "level", logging.INFO)
    monkeypatch.setattr(desk_link.logger, "_cache", {})
    one = Engine(needs_ray=False)
    one.desks.away = True
    one.link.start()
    one.link._thread.join(PATIENCE)
    assert not one.link._thread.is_alive() and one.desks.tries == 1
    one.request("r0")
    assert one.stories.take() == [], "nobody will ever take them"
    assert [line for line in raykv_log if "no desk for operators" in line]
    one.link.close()
    one.link.close()


def test_an_engine_that_needs_no_ray_keeps_a_desk_that_it_once_had() -> None:
    one = Engine(needs_ray=False)
    one.link.start()
    one.up()
    one.desks.away = True
    one.desks.lives[0].die()
    tries = one.desks.tries
    eventually(lambda: one.desks.tries > tries + 2)
    one.desks.away = False
    eventually(lambda: len(one.desks.lives) == 2)
    one.link.close()


def test_its_end_ends_the_desk_and_never_waits_long(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Engine()
    one.link.start()
    one.up()
    one.link.close()
    assert one.desks.lives[0].ended and not one.link._thread.is_alive()
    one.link.start()  # after its end nothing begins
    assert not one.link._thread.is_alive()
    stuck, opened = threading.Event(), Engine()
    inner = opened.desks.open
    opened.link._open_desk = lambda: (stuck.wait(PATIENCE), inner())[1]
    opened.link.start()
    opened.link.close(timeout=0.05)
    assert opened.link._thread.is_alive() and opened.link._thread.daemon
    stuck.set()
    opened.link._thread.join(PATIENCE)
    assert opened.desks.lives[0].ended, "it was opened in vain"


def test_no_error_ends_the_thread(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.up()
    monkeypatch.setattr(EngineSight, "view", lambda self, node: 1 / 0)
    eventually(lambda: len(engine.desks.lives) >= 3)
    monkeypatch.undo()
    eventually(lambda: engine.desks.desk.view() is not None)


# -- in an engine ---------------------------------------------------------------------------------------------


@pytest.fixture
def desks(monkeypatch: pytest.MonkeyPatch) -> DesksInProcess:
    """A bench's engine has one of these."""
    found = DesksInProcess()
    monkeypatch.setattr(desk_setup, "_open", lambda *_: found.open())
    return found


START = DeskLink.start


def begin(bench: Bench) -> None:
    """Benches start no desk of their own."""
    link = bench.connector._desk
    START(link)


def test_an_engine_with_a_chain(desks: DesksInProcess) -> None:
    with TierBench([child("A", hit=64), child("B", False)], ranks=2) as bench:
        begin(bench)
        bench.add(100, max_tokens=1)
        bench.run()
        eventually(lambda: desks.lives and desks.desk.requests() == ("r0",))
        eventually(lambda: desks.desk.view() and desks.desk.view().tokens == {"A": 64, "computed": 36})
        view = desks.desk.view()
        assert view is not None and [(one.name, one.run) for one in view.children] == [
            ("A", "actor"), ("B", "inline"), ("tier", "inline")
        ]  # fmt: skip
        assert (view.store, view.ranks, view.load_policy) == (bench.store.store, 2, "first")
        assert len(view.fingerprints) == 2 and all(len(bytes.fromhex(one)) == 16 for one in view.fingerprints)
        assert list(view.fingerprints) == [bench.store.links[rank].attach.fingerprint.hex() for rank in (0, 1)]  # type: ignore[index]
        desks.desk.order(ChainOrder("1", ChildOp.PAUSE, "nobody"))
        bench.add(20, max_tokens=1)
        bench.run()
        eventually(lambda: desks.desk.orders()[0].progress is Progress.REFUSED)
        hashed = desks.desk.hash(HashOrder("1", tuple(bench.results["r0"].prompt)))
        assert hashed is not None and not hashed.error
        assert split(hashed.hashes) == split(bench.store.saved[0].hashes[0])[:6]
        assert hashed.hashes == desks.desk.story("r0").hashes  # type: ignore[union-attr]
    assert desks.lives[-1].ended


def test_a_tier_connector_alone_has_a_desk_too(desks: DesksInProcess) -> None:
    with TierBench(None) as bench:
        begin(bench)
        bench.add(100, max_tokens=1)
        bench.run()
        eventually(lambda: desks.lives and desks.desk.requests() == ("r0",))
        bench.add(20, seed=1, max_tokens=1)
        bench.run()
        eventually(lambda: desks.desk.view() and desks.desk.view().children[0].counters.get("tokens_saved"))
        (only,) = desks.desk.view().children  # type: ignore[union-attr]
        assert (only.name, only.run, only.state, only.loads, only.saves) == (
            "TierConnector",
            "inline",
            "up",
            True,
            True,
        )
        assert json.loads(only.config)["kv_connector_extra_config"]["tiers"]
        assert desks.desk.view().store == bench.store.store and len(desks.desk.view().fingerprints) == 1  # type: ignore[union-attr]
        for op in ChildOp:
            desks.desk.order(ChainOrder(op, op, "TierConnector"))
        eventually(lambda: all(one.progress is Progress.REFUSED for one in desks.desk.orders()))
        assert "alone" in desks.desk.orders()[0].detail and "MultiConnector" in desks.desk.orders()[0].detail
        hashed = desks.desk.hash(HashOrder("1", tuple(bench.results["r0"].prompt)))
        assert hashed is not None and hashed.hashes == desks.desk.story("r0").hashes  # type: ignore[union-attr]
    assert desks.lives[-1].ended


@pytest.mark.parametrize(
    ("children", "needs"),
    [([child("A", False)], False), ([child("A", True)], True), ([child("A", False), tier_child()], True)],
)
def test_who_needs_ray_for_its_desk(children: list[dict[str, Any]], needs: bool) -> None:
    if len(children) == 2:
        with TierBench(children[:1]) as tier_bench:
            assert tier_bench.connector._desk._needs_ray is needs
        return
    with Bench(children) as bench:
        assert bench.connector._desk._needs_ray is needs


def test_no_chain_remembers_only_the_last_refusals() -> None:
    chain = NoChain()
    for number in range(300):
        chain.order(ChainOrder(str(number), ChildOp.ADD))
    assert [one.number for one in chain.states()] == [str(number) for number in range(300 - 256, 300)]
    assert {one.progress for one in chain.states()} == {Progress.REFUSED}


# -- hashes ---------------------------------------------------------------------------------------------------


def hashes_of(adapters: dict[str, Any]) -> PromptHashes:
    config = vllm_config({"kv_connector": "RayMultiConnector", "kv_role": "kv_both", "engine_id": "e"})
    return PromptHashes(config, kv_cache_config(8), adapters, lambda lora: b"adapter" if lora else b"")


@pytest.mark.parametrize(
    ("order", "error"),
    [
        (HashOrder("1", ()), "no tokens"),
        (HashOrder("1", tuple(range(5)) * 500), "2500 tokens, and this engine takes 2048"),
        (HashOrder("1", (1, 512)), "Token 512 is none of the model .*0 to 511"),
        (HashOrder("1", (-1,)), "Token -1 is none"),
        (HashOrder("1", (True,)), "Token True is none"),
        (HashOrder("1", ("a",)), "Token 'a' is none"),  # type: ignore[arg-type]
        (HashOrder("1", (1,) * 20, lora="sql"), "adapter 'sql' is not known to this engine .none yet."),
    ],
)
def test_what_can_t_be_hashed_is_said(order: HashOrder, error: str) -> None:
    with Bench([child("A")]):
        answer = hashes_of({}).answer(order)
    assert answer.number == "1" and answer.hashes == b"" and re.search(error, answer.error)


def test_salts_and_adapters_have_hashes_of_their_own() -> None:
    with Bench([child("A")]):
        hashes = hashes_of({"sql": LoRARequest("sql", 1, "/adapters/sql")})
        tokens = tuple(range(3, 43))
        answers = [
            hashes.answer(HashOrder("1", tokens)),
            hashes.answer(HashOrder("1", tokens, cache_salt="a")),
            hashes.answer(HashOrder("1", tokens, lora="sql")),
        ]
        assert [one.error for one in answers] == [""] * 3
        assert [len(one.hashes) for one in answers] == [64] * 3
        assert len({block for one in answers for block in split(one.hashes)}) == 6
        assert hashes.answer(HashOrder("2", tokens)).hashes == answers[0].hashes
