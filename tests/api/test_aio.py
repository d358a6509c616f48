"""The asyncio twins: the same answers, the loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import inspect
import threading

import pytest

from raykv.api import Cluster, NotFoundError
from raykv.store_messages import Medium
from tests.api.cases import HASHES, TOKENS, store
from tests.api.test_watching import kill_child
from tests.support.fake_operators import FakeWorld


def test_every_operation_has_a_twin(kv: Cluster) -> None:
    for name in dir(Cluster):
        if name.startswith("_") or name in ("aio", "watch"):
            continue
        twin = getattr(kv.aio, name)
        assert inspect.iscoroutinefunction(twin) and twin.__doc__, name
    with pytest.raises(AttributeError, match="no operation 'pinn'"):
        _ = kv.aio.pinn
    assert "pin" in dir(kv.aio)


def test_the_same_answers(kv: Cluster, world: FakeWorld) -> None:
    async def run() -> None:
        store(world).put(HASHES, Medium.HOST)
        found, engines = await asyncio.gather(kv.aio.lookup(TOKENS), kv.aio.engines())
        assert found.held_tokens == 48 and [engine.id for engine in engines] == ["engine-a", "engine-b"]
        done = await kv.aio.pin(TOKENS, "10m")
        assert (await kv.aio.unpin(done.number)).ok
        with pytest.raises(NotFoundError):
            await kv.aio.unpin(done.number)

    asyncio.run(run())


def test_the_loop_goes_on_meanwhile(kv: Cluster, world: FakeWorld) -> None:
    """The look waits for what only the loop can do."""

    async def run() -> None:
        begun, go_on = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def look() -> None:
            loop.call_soon_threadsafe(begun.set)
            assert go_on.wait(30)

        world.problem = look
        task = asyncio.create_task(kv.aio.nodes())
        await begun.wait()
        go_on.set()
        assert len(await task) == 2

    asyncio.run(run())


def test_events(kv: Cluster, world: FakeWorld) -> None:
    async def run() -> list[str]:
        looks = iter([lambda: None, lambda: kill_child(world)])
        world.problem = lambda: next(looks, lambda: None)()
        seen = []
        async for event in kv.aio.watch(0.001):
            seen.append(event.what)
            break
        return seen

    assert asyncio.run(run()) == ["down"]


def test_it_closes(world: FakeWorld) -> None:
    async def run() -> None:
        async with Cluster(world).aio as kv:
            await kv.nodes()

    asyncio.run(run())
    assert world.closed == 1
