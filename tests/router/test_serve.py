"""The router on a real Ray Serve, with the engines' list from an actor under the Controller's name."""

from __future__ import annotations

import asyncio
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
from tests.router.fake_engine import TOKENS, drive, engine
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

            # Another address needs another Serve; the running router is left alone.
            with pytest.raises(ClusterError, match=f"listens at 127.0.0.1:{port}"):
                await asyncio.to_thread(app.deploy, RouterOptions(port=free_ports(1)[0]))

            # A replica that dies is started again.
            names = [found["name"] for found in ray.util.list_named_actors(all_namespaces=True)]
            (replica,) = (name for name in names if name.startswith("SERVE_REPLICA::raykv-router"))
            ray.kill(ray.get_actor(replica, namespace="serve"))
            print(f"a killed replica was back after {await until_answered(client, url):.1f} s")
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
