"""What a link needs of a store: to call it, to be answered in a thread of somebody else's, to see its process die.

`store_handle.StoreHandle` has it over Ray, `tests/support/in_process_store.py` without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from raykv.errors import HostError, HostRaised
from raykv.store_messages import Attached

Done = Callable[[Any, HostError | None], None]
"""Called once with a result or why there is none; in a thread of the handle's, so it must be short."""


class StoreProcess(Protocol):
    """The store's process, as `processes.Pidfd` is one."""

    def alive(self) -> bool:
        """A few microseconds."""

    def wait(self, timeout: float | None) -> bool:
        """True when it has ended: nothing touches any memory for it any more."""

    def signal(self, number: int) -> None:
        """Nothing happens when it has ended."""


class StoreCaller(Protocol):
    """One store, whatever its life: a call goes to the life that is there. Any thread."""

    @property
    def name(self) -> str:
        """Of its actor: other nodes find it by that."""

    def submit(self, method: str, *args: Any, done: Done) -> None:
        """Send a call; does not wait for its answer. What goes wrong reaches `done`, or is raised."""

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        """Raises HostTimeout, HostDied or HostRaised."""

    def process(self, attached: Attached) -> StoreProcess | None:
        """The process that gave this answer; None if it is gone."""


OpenStore = Callable[[], StoreCaller]
"""Finds or starts the store; may block for as long as that takes. Raises StoreError."""


def reason(error: BaseException) -> str:
    """For people: what the store itself said, without what Ray puts around it."""
    return error.message if isinstance(error, HostRaised) else str(error)
