"""What the router adds to the time to the first token.

    python -m benchmarks.router [--requests 300] [--chars 4000] [--json]

A Ray of its own, one Ray Serve, and on it: an empty application that reads the request and answers at once, and the
router, before two fake engines (in a process of their own) that answer at once. One client asks them in turns, one
request after the other, for a stream, over kept connections; the time to the first byte of the body is what counts.
Printed for each: the median, and the middle half. The router may add at most 3 ms at the median to the empty
application; the time of the two requests to the engines is a part of that.

The router learns prompts and asks a real Directory meanwhile, as in a cluster: the fake engines tokenize, an actor
stands for the desk of one of them, and the Directory has BLOCKS random blocks. How often it did is printed too.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import os
import random
import re
import time
from collections.abc import Awaitable, Callable
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from raykv.cluster_messages import EngineInfo, EngineRole
from raykv.config.cluster_spec import Transport
from raykv.config.router import RouterOptions
from raykv.directory_messages import Publish
from raykv.engine_messages import EngineView, Hashed, HashOrder
from raykv.store_messages import HASH_NBYTES
from raykv.types import EngineId, StoreLife
from tests.support.process import free_ports
from tests.support.ray_cluster import RayCluster

LIMIT_S = 3e-3
WARM_UP = 30
KNOWN = 20
"""Prompts that come again and again: known, and who holds them is asked anew each second."""
TOKENS = 1000
BLOCK = 16
BLOCKS = 100_000
MARK_NBYTES = 8
EVENT = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (EVENT, b"data: [DONE]\n\n"))
    + b"0\r\n\r\n"
)
PREFILLED = json.dumps(
    {"choices": [], "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [list(range(100))]}}
).encode()
PREFILL = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(PREFILLED),
    PREFILLED,
)
TOKENIZED = json.dumps({"tokens": list(range(TOKENS)), "count": TOKENS}).encode()
TOKENIZE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(TOKENIZED),
    TOKENIZED,
)


class FakeEngine(asyncio.Protocol):
    """Answers each request as soon as it is complete, without reading it."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if len(body) >= int(lengths[0].split(b":")[1]):
            self._data = b""
            self._transport.write(TOKENIZE if head.startswith(b"POST /tokenize ") else self._answer)


