"""The pause in Ray's error listener."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from raykv.actors import error_listener
from raykv.actors.error_listener import PatientSubscriber, calm


class Subscriber:
    def __init__(self, answers: list[tuple[str | None, str | None]]) -> None:
        self._answers = answers
        self.closed = False

    def poll(self) -> tuple[str | None, str | None]:
        return self._answers.pop(0)

    def close(self) -> None:
        self.closed = True


def test_it_pauses_only_after_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(error_listener.time, "sleep", pauses.append)
    subscriber = PatientSubscriber(Subscriber([("key", "error"), (None, None)]))
    assert subscriber.poll() == ("key", "error") and not pauses
    assert subscriber.poll() == (None, None) and pauses == [error_listener.PAUSE_S]


def test_it_is_put_in_once() -> None:
    own = Subscriber([])
    worker = SimpleNamespace(gcs_error_subscriber=own)
    calm(worker)
    calm(worker)
    assert isinstance(worker.gcs_error_subscriber, PatientSubscriber)
    worker.gcs_error_subscriber.close()
    assert own.closed
    calm(SimpleNamespace())
