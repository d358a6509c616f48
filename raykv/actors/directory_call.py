"""What a publisher and a locator need of the Directory: to find it, to call it, to be answered.

`directory_handle.DirectoryHandle` has it over Ray, `tests/support/in_process_directory.py` without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from raykv.actors.store_call import Done


class DirectoryCaller(Protocol):
    """The Directory, whatever its life. Any thread."""

    def submit(self, method: str, *args: Any, done: Done) -> None:
        """Send a call; does not wait for its answer. What goes wrong reaches `done`, or is raised as a HostError."""

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        """Raises HostTimeout, HostDied or HostRaised."""


FindDirectory = Callable[[], DirectoryCaller | None]
"""Looks for the Directory, and may start it; None: there is none now. May block for seconds. Raises RayKVError."""
