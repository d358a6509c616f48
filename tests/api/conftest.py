"""A cluster of fakes, and the API over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raykv.api import Cluster, store_ops
from tests.support.fake_operators import FakeWorld


@pytest.fixture
def world() -> Iterator[FakeWorld]:
    made = FakeWorld()
    yield made
    made.check_integrity()


@pytest.fixture
def kv(world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(store_ops, "POLL_S", 0.001)
    monkeypatch.setattr("raykv.api.chains.POLL_S", 0.001)
    monkeypatch.setattr("raykv.api.asking.PAUSE_S", 0.001)
    return Cluster(world, 1.0)
