"""Ends Ray's error listener in a driver: it can spin.

In Ray 2.60 every driver has a thread that polls the GCS for error messages, to print them. A GCS that does not know the
subscription (it was restarted, or took a starved process for dead) answers each poll at once with nothing, and the
poll, in C++, asks again without a pause: measured, 2600 polls a second, a third of a core in an engine process and
half a core in the GCS, on a machine of two. What the messages say stands in RayKV's own log and in Ray's.
"""

from __future__ import annotations

import threading
from typing import Any


class NoErrors:
    """Takes the place of Ray's subscriber; nothing ever comes."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def subscribe(self) -> None:
        """Nothing."""

    def poll(self, timeout: float | None = None) -> tuple[None, None]:
        """Waits for `close`. As Ray's: `(key, error)`, both None when there was no message."""
        self._closed.wait(timeout)
        return None, None

    def close(self) -> None:
        """Ends every `poll`."""
        self._closed.set()


def silence(worker: Any) -> None:
    """Put an end to a driver's polls (`global_worker.gcs_error_subscriber` in Ray 2.60)."""
    subscriber = getattr(worker, "gcs_error_subscriber", None)
    if subscriber is not None and not isinstance(subscriber, NoErrors):
        worker.gcs_error_subscriber = NoErrors()
        subscriber.close()  # ends the poll that is under way; the next one is on the new object
