"""Any calls against a real NodeStore and a real EngineDesk: done, or one sentence; `check_integrity` holds throughout.

RAYKV_FUZZ_EXAMPLES makes it longer: 1000 of them are 10,000 calls.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from raykv.api import Cluster
from raykv.errors import RayKVError
from raykv.types import EngineId
from tests.api.test_fuzz import calls
from tests.api.test_real_desk import Engine
from tests.api.test_real_store import ALICE, PLAIN, Real
from tests.support.fake_operators import FakeCaller, FakeWorld

pytestmark = pytest.mark.process

EXAMPLES = int(os.environ.get("RAYKV_FUZZ_EXAMPLES", "20"))
CALLS = 10


class Both:
    """One store and one engine over all examples, as in real life."""

    def __init__(self, folder: Path) -> None:
        from raykv.actors.engine_desk import EngineDesk

        self.folder = folder
        self.world = FakeWorld()
        self.real = Real(folder, self.world)
        self.engine = Engine(EngineDesk(EngineId("engine-a")))
        old: Any = self.world.desk_callers["raykv-desk-engine-a"]
        self.engine.inside.base = old.target.base
        self.world.desk_callers["raykv-desk-engine-a"] = FakeCaller("raykv-desk-engine-a", self.engine.desk)
        self.kv = Cluster(self.world, 10.0)
        self.refused = self.done = 0

    def close(self) -> None:
        self.engine.close()
        self.real.close()

    def call(self, name: str, options: dict[str, Any]) -> None:
        if options.get("path") == "/folder":
            options["path"] = str(self.folder / "fuzzed")
        try:
            result = getattr(self.kv, name)(**options)
        except RayKVError as error:
            assert str(error) and "\n" not in str(error), str(error)
            self.refused += 1
        else:
            assert result is not None
            self.done += 1


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    made = Both(tmp_path_factory.mktemp("fuzz"))
    yield made
    made.engine.desk.check_integrity()
    made.engine.inside.check_integrity()
    made.close()
    assert made.done > CALLS and made.refused > CALLS


@pytest.mark.timeout(3600)
@settings(max_examples=EXAMPLES, phases=(Phase.generate,))
@given(st.lists(calls(), min_size=CALLS, max_size=CALLS), st.randoms(use_true_random=False))
def test_any_calls(cluster: Both, made: list[tuple[str, dict[str, Any]]], chance: random.Random) -> None:
    if cluster.kv.stores[0].tiers:
        cluster.real.save(PLAIN if chance.random() < 0.7 else ALICE, "" if chance.random() < 0.7 else "alice")
    for name, options in made:
        cluster.call(name, options)
        cluster.real.store.check_integrity()
