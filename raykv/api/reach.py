"""What the API needs of a cluster: actors to ask, by name, and its nodes. `ray_world.RayWorld` has it over Ray,
`tests/support/fake_world.py` in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Caller(Protocol):
    """One actor. Any thread."""

    @property
    def name(self) -> str:
        """Of its actor."""

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        """Blocks for `timeout` seconds at most. Raises HostTimeout, HostDied or HostRaised."""


@dataclass(frozen=True)
class NodeFact:
    """A node as Ray and the Controller know it. `state`: alive, draining, drained, dead."""

    id: str
    host: str
    address: str
    state: str
    cpus: float = 0.0
    gpus: float = 0.0


Tell = Callable[[str, str], None]
"""Hears of what happens meanwhile: what it is about, and a sentence."""


class World(Protocol):
    """A cluster. Every method may block for as long as a call to the head takes, and raises RayKVError. Any thread."""

    @property
    def address(self) -> str:
        """Of Ray's head."""

    @property
    def namespace(self) -> str:
        """Ray's namespace of RayKV's actors."""

    def nodes(self) -> list[NodeFact]:
        """All nodes that Ray knows, dead ones too."""

    def desks(self) -> Mapping[str, Caller]:
        """The desks of the engines (`engine_messages`), by the names of their actors."""

    def stores(self) -> Mapping[str, Caller]:
        """The stores (`admin_messages`), by the names of their actors."""

    def drain(self, node: str, timeout: float, tell: Tell) -> str:
        """Empty a node and wait until it is; a sentence that says what was done. `node` is its whole id."""

    def undrain(self, node: str, timeout: float) -> str:
        """Use it again; a sentence."""

    def close(self) -> None:
        """Leave it, if this process joined it for this."""
