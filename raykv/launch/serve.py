"""`raykv serve`: plain `vllm serve` in the foreground, with a TierConnector over this node's store."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raykv.actors import cluster, local_cluster, node_facts, nodes, settings, store_files, store_handle
from raykv.actors.engine_process import VLLM, EngineProcess
from raykv.actors.processes import ray_processes
from raykv.config.engine_order import multi_config, tier_child
from raykv.config.model import LoadPolicy
from raykv.config.reader import Reader
from raykv.config.tiers import PAGE, parse_tiers, size
from raykv.errors import ConfigError, RayKVError

SHARE = 4
"""The host tier takes this part of the memory that is free."""
STEP = 64 << 20
STORE = "default"
GRACE_S = 30.0
OWN_RAY = local_cluster.StartOptions()
"""How a Ray is started where there is none."""
SET_HERE = "--kv-transfer-config"


@dataclass(frozen=True)
class Plan:
    """What will run. `extra`: the TierConnector's, `model_path` and `arguments` those of `vllm serve`."""

    model: str
    arguments: tuple[str, ...]
    extra: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        """vLLM's --kv-transfer-config."""
        return multi_config([tier_child(self.extra)], LoadPolicy.FIRST)

    @property
    def config_json(self) -> str:
        return json.dumps(self.config)


Note = Callable[[str], None]


def plan(model: str, arguments: Sequence[str], host_tier: str | None, disk_tier: str | None) -> Plan:
    """Check all that can be checked before anything starts. Raises ConfigError."""
    if any(argument.split("=")[0] == SET_HERE for argument in arguments):
        raise ConfigError(
            f"{SET_HERE} is what `raykv serve` sets. For one of your own use `vllm serve` (`raykv serve --kv-config` "
            "prints one to start from), in a cluster that `raykv start` started."
        )
    if model.startswith(("/", "./", "../", "~")) and not os.path.exists(os.path.expanduser(model)):
        raise ConfigError(f"The model {model} does not exist.")
    tiers = [{"medium": "host", "capacity": _host_size(host_tier)}]
    if disk_tier is not None:
        path, _, capacity = disk_tier.rpartition("=")
        if not path:
            raise ConfigError(f"--disk-tier is {disk_tier!r}. It must be a folder and a size: /nvme/raykv=500GiB.")
        tiers.append({"medium": "disk", "path": os.path.abspath(os.path.expanduser(path)), "capacity": capacity})
    extra = {"tiers": tiers}
    parse_tiers(extra)
    given = {argument.split("=")[0] for argument in arguments}
    own = [] if "--host" in given else ["--host", "127.0.0.1"]
    return Plan(os.path.expanduser(model), (*arguments, *own), extra)


def _host_size(wanted: str | None) -> int:
    free = node_facts.free_memory()
    if wanted is None:
        return max(STEP, free // SHARE // STEP * STEP)
    nbytes = size(Reader({"--host-tier": wanted}, ""), "--host-tier", PAGE)
    if nbytes > node_facts.store_memory():
        raise ConfigError(
            f"--host-tier is {wanted}, and this machine has {node_facts.store_memory() / 2**30:.1f} GiB of memory for "
            "it. Choose less."
        )
    return nbytes


def run(wanted: Plan, note: Note, show: Callable[[str], None]) -> int:
    """Run until the engine ends or somebody ends it (SIGINT, SIGTERM: then 0); returns its exit status.

    Call it in the main thread. All that was started is ended when it returns.
    """
    with _stops_on_signals() as told, _ray(note) as address:
        wanted, mine = _with_running_store(wanted, note)
        try:
            command = [*VLLM, "serve", wanted.model, *wanted.arguments, SET_HERE, wanted.config_json]
            note(f"starting vLLM: {' '.join(['vllm', 'serve', wanted.model, *wanted.arguments])}")
            return _foreground(command, address, told, note, show)
        finally:
            if mine:
                _end_stores(note, STORE)


def _foreground(
    command: Sequence[str], address: str, told: threading.Event, note: Note, show: Callable[[str], None]
) -> int:
    status: list[int] = []
    ended = threading.Event()

    def on_end(code: int) -> None:
        status.append(code)
        ended.set()

    wait = settings.GCS_RECONNECT
    environment = {**os.environ, "RAY_ADDRESS": address}
    environment.setdefault(wait.name, wait.value)
    process = EngineProcess(command, environment, on_line=show, on_end=on_end)
    try:
        while not ended.wait(0.1):
            if told.is_set():
                note("ending the engine ...")
                process.stop(GRACE_S)
                return 0
        return status[0]
    finally:
        process.kill()
        process.wait(GRACE_S)


@contextlib.contextmanager
def _stops_on_signals() -> Iterator[threading.Event]:
    """SIGINT and SIGTERM set the event, instead of breaking into what is being started or ended."""
    told = threading.Event()
    before = {number: signal.signal(number, lambda *_: told.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _ray(note: Note) -> Iterator[str]:
    """The address of the Ray to use; one of our own, ended afterwards, if this machine has none."""
    started = False
    if not os.environ.get("RAY_ADDRESS") and not any(process.kind == "raylet" for process in ray_processes()):
        note("starting a Ray on this machine (about 10 s) ...")
        _, started = local_cluster.start(OWN_RAY)
    try:
        info = cluster.connect()
        cluster.disconnect()  # an engine outlives the loss of the head, and so must this
        note(f"Ray at {info.address}")
        yield info.address
    finally:
        cluster.disconnect()
        if started:
            note("ending Ray ...")
            _end_stores(note, None)
            local_cluster.stop(5.0)
            store_files.remove_stale()


def _with_running_store(wanted: Plan, note: Note) -> tuple[Plan, bool]:
    """The plan with the tiers of the store that this node has already, and whether the store will be ours to end."""
    cluster.connect()
    try:
        running = nodes.running_tiers(STORE)
    finally:
        cluster.disconnect()
    if running is None:
        tiers = parse_tiers(wanted.extra).store.tiers
        note(f"cache: {', '.join(f'{tier.medium} {tier.capacity / 2**30:.2f} GiB' for tier in tiers)}")
        return wanted, True
    note("cache: the store that runs on this node already")
    return Plan(wanted.model, wanted.arguments, {"tiers": running}), False


def _end_stores(note: Note, name: str | None) -> None:
    """One store of this node, or all of them."""
    try:
        info = cluster.connect()
        if name is None:
            store_handle.shutdown_stores()
        else:
            nodes.RayWorld(info.namespace).end_store((name, info.node_id))
    except RayKVError as error:
        note(f"the store did not end by itself: {error}")
    finally:
        cluster.disconnect()
