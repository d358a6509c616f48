"""Calls to an actor that has a name: one way for all handles. It sits above the edge to Ray, `handles`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raykv.actors import handles
from raykv.actors.store_call import Done


class NamedActor:
    """Any thread. `groups`: the concurrency group of each method; others are of the control group."""

    def __init__(self, name: str, actor: Any, label: str, groups: Mapping[str, str]) -> None:
        """`label`: the class's name, for Ray's timeline."""
        self.name = name
        self._actor, self._label, self._groups = actor, label, groups
        self._methods: dict[str, Any] = {}  # kept, since Ray makes a new object each time

    def submit(self, method: str, *args: Any, done: Done) -> None:
        """About 0.1 to 0.4 ms; `done` runs in a thread of Ray's. Raises HostError if it can't be sent."""
        handles.on_done(self.name, self._sent(method, args), done)

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        """Raises HostTimeout, HostDied or HostRaised."""
        return handles.result_of(self.name, self._sent(method, args), timeout)

    def _sent(self, method: str, args: tuple[Any, ...]) -> Any:
        try:
            bound = self._methods.get(method)
            if bound is None:
                group = self._groups.get(method, handles.CONTROL_GROUP)
                options = {"concurrency_group": group, "name": f"{self._label}.{method}"}
                bound = self._methods[method] = getattr(self._actor, method).options(**options)
            return bound.remote(*args)
        except Exception as error:  # before it was sent, or after: the caller can't tell
            raise handles.translated(self.name, error) from error
