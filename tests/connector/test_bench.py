"""The fakes themselves: without them nothing below means anything."""

from __future__ import annotations

import pytest

from tests.support.fake_config import child
from tests.support.fake_worker import Bench

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("hosted", [True, False])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_child_with_a_hit_is_loaded(ranks: int, hosted: bool, async_scheduling: bool) -> None:
    with Bench([child("A", hosted, hit=64, saves=True)], ranks=ranks, async_scheduling=async_scheduling) as bench:
        bench.add(100)
        bench.run()
        assert bench.child("A").written == [("r0", block) for _, block in bench.child("A").written]
        assert len(bench.child("A").written) == 4
        assert len(bench.received()) == 1
