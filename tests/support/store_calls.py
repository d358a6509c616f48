"""What the stores of the tests share: a call that waits, made of one that does not."""

from __future__ import annotations

import threading
from typing import Any

from raykv.actors.store_call import StoreCaller
from raykv.errors import HostError, HostTimeout


def call_and_wait(store: StoreCaller, method: str, *args: Any, timeout: float) -> Any:
    """`StoreCaller.call` by `StoreCaller.submit`."""
    answered = threading.Event()
    answer: list[Any] = []

    def done(result: Any, error: HostError | None) -> None:
        answer.extend((result, error))
        answered.set()

    store.submit(method, *args, done=done)
    if not answered.wait(timeout):
        raise HostTimeout(f"the store did not answer within {timeout:g} s")
    if answer[1] is not None:
        raise answer[1]
    return answer[0]
