"""Calls that may never come back: who gives up is free, and a late call touches nothing of his."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from raykv.storage.fs_threads import Abandoned, Gate, PatientThreads

LONG = 30.0


def test_results_and_errors_come_back() -> None:
    threads = PatientThreads(2, "test")
    assert threads.run(lambda: 3, LONG) == 3
    with pytest.raises(KeyError, match="x"):
        threads.run(lambda: {}["x"], LONG)

    def late() -> None:
        raise TimeoutError(110, "the call's own")

    with pytest.raises(TimeoutError, match="the call's own"):
        threads.run(late, LONG)
    assert threads.close(LONG)
    with pytest.raises(RuntimeError, match="closed"):
        threads.submit(lambda: 3)


def test_who_gives_up_shuts_the_gate_and_what_has_not_begun_never_does() -> None:
    threads, gate, go, ended = PatientThreads(1, "test"), Gate(), threading.Event(), threading.Event()
    touched: list[str] = []

    def slow() -> None:
        go.wait(LONG)
        try:
            with gate.entered():
                touched.append("slow")
        except Abandoned:
            ended.set()

    with pytest.raises(TimeoutError):
        threads.run(slow, 0.01, gate)
    with pytest.raises(TimeoutError):  # no thread is free
        threads.run(lambda: touched.append("queued"), 0.01)
    go.set()
    assert ended.wait(LONG) and threads.close(LONG)
    assert touched == []


def test_shut_waits_for_who_is_inside() -> None:
    gate, inside, go = Gate(), threading.Event(), threading.Event()
    order: list[str] = []

    def copy() -> None:
        with gate.entered():
            inside.set()
            go.wait(LONG)
            order.append("copied")

    thread = threading.Thread(target=copy)
    thread.start()
    assert inside.wait(LONG)
    shutter = threading.Thread(target=lambda: (gate.shut(), order.append("shut")))
    shutter.start()
    go.set()
    thread.join()
    shutter.join()
    assert order == ["copied", "shut"]


def test_close_cancels_what_waits_and_tells_of_what_hangs() -> None:
    threads, go = PatientThreads(1, "test"), threading.Event()
    hung, waiting = threads.submit(lambda: go.wait(LONG)), threads.submit(lambda: 3)
    assert not threads.close(0.01)
    go.set()
    assert hung.result(LONG)
    with pytest.raises(CancelledError):
        waiting.result(LONG)
