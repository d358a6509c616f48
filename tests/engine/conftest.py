"""The engines that the tests of this folder share, each started when the first test asks for it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.configs import example_child, file_child, multi
from tests.support.engine import Engine
from tests.support.lmcache_server import LMCacheServer
from tests.support.ray_cluster import RayCluster
from tests.support.waiting import eventually

BACK_WITHIN_S = 90.0
"""Bound for a test to fail at. What the time is on an idle machine is measured by the benchmark."""


ORDER = (
    "test_cluster",
    "test_cluster_faults",
    "test_pd",
    "test_tensor_parallel",
    "test_start_errors",
    "test_tiers",
    "test_tier_groups",
    "test_demo",
    "test_operating",
    "test_offload",
    "test_faults",
    "test_storm",
    "test_head_lost",
)
"""Engines of a module's own come first, when the shared one does not take their cores yet; the head is lost last."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        return ORDER.index(item.path.stem) if item.path.parent == here and item.path.stem in ORDER else -1

    items.sort(key=place)


PATIENT = {"timeout_s": 60, "load_timeout_s": 120}
"""Limits for tests that are not about limits: a shared machine can stand still for many seconds."""


class Children:
    """The hosted children of an engine, seen by vLLM's own metrics."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def metric(self, name: str, child: str) -> int:
        metrics = self._engine.stats()["metrics"]
        return int(metrics.get(f"vllm:raykv_{name}{{raykv_child={child}}}", 0))

    def pid(self, child: str) -> int:
        """The process of its host of rank 0; 0 while there is none."""
        return self.metric("child_host_pid", child)

    def kill(self, child: str, with_signal: int = signal.SIGKILL) -> int:
        while not (pid := self.pid(child)):  # known from its first report on
            self._engine.generate([7, 8, 9], 1)
        os.kill(pid, with_signal)
        return pid

    def wait_back(self, child: str, old_pid: int) -> None:
        """Until the child takes part again, with another process. A request now and then brings news."""
        deadline = time.monotonic() + BACK_WITHIN_S
        while not (self.metric("child_up", child) == 1 and self.pid(child) not in (0, old_pid)):
            assert time.monotonic() < deadline, f"{child} did not come back within {BACK_WITHIN_S:g} s"
            time.sleep(0.3)
            self._engine.generate([7, 8, 9], 1)


class Offload:
    """An engine with three offload children: FileChild (steered by the tests), Example and LMCacheMP."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        self.control = folder / "control"
        self.children = Children(engine)
        self.all_free = engine.free_blocks()

    def set(self, *names: str) -> None:
        """Exactly these control files exist."""
        for path in self.control.iterdir():
            path.unlink(missing_ok=True)
        for name in names:
            (self.control / name).touch()

    def empty_folders(self) -> None:
        """FileChild and Example hold nothing any more, so that a test finds the same when it is tried again."""
        for part in ("blocks", "example"):
            for entry in (self.folder / part).glob("*"):
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)

    def wait_for(self, marker: str) -> None:
        eventually(lambda: (self.control / marker).exists(), f"{marker} in FileChild")


@pytest.fixture(scope="session")
def offload_engine(
    tiny_model: Path,
    ray_cluster: RayCluster,
    lmcache_server: LMCacheServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Offload]:
    folder = tmp_path_factory.mktemp("offload")
    limits = {"timeout_s": 5, "load_timeout_s": 30, "max_faults": 3, "fault_window_s": 30, "retry_s": 1}
    children = [
        file_child(folder, warm_spare=True, **limits),
        example_child(folder / "example", **PATIENT),
        lmcache_server.child(**PATIENT),
    ]
    env = {**ray_cluster.env, "PYTHONPATH": os.getcwd()}
    with Engine(tiny_model, multi(children), env=env) as engine:
        yield Offload(engine, folder)


@pytest.fixture
def offload(offload_engine: Offload) -> Iterator[Offload]:
    """The engine with nothing in vLLM's own prefix cache, and afterwards with every block free again."""
    offload_engine.set()
    offload_engine.engine.forget()
    offload_engine.empty_folders()
    yield offload_engine
    offload_engine.set()
    offload_engine.engine.wait_free_blocks(offload_engine.all_free, timeout_s=30)
