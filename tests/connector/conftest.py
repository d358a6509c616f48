"""Fixtures of the tests that run vLLM's real scheduler with fake workers."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

for noisy in ("v1.base", "factory"):
    logging.getLogger(f"vllm.distributed.kv_transfer.kv_connector.{noisy}").setLevel(logging.ERROR)


@pytest.fixture(params=[1, 2], ids=["1-rank", "2-ranks"])
def ranks(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=[True, False], ids=["hosted", "inline"])
def hosted(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(params=[False, True], ids=["sync-sched", "async-sched"])
def overlap(request: pytest.FixtureRequest) -> bool:
    """Whether two steps are in flight."""
    return request.param


@pytest.fixture
def raykv_log() -> Iterator[list[str]]:
    """The messages that RayKV logs meanwhile: it does not propagate to the root, where caplog listens."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Lines()
    logging.getLogger("raykv").addHandler(handler)
    yield lines
    logging.getLogger("raykv").removeHandler(handler)
