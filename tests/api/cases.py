"""What the tests of the API share: a prompt, its hashes, and who is who in the fake cluster."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from tests.support.fake_operators import (
    NODES,
    FakeCaller,
    FakeDesk,
    FakeStore,
    FakeWorld,
    hashes_of,
)

LEFT, RIGHT = (f"raykv-store-default-{node[:12]}" for node in NODES)
TOKENS = list(range(50))  # three full blocks
HASHES = hashes_of(tuple(TOKENS))
CHILD = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def store(world: FakeWorld, name: str = LEFT) -> FakeStore:
    target: FakeStore = caller(world, name).target
    return target


def caller(world: FakeWorld, name: str) -> FakeCaller:
    found: Any = world.store_callers.get(name) or world.desk_callers[name]
    return found


def desk(world: FakeWorld, engine: str = "engine-a") -> FakeDesk:
    target: FakeDesk = caller(world, f"raykv-desk-{engine}").target
    return target


def shown(thing: Any) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(thing)
    return console.export_text()


def state(world: FakeWorld, name: str) -> Any:
    of = store(world, name)
    return (dict(of.tiers), {key: set(media) for key, (media, _) in of.blocks.items()}, dict(of.pinned),
            dict(of.quotas), dict(of.ops))  # fmt: skip
