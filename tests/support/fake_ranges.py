"""Fake children for composed loads: one that loads any range, and one that takes what has no hash for its own."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tests.support.fake_children import FakeChild
from tests.support.fake_config import child

seen: dict[tuple[str, str], list[int]] = {}
"""(child, request) to the blocks without a hash that a FakePullChild was shown with tokens to load."""


groups: dict[str, tuple[int, ...]] = {}
"""By child: the KV groups that its loads fill; all of them where nothing is said."""


class FakeRangeChild(FakeChild):
    """Loads from where it was asked last, as many tokens as it is told: all fakes do, this one says so."""

    raykv_loads_any_range = True

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        return {CacheHitSource.HOST: num_external_tokens} if num_external_tokens else {}

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return groups.get(self.control.name) or super().get_loaded_kv_cache_group_ids(request)


class FakePullChild(FakeChild):
    """Like NIXL: whatever block has no hash is the target of its load."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            seen[(self.control.name, request.request_id)] = blocks.get_unhashed_block_ids()
        super().update_state_after_alloc(request, blocks, num_external_tokens)


def ranged(name: str, hosted: bool = True, **more: Any) -> dict[str, Any]:
    """The config of a FakeRangeChild."""
    return _of("FakeRangeChild", name, hosted, **more)


def pulling(name: str, hosted: bool = True, **more: Any) -> dict[str, Any]:
    """The config of a FakePullChild."""
    return _of("FakePullChild", name, hosted, **more)


def _of(cls: str, name: str, hosted: bool, **more: Any) -> dict[str, Any]:
    return child(name, hosted, cls, fields={"kv_connector_module_path": "tests.support.fake_ranges"}, **more)
