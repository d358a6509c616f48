"""P/D over NIXL between two real engines, beside offload children in both."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.conftest import Children
from tests.support.configs import example_child, multi, nixl_child
from tests.support.engine import Engine, Result
from tests.support.lmcache_server import LMCacheServer
from tests.support.process import free_ports
from tests.support.prompts import MAX_TOKENS, PROMPTS
from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.timeout(900)]

START_TIMEOUT_S = 300.0
"""The second engine starts beside the first one's NIXL thread, which takes a core of two."""

# A step that takes 10 ms may take many seconds where two NIXL threads spin on the cores of a small machine.
PATIENCE_S = 120.0
LIMITS = {"timeout_s": 60, "load_timeout_s": 120}

PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass
class Pair:
    prefill: Engine
    decode: Engine
    folder: Path

    def run(self, name: str) -> Result:
        """Prefill on one engine, decode on the other."""
        first = self.prefill.generate(PROMPTS[name], 1, kv_transfer_params=PREFILL, timeout_s=PATIENCE_S)
        params = first.kv_transfer_params
        assert params and params["remote_block_ids"]
        return self.decode.generate(PROMPTS[name], MAX_TOKENS, kv_transfer_params=params, timeout_s=PATIENCE_S)

    def forget(self) -> None:
        self.prefill.forget(PATIENCE_S)
        self.decode.forget(PATIENCE_S)

    def empty_folders(self) -> None:
        """ExampleConnector holds nothing any more, so that a test finds the same when it is tried again."""
        for entry in self.folder.glob("*/*"):
            shutil.rmtree(entry, ignore_errors=True)


@pytest.fixture(scope="module")
def pair(
    tiny_model: Path,
    ray_cluster: RayCluster,
    lmcache_server: LMCacheServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Each engine on a core of its own: a NIXL agent's progress thread takes one."""
    folder = tmp_path_factory.mktemp("pd")
    engines: list[Engine] = []
    try:
        for role, cpu in (("kv_producer", "0"), ("kv_consumer", "1")):
            # Under its own name HMA stays on in both, although ExampleConnector lacks it: NIXL compares that.
            children = [
                example_child(folder / role, **LIMITS),
                nixl_child(role, **LIMITS),
                lmcache_server.child(**LIMITS),
            ]
            config = multi(children, kv_connector="RayMultiConnector", kv_buffer_device="cpu")
            env = {
                **ray_cluster.env,
                "PYTHONPATH": os.getcwd(),
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)[0]),
            }
            engines.append(Engine(tiny_model, config, cpus=cpu, env=env))
            engines[-1].wait_ready(START_TIMEOUT_S)
        yield Pair(*engines, folder)
    finally:
        for engine in engines:
            engine.close()


def test_prefill_here_decode_there(pair: Pair, baseline: dict[str, list[int]]) -> None:
    pair.forget()
    pair.empty_folders()
    children = Children(pair.decode)
    before = children.metric("tokens_loaded", "NixlConnector")
    assert pair.run("page").token_ids == baseline["page"]
    assert children.metric("tokens_loaded", "NixlConnector") - before == len(PROMPTS["page"])
    pair.forget()

    # A plain request reuses the offload: the whole prompt from ExampleConnector ...
    before = children.metric("tokens_loaded", "ExampleConnector")
    assert pair.decode.generate(PROMPTS["page"], MAX_TOKENS, timeout_s=PATIENCE_S).token_ids == baseline["page"]
    assert children.metric("tokens_loaded", "ExampleConnector") - before == 349 // 32 * 32
    pair.forget()

    # ... and a shared prefix from LMCache.
    assert pair.run("long").token_ids == baseline["long"]
    pair.forget()
    before = children.metric("tokens_loaded", "LMCacheMPConnector")
    assert pair.decode.generate(PROMPTS["branch"], MAX_TOKENS, timeout_s=PATIENCE_S).token_ids == baseline["branch"]
    assert children.metric("tokens_loaded", "LMCacheMPConnector") - before >= 800 // 128 * 128
    pair.forget()


def test_the_loser_does_not_write(pair: Pair, baseline: dict[str, list[int]]) -> None:
    """Scenarios 6 and 7: a tier that stands first has the prompt, so NIXL transfers nothing, and the prefill side's
    blocks are free soon (`forget` needs that) and not at the end of NIXL's lease."""
    children = Children(pair.decode)
    assert pair.decode.generate(PROMPTS["aligned"], MAX_TOKENS, timeout_s=PATIENCE_S).token_ids == baseline["aligned"]
    pair.forget()
    nixl, example = (children.metric("tokens_loaded", child) for child in ("NixlConnector", "ExampleConnector"))
    assert pair.run("aligned").token_ids == baseline["aligned"]
    assert children.metric("tokens_loaded", "NixlConnector") == nixl
    assert children.metric("tokens_loaded", "ExampleConnector") == example + 480
    pair.forget()


def test_the_prefill_side_comes_back(pair: Pair, baseline: dict[str, list[int]]) -> None:
    """A killed NIXL host is rebuilt under a new engine id, and transfers work again; tokens are right all the time."""
    children = Children(pair.prefill)
    old = children.kill("NixlConnector")
    assert pair.prefill.generate(PROMPTS["crowd0"], MAX_TOKENS, timeout_s=PATIENCE_S).token_ids == baseline["crowd0"]
    children.wait_back("NixlConnector", old)
    pair.forget()
    before = Children(pair.decode).metric("tokens_loaded", "NixlConnector")
    # NIXL waits 5 s for a handshake and then avoids that peer for a while: on a busy machine it may need another try.
    for name in ("crowd5", "crowd4", "crowd3", "crowd2", "crowd1"):
        assert pair.run(name).token_ids == baseline[name]
        pair.forget()
        if Children(pair.decode).metric("tokens_loaded", "NixlConnector") == before + len(PROMPTS[name]):
            return
        time.sleep(5)
    raise AssertionError("no request was transferred after the prefill side came back")
