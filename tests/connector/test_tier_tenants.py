"""A request's cache salt names the tenant of the blocks that are saved for it, and goes no further itself."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from raykv.admin_messages import NO_TENANT, tenant_tag
from raykv.connector.fingerprint import canonical, digest
from raykv.connector.tier_jobs import TierJobs
from raykv.connector.tier_known import KnownRequests
from raykv.connector.tier_saves import TierSaves
from raykv.store_messages import HASH_NBYTES, GroupLayout

pytestmark = pytest.mark.vllm

SIZE = 16
LAYOUTS = [GroupLayout(("a",)), GroupLayout(("b",), window_blocks=1)]


def request(name: str, blocks: int, salt: str | None) -> Any:
    hashes = [f"{name}/{n}".encode().ljust(HASH_NBYTES) for n in range(blocks)]
    return SimpleNamespace(
        request_id=name, block_hashes=hashes, cache_salt=salt, lora_request=None, num_computed_tokens=0
    )


def plan(requests: dict[str, Any], ids: dict[str, tuple[list[int], ...]]) -> Any:
    """What one step saves that computes all of these requests. Block 0 is a null block."""
    known = KnownRequests()
    for one in requests.values():
        known.add(one)
    saves = TierSaves(TierJobs(1), known, LAYOUTS, SIZE, Counter())
    blocks = [SimpleNamespace(block_id=n, is_null=n == 0, ref_cnt=1) for n in range(40)]
    pool = SimpleNamespace(blocks=blocks, touch=lambda some: None)
    saves.bind(SimpleNamespace(block_pool=pool, get_block_ids=lambda name: ids[name]))
    scheduled = {name: len(one.block_hashes) * SIZE for name, one in requests.items()}
    return saves.plan(SimpleNamespace(num_scheduled_tokens=scheduled))  # type: ignore[arg-type]


def test_tenants_go_along_in_runs() -> None:
    requests = {"p": request("p", 3, "alice"), "q": request("q", 2, None), "r": request("r", 1, "bob")}
    job = plan(requests, {"p": ([1, 2, 3], [0, 0, 4]), "q": ([5, 6], [0, 7]), "r": ([8], [9])})
    alice, bob = tenant_tag("alice"), tenant_tag("bob")
    assert job.tenants == (((alice, 3), (NO_TENANT, 2), (bob, 1)), ((alice, 1), (NO_TENANT, 1), (bob, 1)))
    assert [sum(count for _, count in runs) for runs in job.tenants] == [len(ids) for ids in job.block_ids] == [6, 3]
    assert "alice" not in repr(job)


def test_without_a_salt_nothing_goes_along() -> None:
    job = plan({"p": request("p", 2, None), "q": request("q", 1, "")}, {"p": ([1, 2], [0, 3]), "q": ([4], [5])})
    assert job.tenants == () and job.block_ids == ((1, 2, 4), (3, 5))


def test_the_facts_are_the_text_behind_the_fingerprint() -> None:
    facts = {"b": [1, {"z": None}], "a": "x"}
    assert canonical(facts) == '{"a":"x","b":[1,{"z":null}]}'
    assert digest(facts) == digest(dict(reversed(facts.items()))) != digest({**facts, "a": "y"})
