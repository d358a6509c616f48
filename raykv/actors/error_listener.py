"""Keeps Ray's error listener from spinning after the head was lost.

In Ray 2.60 every driver has a thread that polls the GCS for error messages. A GCS that was restarted does not know
the subscription and answers each poll at once with nothing, so the thread polls without a pause: measured, a third
of a core in each engine process, under its GIL, and half a core in the GCS.
"""

from __future__ import annotations

import time
from typing import Any

PAUSE_S = 5.0
TOO_SOON_S = 0.5
"""A poll that waits for a message takes up to half a minute; one that is refused returns within milliseconds."""


class PatientSubscriber:
    """Ray's subscriber, with a pause after a poll that brought nothing too soon."""

    def __init__(self, subscriber: Any) -> None:
        self._subscriber = subscriber

    def poll(self, timeout: float | None = None) -> Any:
        """As Ray's: `(key, error)`, both None when there was no message."""
        started = time.monotonic()
        found = self._subscriber.poll(timeout) if timeout is not None else self._subscriber.poll()
        if found[1] is None and time.monotonic() - started < TOO_SOON_S:
            time.sleep(PAUSE_S)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._subscriber, name)


def calm(worker: Any) -> None:
    """Put the pause into a driver's listener (`global_worker.gcs_error_subscriber` in Ray 2.60)."""
    subscriber = getattr(worker, "gcs_error_subscriber", None)
    if subscriber is not None and not isinstance(subscriber, PatientSubscriber):
        worker.gcs_error_subscriber = PatientSubscriber(subscriber)
