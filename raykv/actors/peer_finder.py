"""How a store reaches other stores: who might have a prefix, and whom to call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from raykv.actors.directory_call import FindDirectory
from raykv.actors.locator import Locator
from raykv.actors.store_call import StoreCaller
from raykv.directory_messages import Holder, Locate, Located

OpenPeer = Callable[[str], StoreCaller]
"""The store whose actor has this name; may block for a moment. Raises RayKVError if there is none."""


class PeerFinder(Protocol):
    """Whom to ask for a prefix. Any thread. Never raises: who can't be asked knows nobody."""

    @property
    def up(self) -> bool:
        """Whether asking makes sense now. Microseconds."""

    def find(self, wanted: Locate, timeout: float) -> tuple[Holder, ...]:
        """Most blocks first. Blocks for `timeout` seconds at most."""

    def close(self) -> None: ...


class DirectoryFinder:
    """Asks the Directory."""

    def __init__(self, find: FindDirectory) -> None:
        self._locator = Locator(find)

    @property
    def up(self) -> bool:
        return self._locator.up

    def find(self, wanted: Locate, timeout: float) -> tuple[Holder, ...]:
        answered = threading.Event()
        answers: list[Located] = []

        def done(located: Located) -> None:
            answers.append(located)
            answered.set()

        self._locator.locate(wanted, timeout, done)
        answered.wait(timeout)
        return answers[0].holders if answers else ()

    def close(self) -> None:
        self._locator.close()


@dataclass(frozen=True)
class PeerDoor:
    """A store's way to others; can be pickled. `node` is the id of its node, `store` the name of its actor.

    `loopback`: the node's address is one that only this machine can reach. `find_directory`: whom it tells what it
    holds; None: nobody. `find_events`: the same for the event stream.
    """

    make_finder: Callable[[], PeerFinder]
    open_peer: OpenPeer
    node: str
    store: str
    loopback: bool
    find_directory: FindDirectory | None = None
    find_events: FindDirectory | None = None
