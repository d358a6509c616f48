"""Stores of several nodes in one process, that find and call each other as over Ray, and a peer that misbehaves."""

from __future__ import annotations

import dataclasses
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raykv.actors.node_store import NodeStore
from raykv.actors.peer_finder import PeerDoor
from raykv.actors.store_call import Done
from raykv.directory_messages import Holder, Locate
from raykv.errors import ClusterError, HostDied, HostError, HostRaised
from raykv.store_messages import Attached, LookedUp, LookUp, StoreSpec
from raykv.types import EngineId
from tests.support.store_calls import call_and_wait


class PeerCaller:
    """Implements StoreCaller over a store of this process; `change` stands for a peer that lies, `hung` for one that
    does not answer."""

    def __init__(self, name: str, store: NodeStore) -> None:
        self.name = name
        self.store = store
        self.dead = False
        self.hung: threading.Event | None = None
        self.change: Callable[[Any], Any] = lambda result: result
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def submit(self, method: str, *args: Any, done: Done) -> None:
        if self.dead:
            done(None, HostDied("the peer is gone"))
            return
        self.calls.append((method, args))

        def run() -> None:
            if self.hung is not None:
                self.hung.wait(30)
            result: Any = None
            error: HostError | None = None
            try:
                result = getattr(self.store, method)(*pickle.loads(pickle.dumps(args)))
            except Exception as raised:
                error = HostRaised("peer", type(raised).__name__, str(raised), "")
            done(pickle.loads(pickle.dumps(self.change(result))), error)

        threading.Thread(target=run, daemon=True).start()

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        return call_and_wait(self, method, *args, timeout=timeout)

    def process(self, attached: Attached) -> None:
        return None

    def count(self, method: str) -> int:
        return sum(name == method for name, _ in self.calls)


class FakeFinder:
    """Says what the test tells it to; by itself, that every other store has all that is asked for."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes

    @property
    def up(self) -> bool:
        return self.nodes.directory_up

    def find(self, wanted: Locate, timeout: float) -> tuple[Holder, ...]:
        if self.nodes.slow_s:
            time.sleep(min(timeout, self.nodes.slow_s))
        blocks = len(wanted.hashes) // 32
        others = [name for name in self.nodes.callers if f"node of {name}" != wanted.but_not]
        return tuple(Holder(f"node of {name}", name, blocks) for name in others)

    def close(self) -> None:
        pass


class Nodes:
    """Stores by the name of their actor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.callers: dict[str, PeerCaller] = {}
        self.slow_s = 0.0
        self.directory_up = True

    def add(self, name: str, spec: StoreSpec) -> NodeStore:
        """A store of its own node; a second time, the next life of it."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        door = PeerDoor(lambda: FakeFinder(self), self.open_peer, f"node of {name}", name, loopback=True)
        store = NodeStore(dataclasses.replace(spec, peer=True), "test", shm=folder, door=door)
        if name in self.callers:
            self.callers[name].store = store
        else:
            self.callers[name] = PeerCaller(name, store)
        return store

    def open_peer(self, name: str) -> PeerCaller:
        if name not in self.callers:
            raise ClusterError(f"there is no store {name}")
        return self.callers[name]


def find(store: NodeStore, engine: EngineId, look_up: LookUp, limit_s: float = 20.0) -> LookedUp:
    """As an asker does: here first, then at other nodes."""
    (have,) = store.look_ups(engine, [look_up])
    return store.reach(engine, look_up, have, limit_s) if have.more else have
