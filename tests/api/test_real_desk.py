"""The API against a real EngineDesk, with an engine behind it that fetches and answers as the real one does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from raykv.actors.engine_desk import EngineDesk
from raykv.api import Cluster, NotFoundError, OperationError
from raykv.engine_messages import OrderState, Progress, Story, TokenRange
from raykv.store_messages import Medium
from raykv.types import EngineId, RequestId
from tests.api.cases import HASHES, LEFT, TOKENS, store
from tests.support.fake_operators import FakeCaller, FakeDesk, FakeWorld


class Engine:
    """Fetches what lies at the desk, has `FakeDesk`'s engine carry it out, and tells what became of it."""

    def __init__(self, desk: EngineDesk) -> None:
        self.desk, self.inside = desk, FakeDesk("engine-a", store=LEFT)
        self.running: dict[str, Story] = {}
        self._ended = threading.Event()
        self.desk.push(view=self.inside.view())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            errands = self.desk.fetch(0.05)
            states = []
            for order in errands.orders:
                self.desk.push(states=[OrderState(order.number, Progress.RUNNING, "jobs are settled")])
                state = self.inside.order(order)
                while not state.progress.final:
                    state = self.inside.order(order)
                states.append(state)
            hashed = [self.inside.hash(one) for one in errands.hashes]
            told = [(request, self.running.get(request)) for request in errands.stories]
            self.desk.push(view=self.inside.view(), states=states, hashed=hashed, told=told)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(EngineDesk(EngineId("engine-a")))
    yield made
    made.close()
    made.desk.check_integrity()
    made.inside.check_integrity()


@pytest.fixture
def kv(engine: Engine) -> Cluster:
    world = FakeWorld()
    world.desk_callers.clear()
    world.desk_callers["raykv-desk-engine-a"] = FakeCaller("raykv-desk-engine-a", engine.desk)
    store(world).put(HASHES[:2], Medium.HOST)
    return Cluster(world, 10.0)


def test_look_ups_are_hashed_by_the_engine(kv: Cluster, engine: Engine) -> None:
    assert kv.engine().id == "engine-a" and kv.lookup(TOKENS).held_tokens == 32
    engine.inside.hash_error = "There is no adapter 'x'."
    with pytest.raises(OperationError, match="no adapter"):
        kv.lookup(TOKENS, lora="x")


def test_orders(kv: Cluster, engine: Engine) -> None:
    done = kv.pause_child("nixl")
    assert done.ok and engine.desk.order_state(done.number).progress is Progress.DONE  # type: ignore[union-attr]
    assert kv.pause_child("nixl", number=done.number).ok and engine.inside.applied == [done.number]
    with pytest.raises(OperationError, match="is that of another order"):
        kv.resume_child("nixl", number=done.number)
    engine.inside.refuse = "The child tiers is the last one."
    with pytest.raises(OperationError, match="the last one"):
        kv.remove_child("tiers")


def test_the_stream_has_orders(kv: Cluster, engine: Engine) -> None:
    """The first event is waited for by what makes it; the stream begins with the look before it."""
    begun = threading.Event()
    look = kv.snapshot

    def looked() -> Any:
        seen = look()
        begun.set()
        return seen

    kv.snapshot = looked  # type: ignore[method-assign]
    ordering = threading.Thread(target=lambda: (begun.wait(30), kv.pause_child("nixl")))
    ordering.start()
    stop, seen = threading.Event(), []
    for event in kv.watch(0.01, 30.0, stop=stop):
        seen.append((event.kind, event.what))
        if ("order", "done") in seen and ("child", "paused") in seen:
            stop.set()
    ordering.join()
    assert stop.is_set(), seen


def test_stories(kv: Cluster, engine: Engine) -> None:
    story = Story(RequestId("cmpl-7-0"), EngineId("engine-a"), 1.0, 50, (TokenRange(0, 50, "computed"),), ended=2.0)
    engine.desk.push(stories=[story])
    assert kv.explain("cmpl-7-0").by_source == {"computed": 50}
    assert kv.explain("7").request == "cmpl-7-0"  # by its client's id
    engine.running["8"] = replace(story, request=RequestId("cmpl-8-0"), ended=0.0)
    assert "still runs" in kv.explain("8").said
    with pytest.raises(NotFoundError, match=r'There is no request "cmpl-9"'):
        kv.explain("cmpl-9")
    engine.desk.push(stories=[replace(story, request=RequestId("cmpl-7-1"))])
    with pytest.raises(OperationError, match="fits 2 requests"):
        kv.explain("7")


@pytest.mark.process
def test_a_text_by_a_real_tokenizer(kv: Cluster, engine: Engine, tiny_model: Any) -> None:
    """The tiny model has a tokenizer of bytes, and no chat template."""
    engine.inside.base = replace(engine.inside.base, model=str(tiny_model))
    engine.desk.push(view=engine.inside.view())
    found = kv.lookup("Hello, how are you? " * 4)
    assert found.tokens >= 80 and found.model == str(tiny_model)
    with pytest.raises(OperationError, match=r"The chat template of .* can't be used"):
        kv.lookup([{"role": "user", "content": "Hello"}])