def engines(prefill_port: int, decode_port: int) -> None:
    """Runs until it is ended."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        await loop.create_server(lambda: FakeEngine(PREFILL), "127.0.0.1", prefill_port)
        server = await loop.create_server(lambda: FakeEngine(STREAM), "127.0.0.1", decode_port)
        await server.serve_forever()

    asyncio.run(run())


def empty_application() -> Any:
    """Built where it runs: Serve pickles functions of this module by their name."""

    async def application(
        scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return application


class FakeDesk:
    """Stands for an engine's desk: shows it, and makes other hashes each time, which nobody holds."""

    def view(self) -> EngineView:
        chain: dict[str, Any] = {"load_policy": "compose", "children": (), "store": "s", "fingerprints": ("00" * 16,)}
        return EngineView(EngineId("fake"), "m", ("m",), "decode", 1, "", "", 0.0, BLOCK, 4096, 1, **chain)

    def hash(self, order: HashOrder) -> Hashed:
        return Hashed(order.number, os.urandom(len(order.token_ids) // BLOCK * HASH_NBYTES))


class Residency:
    """The Directory, a store that holds BLOCKS random blocks, and a desk, which lives as long as this is kept."""

    def __init__(self) -> None:
        import ray

        from raykv.actors import desk_handle, directory_handle

        self._directory = directory_handle.open_directory()
        self._node = ray.get_runtime_context().get_node_id()
        self._number = 0
        self.publish(os.urandom(MARK_NBYTES * BLOCKS))
        actor = ray.remote(num_cpus=0, concurrency_groups=desk_handle.GROUPS)(FakeDesk)
        self._desk = actor.options(name=desk_handle.desk_name(EngineId("fake")), namespace="raykv").remote()
        ray.get(self._desk.view.remote())

    def publish(self, added: bytes = b"") -> None:
        """With nothing it says that the store lives, which a Directory wants to hear every 30 s."""
        batch = Publish(self._node, "store", StoreLife("life"), 0, self._number, added)
        self._directory.call("publish", batch, timeout=60)
        self._number += 1


def learned(port: int) -> dict[str, int]:
    """What the router counts of it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    counts = dict(re.findall(r'raykv_router_events_total{event="([^"]+)"} (\d+)', text))
    return {name: int(counts.get(name, 0)) for name in ("prompts learned", "prompts not learned", "look-ups")}


class Way:
    """One place to ask, over a kept connection."""

    def __init__(
        self, name: str, port: int, path: str = "/v1/completions", short: bool = False, known: bool = False
    ) -> None:
        self.name = name
        self.known = known
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._path = path
        self._short = short
        self.taken: list[float] = []

    def ask(self, prompt: str, count: bool) -> None:
        body = json.dumps({"prompt": prompt[:20] if self._short else prompt, "max_tokens": 9, "stream": True})
        begun = time.perf_counter()
        self._connection.request("POST", self._path, body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        answer.read1(1)
        took = time.perf_counter() - begun
        rest = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{self.name} answered {answer.status}: {rest!r}")
        if count:
            self.taken.append(took)


def measure(requests: int, chars: int) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
    """Seconds by way, and what the router has learned meanwhile."""
    from ray import serve

    from raykv.actors import cluster
    from raykv.router import app

    prefill_port, decode_port, port = free_ports(3)
    fakes = multiprocessing.get_context("spawn").Process(target=engines, args=(prefill_port, decode_port), daemon=True)
    fakes.start()
    ray_cluster = RayCluster()
    try:
        cluster.connect(ray_cluster.address)
        found = (
            EngineInfo("p0", EngineRole.PREFILL, f"http://127.0.0.1:{prefill_port}", "", True),
            EngineInfo("d0", EngineRole.DECODE, f"http://127.0.0.1:{decode_port}", "", True),
        )
        residency = Residency()
        app.deploy(RouterOptions(port=port, engines=found, transport=Transport.NIXL))
        empty = serve.deployment(
            serve.ingress(empty_application)(),
            name="Empty",
            max_ongoing_requests=100,
            ray_actor_options={"num_cpus": 0},
        )
        serve.run(empty.bind(), name="empty", route_prefix="/empty")
        ways = [
            Way("an engine, asked directly", decode_port),
            Way("empty Ray Serve application", port, "/empty"),
            Way("router, decode engine alone", port, short=True),
            Way("router, prefill and decode", port),
            Way("router, the same, a known prompt", port, known=True),
        ]
        dice = random.Random(0)
        known = ["".join(dice.choices("abcdefgh ", k=chars)) for _ in range(KNOWN)]
        for number in range(WARM_UP + requests):
            if number % KNOWN == 0:
                residency.publish()
            prompt = "".join(dice.choices("abcdefgh ", k=chars))
            for way in dice.sample(ways, len(ways)):
                way.ask(known[number % KNOWN] if way.known else prompt, number >= WARM_UP)
        counts = learned(port)
        serve.shutdown()
        return {way.name: summary(way.taken) for way in ways}, counts
    finally:
        cluster.disconnect()
        ray_cluster.stop()
        fakes.terminate()
        fakes.join()


def summary(taken: list[float]) -> dict[str, float]:
    low, _, high = quantiles(taken, n=4)
    return {"median_s": median(taken), "low_s": low, "high_s": high, "p99_s": quantiles(taken, n=100)[98]}


def show(result: dict[str, dict[str, float]], added: dict[str, float]) -> None:
    table = Table(title="Time to the first byte of a stream", title_justify="left")
    for column in ("", "median, ms", "middle half, ms", "p99, ms", "added to the empty application, ms"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in result.items():
        low, high, p99 = (f"{row[key] * 1e3:.2f}" for key in ("low_s", "high_s", "p99_s"))
        extra = f"{added[name] * 1e3:+.2f}" if name in added else ""
        table.add_row(name, f"{row['median_s'] * 1e3:.2f}", f"{low} to {high}", p99, extra)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--chars", type=int, default=4000, help="characters of a prompt")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    arguments = parser.parse_args()
    result, counts = measure(arguments.requests, arguments.chars)
    base = result["empty Ray Serve application"]["median_s"]
    added = {name: row["median_s"] - base for name, row in result.items() if name.startswith("router")}
    if arguments.json:
        print(json.dumps({"ttft": result, "added_s": added, "limit_s": LIMIT_S, **counts}))
    else:
        show(result, added)
        print(f"Meanwhile: {', '.join(f'{count} {name}' for name, count in counts.items())}.")
        verdict = "within" if max(added.values()) <= LIMIT_S else "ABOVE"
        print(f"At the median the router adds {max(added.values()) * 1e3:.2f} ms: {verdict} {LIMIT_S * 1e3:g} ms.")


if __name__ == "__main__":
    main()
