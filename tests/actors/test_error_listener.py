"""The end of Ray's error listener."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from raykv.actors.error_listener import NoErrors, silence


class Subscriber:
    """As Ray's: a poll ends by a message or by `close`."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.polls = 0

    def poll(self) -> tuple[None, None]:
        self.polls += 1
        self.closed.wait(30)
        return None, None

    def close(self) -> None:
        self.closed.set()


def test_a_listener_that_waits_comes_to_rest_and_can_be_ended() -> None:
    own = Subscriber()
    worker = SimpleNamespace(gcs_error_subscriber=own)
    stopped = threading.Event()

    def listen() -> None:
        while not stopped.is_set():
            worker.gcs_error_subscriber.poll()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    silence(worker)
    replaced = worker.gcs_error_subscriber
    silence(worker)
    assert isinstance(replaced, NoErrors) and worker.gcs_error_subscriber is replaced
    assert own.closed.is_set() and own.polls <= 1
    stopped.set()
    worker.gcs_error_subscriber.close()
    listener.join(30)
    assert not listener.is_alive()


def test_a_worker_without_a_listener_is_left_alone() -> None:
    silence(SimpleNamespace())
