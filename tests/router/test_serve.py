"""The router on a real Ray Serve, with the engines' list from an actor under the Controller's name."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from raykv.cluster_messages import CONTROLLER
from raykv.config.router import RouterOptions
from raykv.errors import ClusterError
from tests.router import fake_engine as fakes
from tests.router.fake_engine import TOKENS, FakeEngine, drive, engine
from tests.support.process import free_ports
from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280)]

PROMPT = "Once upon a time " * 40
NAMESPACE = "raykv-router-test"


@pytest.fixture(scope="module")
def in_cluster(ray_cluster: RayCluster) -> Iterator[None]:
    from raykv.actors import cluster
    from raykv.router import app

    cluster.connect(ray_cluster.address)
    try:
        yield
    finally:
        app.remove()
        cluster.disconnect()


class Listing:
    """Stands for the Controller: says what it was told."""

    def __init__(self) -> None:
        self.found: Any = []

    def tell(self, found: Any) -> None:
        self.found = found

    def engines(self) -> Any:
        return self.found


async def until_answered(client: aiohttp.ClientSession, url: str) -> float:
    """Seconds until a request is answered."""
    start = time.monotonic()
    while True:
        try:
            async with client.post(url + "/v1/completions", json={"prompt": PROMPT}) as response:
                if response.status == 200:
                    return time.monotonic() - start
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.05)


def replicas() -> set[str]:
    """The names of the router's replicas."""
    import ray

    names = (found["name"] for found in ray.util.list_named_actors(all_namespaces=True))
    return {name for name in names if name.startswith("SERVE_REPLICA::raykv-router")}


async def lose_the_replica(client: aiohttp.ClientSession, url: str, engines: dict[str, FakeEngine]) -> None:
    """Kill it with a stream under way, and a request that has no byte of its answer yet: Serve starts another one."""
    import ray

    d0 = engines["d0"]
    d0.behave, aborted = fakes.streams_for_ever, d0.aborted
    streaming = await client.post(url + "/v1/completions", json={"prompt": PROMPT, "stream": True})
    assert d0.event(0) in await streaming.content.readany()
    d0.behave, asked = fakes.hangs, len(d0.seen)
    waiting = asyncio.ensure_future(client.post(url + "/v1/completions", json={"prompt": PROMPT}))
    await fakes.until(lambda: len(d0.seen) > asked)
    d0.behave = None
    [replica] = replicas()
    ray.kill(ray.get_actor(replica, namespace="serve"))
    killed = time.monotonic()
    events = (await streaming.read()).split(b"\n\n")
    took = time.monotonic() - killed
    assert b"replica died" in events[-3] and events[-2:] == [b"data: [DONE]", b""]
    async with await waiting as response:  # asked again
        assert response.status == 200 and (await response.json())["choices"][0]["text"].startswith("d0.0")
        assert d0.seen[-1].headers["X-Request-Id"] == response.headers["X-Request-Id"]
    print(f"a killed replica: its stream ended after {took:.1f} s, and another answered after", end=" ")
    print(f"{time.monotonic() - killed:.1f} s")
    await fakes.until(lambda: d0.aborted == aborted + 2)


def test_through_ray_serve(in_cluster: None) -> None:
    import ray

    from raykv.router import app

    # Found by the router under this name, and ended with this reference.
    controller = ray.remote(num_cpus=0)(Listing).options(name=CONTROLLER, namespace=NAMESPACE).remote()
    port = free_ports(1)[0]
    options = RouterOptions(port=port, namespace=NAMESPACE, min_prompt_chars=0, refresh_s=0.1)

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            engines = {name: engine(name) for name in ("p0", "d0")}
            for one in engines.values():
                await stack.enter_async_context(fakes.serving(one))
            url = await asyncio.to_thread(app.deploy, options)
            assert url == f"http://127.0.0.1:{port}"
            client = await stack.enter_async_context(aiohttp.ClientSession())

            async with client.post(url + "/v1/completions", json={"prompt": PROMPT}) as response:
                assert response.status == 503 and "No engine is running" in (await response.json())["error"]["message"]

            ray.get(controller.tell.remote([one.info for one in engines.values()]))
            await until_answered(client, url)
            d0 = engines["d0"]
            body = {"prompt": PROMPT, "stream": True}
            async with client.post(url + "/v1/completions", json=body, headers={"X-Request-Id": "mine"}) as response:
                got = await response.read()
                assert response.headers.getall("X-Request-Id") == ["mine"]
            assert got == b"".join(d0.event(i) for i in range(TOKENS)) + b"data: [DONE]\n\n"
            assert engines["p0"].seen[-1].headers["X-Request-Id"] == "mine" == d0.seen[-1].headers["X-Request-Id"]
            assert d0.pulled[-1] == f"p0-{len(engines['p0'].seen)}"

            # Tokens come one by one, and a client that leaves ends the engine's work.
            d0.behave = fakes.streams_for_ever
            async with client.post(url + "/v1/completions", json=body) as response:
                assert d0.event(0) in await response.content.readany()
            await fakes.until(lambda: d0.aborted == 1)
            d0.behave, engines["p0"].behave = None, fakes.hangs
            asked = len(engines["p0"].seen)
            leaving = asyncio.ensure_future(client.post(url + "/v1/completions", json=body))
            await fakes.until(lambda: len(engines["p0"].seen) > asked)
            leaving.cancel()
            await fakes.until(lambda: engines["p0"].aborted == 1)
            engines["p0"].behave = None

            # The same again changes nothing; other options do.
            before = replicas()
            await asyncio.to_thread(app.deploy, options)
            assert replicas() == before and len(before) == 1
            changed = dataclasses.replace(options, prefill_timeout_s=30.0)
            await asyncio.to_thread(app.deploy, changed)
            await until_answered(client, url)
            await fakes.until(lambda: len(replicas()) == 1)
            assert not replicas() & before

            # A second replica leaves the first alone; with one of two lost, requests go on.
            before = replicas()
            await asyncio.to_thread(app.deploy, dataclasses.replace(changed, replicas=2))
            await fakes.until(lambda: len(replicas()) == 2)
            assert before < replicas()
            ray.kill(ray.get_actor(before.pop(), namespace="serve"))
            for _ in range(20):
                async with client.post(url + "/v1/completions", json={"prompt": PROMPT}) as response:
                    assert response.status == 200
            await asyncio.to_thread(app.deploy, changed)
            await fakes.until(lambda: len(replicas()) == 1)

            # Another address needs another Serve; the running router is left alone.
            with pytest.raises(ClusterError, match=f"listens at 127.0.0.1:{port}"):
                await asyncio.to_thread(app.deploy, RouterOptions(port=free_ports(1)[0]))

            await lose_the_replica(client, url, engines)
            assert await asyncio.to_thread(app.remove)
            assert not await asyncio.to_thread(app.remove)

    drive(scenario(), 240)


def test_a_port_that_is_taken_is_one_clear_error(in_cluster: None) -> None:
    from raykv.router import app

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ClusterError, match=f"can't listen at 127.0.0.1:{port}"):
            app.deploy(RouterOptions(port=port))
