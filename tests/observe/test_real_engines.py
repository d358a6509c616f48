"""Two real engines under load, a real Prometheus and readers of both streams of KV events: what each of them sees."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from raykv.actors.event_reader import EventReader, EventsSilent
from raykv.observe import provision
from raykv.observe.names import CHILD_COUNTERS, CHILD_GAUGES, CHILD_TIMES, seconds_name
from tests.observe.test_prometheus import QUERIES, as_grafana_sends
from tests.support.busy_engines import BLOCK, BusyEngines
from tests.support.prometheus import Prometheus
from tests.support.prompts import prompt
from tests.support.waiting import eventually

pytestmark = [pytest.mark.soak, pytest.mark.ray, pytest.mark.engine, pytest.mark.timeout(900)]

FILL_S = 240.0
NOTHING_HAPPENS = {"Asking other nodes"}
"""There is one node: nobody else is asked, so the seconds of that are not a number."""
CHILDREN = {"tiers", "files"}


@pytest.fixture(scope="module")
def busy(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BusyEngines]:
    found = BusyEngines(tiny_model, tmp_path_factory.mktemp("busy"))
    try:
        yield found
    finally:
        found.close()
    assert not found.wrong


@pytest.fixture
def load(busy: BusyEngines) -> Iterator[None]:
    busy.begin()
    yield
    busy.rest()
    assert busy.served and not busy.wrong


def numbers(prometheus: Prometheus, expr: str) -> list[float]:
    found = [float(result["value"][1]) for result in prometheus.query(expr)]
    return [] if all(map(math.isnan, found)) else found


def vllms(prometheus: Prometheus, name: str) -> list[tuple[dict[str, str], float]]:
    """A metric of vLLM's pages, in whose names prometheus_client writes `_` for `:` to who asks for OpenMetrics."""
    found = prometheus.query(f'{{__name__=~"vllm[:_]raykv_{name}"}}')
    return [(one["metric"], float(one["value"][1])) for one in found]


def test_each_panel_has_data_and_each_page_its_labels(busy: BusyEngines, load: None) -> None:
    pages = {name: engine.serve_metrics() for name, engine in busy.engines.items()}
    prometheus = Prometheus([*busy.targets, *pages.values()], provision.alerts_text())
    try:
        # A child is lost and comes back: that takes some seconds to be measured.
        pid = eventually(lambda: next(iter(busy.kv.engine("left").child("files").host_pids), 0), "a host")
        os.kill(pid, signal.SIGKILL)
        wanted = {what: as_grafana_sends(expr) for what, expr in QUERIES.items()}
        deadline = time.monotonic() + FILL_S
        while set(wanted) - {what for what in wanted if any(part in what for part in NOTHING_HAPPENS)}:
            wanted = {what: expr for what, expr in wanted.items() if not numbers(prometheus, expr)}
            assert time.monotonic() < deadline, f"these have no data: {sorted(wanted)}"
            time.sleep(1.0)
        sources = {
            result["metric"]["source"] for result in prometheus.query("sum by (source) (ray_raykv_tokens_total)")
        }
        assert sources >= {"gpu", "host", "disk", "computed"}
        of_vllm = [f"{name}_total" for name in (*CHILD_COUNTERS, *map(seconds_name, CHILD_TIMES))]
        for name in [*of_vllm, *(f"child_{name}" for name in CHILD_GAUGES)]:
            labels = {(one["instance"], one["raykv_child"]) for one, _ in vllms(prometheus, name)}
            assert labels == {(page, child) for page in pages.values() for child in CHILDREN}, name
        for name in ("tokens_loaded_total", "tokens_saved_total"):
            figures = [value for labels, value in vllms(prometheus, name) if labels["raykv_child"] == "tiers"]
            assert len(figures) == 2 and all(figures), name
        media = {labels["medium"] for labels, value in vllms(prometheus, "tier_tokens_loaded_total") if value}
        assert media >= {"host", "disk"}
    finally:
        prometheus.stop()


class Copies:
    """What a router of both streams believes: for each hash in which media, and whose they are."""

    def __init__(self) -> None:
        self.where: dict[int, set[tuple[str, str]]] = defaultdict(set)
        self.tokens: dict[int, list[int]] = {}

    def take(self, publisher: str, payload: bytes) -> None:
        """A KVEventBatch of an engine's publisher, or of the merged stream ("")."""
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "AllBlocksCleared":
                for places in self.where.values():
                    places -= {one for one in places if (one[1] == publisher if publisher else one[0] != "GPU")}
                continue
            owner = event.get("ownership") or publisher
            for number, block_hash in enumerate(event["block_hashes"]):
                place = (event["medium"], owner)
                (set.add if event["type"] == "BlockStored" else set.discard)(self.where[block_hash], place)
                if event.get("token_ids"):
                    size = event["block_size"]
                    self.tokens[block_hash] = event["token_ids"][number * size : (number + 1) * size]

    def media(self, tokens: list[int]) -> set[str]:
        """Of the blocks of a prompt that some engine has told the tokens of; empty unless all are known."""
        blocks = [tokens[at : at + BLOCK] for at in range(0, len(tokens) // BLOCK * BLOCK, BLOCK)]
        known = {tuple(one): block_hash for block_hash, one in self.tokens.items()}
        if not all(tuple(block) in known for block in blocks):
            return set()
        places = [{medium for medium, _ in self.where[known[tuple(block)]]} for block in blocks]
        return set.intersection(*places)


def test_a_router_follows_both_streams(busy: BusyEngines) -> None:
    """The engines' own tell GPU blocks and tokens, the merged one what stores hold and lose, by the same hashes."""
    context, copies = zmq.Context(), Copies()
    engines = {}
    for name, endpoint in busy.endpoints.items():
        engines[name] = context.socket(zmq.SUB)
        engines[name].setsockopt_string(zmq.SUBSCRIBE, f"kv@{name}")
        engines[name].connect(endpoint)
    mine, kv = prompt(10 * BLOCK + 5, seed=31), busy.kv
    with EventReader(busy.events.address, busy.events.replay_address) as stores:

        def read() -> Copies:
            for name, socket in engines.items():
                while socket.poll(10):
                    copies.take(name, socket.recv_multipart()[-1])
            try:
                while True:
                    copies.take("", stores.next(0.05).payload)
            except EventsSilent:
                return copies

        def asked() -> bool:  # vLLM's publisher drops what it tells before a subscription has reached it
            busy.engines["left"].forget(60)
            busy.engines["left"].generate(mine, 4)
            return {"GPU", "CPU"} <= read().media(mine)

        try:
            eventually(asked, "the prompt on the GPU and in the host tier")
            owners = {owner for places in copies.where.values() for medium, owner in places if medium == "CPU"}
            assert owners == {store.actor for store in kv.stores}
            busy.engines["left"].forget(60)
            busy.engines["left"].generate([7, 8, 9], 1)  # vLLM tells of it with the next step
            held = ({"CPU"}, {"CPU", "STORAGE"})  # a full host tier has copies of what is cold on the disk
            eventually(lambda: read().media(mine) in held, "nothing on the GPU, all in the host tier")
            assert kv.drain_tier("host").ok and kv.clear(tier="host").ok
            eventually(lambda: read().media(mine) == {"STORAGE"}, "all on the disk alone")
            assert kv.clear(everything=True).ok and kv.add_tier("host", kv.stores[0].tier("host").capacity).ok
            eventually(lambda: not read().media(mine), "nothing anywhere")
        finally:
            context.destroy(linger=0)
