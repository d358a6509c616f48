"""Two real engines on one node whose requests use every source of theirs: for pictures, and for what watches them.

Their KV caches and the host tier hold a part of the prompts, so blocks come from vLLM's own cache, the host and the
disk, and some prompts are new. Both publish vLLM's own KV events; a Directory, a Controller with nothing to do and
RayKV's event stream run beside them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray

import raykv
from raykv.actors import controller_handle, directory_handle, event_handle
from raykv.event_messages import EventsOptions, EventsStatus
from tests.support.configs import example_child, multi, tier_child
from tests.support.engine import Engine
from tests.support.process import free_ports
from tests.support.prompts import prompt
from tests.support.ray_cluster import RayCluster

SLOT = 128 << 10  # bytes of one block of the tiny model
BLOCK = 32
GPU, HOST, DISK = 160, 160 * SLOT, 640 * SLOT
NAMES = ("left", "right")
FAMILIES, MEMBERS, OWN = 6, 10, 160
NEW = 0.15
"""The share of prompts that nobody has asked before."""
TOKENS = 8
AT_ONCE = 2


class BusyEngines:
    """Runs from construction to `close`; under load from `begin` to `rest`."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.store = f"busy{os.getpid()}"
        self.wrong: list[str] = []
        self.served = 0
        self._known: dict[tuple[int, ...], list[int]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._numbers = itertools.count()
        self._stack = contextlib.ExitStack()
        self._load: ThreadPoolExecutor | None = None
        self.engines: dict[str, Engine] = {}
        self.endpoints: dict[str, str] = {}
        """Where each engine publishes vLLM's own KV events."""
        try:
            self.ray = RayCluster(num_cpus=8, dashboard=True)
            self._stack.callback(self.ray.stop)
            for name in NAMES:
                self._begin_engine(name, model, folder)
            for engine in self.engines.values():
                engine.wait_ready()
            self.kv = raykv.connect(self.ray.address, timeout_s=30)
            self._stack.callback(self._leave)
            directory_handle.open_directory()
            controller_handle.start()
            (port,) = free_ports(1)
            self.events: EventsStatus = event_handle.open_events(EventsOptions(port=port))
        except BaseException:
            self._stack.close()
            raise

    def _begin_engine(self, name: str, model: Path, folder: Path) -> None:
        tiers = tier_child(self.store, str(HOST), str(DISK), folder / "disk", raykv={"name": "tiers"})
        tiers["kv_connector_extra_config"]["tiers"].append({"medium": "peer"})
        tiers["kv_connector_extra_config"] |= {"lookup_timeout_s": 10, "timeout_s": 60, "load_timeout_s": 60}
        children = [tiers, example_child(folder / name, name="files", timeout_s=60, load_timeout_s=60)]
        (port,) = free_ports(1)
        self.endpoints[name] = f"tcp://127.0.0.1:{port}"
        # Without the star vLLM's publisher connects to the endpoint where others bind.
        published = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}", "topic": f"kv@{name}"}
        self.engines[name] = Engine(
            model,
            multi(children, engine_id=name),
            num_gpu_blocks_override=GPU,
            env={**self.ray.env, "PYTHONPATH": os.getcwd()},
            extra_args={"kv_events_config": published},
        )
        self._stack.callback(self.engines[name].close)

    def _leave(self) -> None:
        """All but the engines' store, which ends with the cluster."""
        event_handle.shutdown_events()
        self.kv.close()

    @property
    def targets(self) -> list[str]:
        """host:port of each Ray node's page for Prometheus."""
        return [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]

    # -- the load ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Requests without end, to both engines."""
        self._stop.clear()
        self._load = ThreadPoolExecutor(AT_ONCE * len(NAMES), thread_name_prefix="busy")
        for seed, name in enumerate(NAMES * AT_ONCE):
            self._load.submit(self._ask, name, seed)

    def rest(self) -> None:
        """The last requests end."""
        self._stop.set()
        if self._load is not None:
            self._load.shutdown(wait=True)

    def _ask(self, name: str, seed: int) -> None:
        dice = random.Random(seed)
        while not self._stop.is_set():
            family = dice.randrange(FAMILIES)
            member = 10**6 + next(self._numbers) if dice.random() < NEW else 100 * family + dice.randrange(MEMBERS)
            tokens = prompt(OWN, seed=1000 + family) + prompt(OWN + 40 * (member % 4), seed=2000 + member)
            try:
                answer = self.engines[name].generate(tokens, TOKENS).token_ids
            except Exception as error:
                self.wrong.append(f"{name}: {type(error).__name__}: {error}")
                return
            with self._lock:
                self.served += 1
                if self._known.setdefault(tuple(tokens), answer) != answer:
                    self.wrong.append(f"{name}: {answer} to a prompt that was answered otherwise before")

    def close(self) -> None:
        """All of it ends."""
        try:
            self.rest()
        finally:
            self._stack.close()
