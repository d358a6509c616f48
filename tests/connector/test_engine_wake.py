"""An idle engine is woken for an order: on the loop of vLLM's own EngineCoreProc, without the rest of an engine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

from raykv.connector.vllm_compat import engine_wake, find_waker
from raykv.engine_messages import ChildOp
from tests.support.chain_bench import ChainBench, child

pytestmark = pytest.mark.vllm


class Engine(EngineCoreProc):
    """The part of an engine that waits for work. Its constructor binds a connector, as a scheduler's does."""

    def __init__(self, has_requests: Callable[[], bool]) -> None:
        self.input_queue: Any = queue.Queue()
        self.aborts_queue: Any = queue.Queue()
        self.engines_running, self.batch_queue = False, None
        self.shutdown_state = EngineShutdownState.RUNNING
        self.process_input_queue_block = True
        self._idle_state_callbacks = []
        self.scheduler: Any = SimpleNamespace(has_requests=has_requests)
        self.waker = self._bind()

    def _bind(self) -> Callable[[], None] | None:
        return (lambda: find_waker())()


def test_an_engine_that_waits_looks_for_work_when_it_is_woken() -> None:
    has_work = threading.Event()
    engine = Engine(has_work.is_set)
    assert engine.waker is not None
    turned = threading.Event()

    def loop() -> None:
        engine._process_input_queue()
        turned.set()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    engine.waker()  # without work it goes on to wait
    while not engine.input_queue.empty():
        thread.join(0.001)
    assert not turned.is_set()
    has_work.set()
    engine.waker()
    assert turned.wait(60), "it stands still although there is work"


def test_without_a_loop_of_its_own_nobody_is_woken() -> None:
    assert find_waker() is None


def test_a_vllm_that_waits_otherwise_is_said_so(monkeypatch: pytest.MonkeyPatch, raykv_log: list[str]) -> None:
    core = SimpleNamespace(EngineCoreProc=EngineCoreProc, EngineCoreRequestType=SimpleNamespace())
    monkeypatch.setitem(engine_wake.sys.modules, "vllm.v1.engine.core", core)
    assert Engine(lambda: False).waker is None
    assert "can't be woken" in raykv_log[-1]


def test_an_order_wakes() -> None:
    with ChainBench([child("A")]) as bench:
        woken = threading.Event()
        bench.half.chain.wake_by(woken.set)
        number = bench.order(ChildOp.PAUSE, "A")
        assert woken.is_set() and bench.scheduler.has_requests()
        bench.done(number)
