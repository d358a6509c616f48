"""Scenario 14: KV events of several children, one for each child and not for each rank."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from tests.support.fake_config import child
from tests.support.fake_model import chain
from tests.support.fake_worker import Bench

pytestmark = pytest.mark.vllm


def copies(events: list[Any]) -> set[tuple[Any, str | None, str | None]]:
    """What a reader believes to exist, by (hash, medium, child)."""
    have = set()
    for event in events:
        keys = {(h, event.medium, event.ownership) for h in getattr(event, "block_hashes", ())}
        if isinstance(event, BlockStored):
            have |= keys
        elif isinstance(event, BlockRemoved):
            have -= keys
    return have


@pytest.mark.parametrize("apart", [False, True], ids=["ranks together", "ranks apart"])
def test_one_event_for_each_child(apart: bool, ranks: int, hosted: bool, overlap: bool) -> None:
    with Bench(
        [child("A", hosted, saves=True, events="worker"), child("B", hosted, saves=True, events="scheduler")],
        ranks=ranks,
        async_scheduling=overlap,
    ) as bench:
        last = bench.host("A", ranks - 1) if hosted and apart else None
        if last is not None:
            last.hold()  # this rank's host does its work some steps later
        bench.add(50, max_tokens=12)
        bench.step(6)
        if last is not None:
            last.release()
        bench.run()
        hashes = chain(bench.results["r0"].prompt)[15:48:16]
        stored = Counter(
            (event.block_hashes[0], event.medium, event.ownership)
            for event in bench.events
            if isinstance(event, BlockStored) and event.medium != "GPU"
        )
        assert stored == Counter((h, f"FAKE_{name}", name) for name in "AB" for h in hashes)

        bench.child("A").evicted = list(hashes[:2])
        bench.add(20, seed=1)
        bench.run()
        bench.child("A").events = ""
        bench.add(20, seed=2)
        bench.run()
        removed = [e for e in bench.events if isinstance(e, BlockRemoved) and e.medium != "GPU"]
        assert sorted(e.block_hashes[0] for e in removed) == sorted(hashes[:2])
        have = copies(bench.events)
        assert not {(h, "FAKE_A", "A") for h in hashes[:2]} & have
        assert {(h, "FAKE_B", "B") for h in hashes} <= have
        assert (hashes[2], "FAKE_A", "A") in have


def test_worker_metadata_reaches_its_child_once_for_each_rank(ranks: int, hosted: bool, overlap: bool) -> None:
    with Bench([child("A", hosted), child("B", hosted)], ranks=ranks, async_scheduling=overlap) as bench:
        bench.add(50)
        bench.run()
        for name in "AB":
            metas = [h.kv_connector_worker_meta for h in bench.child(name).heard if h.kv_connector_worker_meta]
            assert metas and all(meta.child == name for meta in metas)
            counts = Counter(rank for meta in metas for rank in meta.ranks)
            assert set(counts) == set(range(ranks)) and len(set(counts.values())) == 1


def test_a_child_hears_of_its_own_only(ranks: int, hosted: bool, overlap: bool) -> None:
    with Bench(
        [child("A", hosted, hit=32), child("B", hosted, owes=True, auto_send=True)],
        ranks=ranks,
        async_scheduling=overlap,
    ) as bench:
        bench.add(50)
        bench.run()
        heard = {n: bench.child(n).heard for n in "AB"}
        assert [set(o.finished_recving) for o in heard["A"] if o.finished_recving] == [{"r0"}]
        assert [set(o.finished_sending) for o in heard["B"] if o.finished_sending] == [{"r0"}]
        assert not any(o.finished_sending for o in heard["A"])
        assert not any(o.finished_recving for o in heard["B"])
