"""A store's figures for people: the parts of what `NodeStore.status` and `info` answer. For graphs: `store_metrics`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raykv.actors.store_stock import Stock
from raykv.store_messages import StoreSpec, TierSpec, TierStatus

COUNTS = (
    "leases",
    "look_ups",
    "hit_blocks",
    "missed_blocks",
    "saved_blocks",
    "skipped_blocks",
    "loaded_blocks",
)
TIER_COUNTS = ("medium", "slots", "used", "writing", "quarantined", "evicted", "hits", "bad_reads", "off")


def figures_of(stock: Stock | None) -> dict[str, Any]:
    """Tiers and counts, as StoreStatus names them; None: no engine came yet. A short hold of the lock."""
    if stock is None:
        return {"tiers": (), **dict.fromkeys(COUNTS, 0)}
    with stock.lock:
        figures = stock.book.figures()
    tiers = tuple(
        TierStatus(
            path=spec.path,
            slot_nbytes=stock.tiers.slot_nbytes,
            draining=tier.shut,
            **{name: getattr(tier, name) for name in TIER_COUNTS} | stock.tiers.counts(tier.tier),
        )
        for tier, spec in ((tier, stock.tiers.spec_of(tier.tier)) for tier in figures.tiers)
    )
    return {"tiers": tiers, **{name: getattr(figures, name) for name in COUNTS}}


def plain_spec(spec: StoreSpec, tiers_now: Sequence[TierSpec]) -> dict[str, Any]:
    """How a store was set up, and what an operator has made of it, as plain values for another RayKV."""
    return {
        "tiers": _plain(spec.tiers),
        "tiers_now": _plain(tiers_now),
        "checksum": spec.checksum,
        "slot": spec.slot_nbytes,
        "peer": spec.peer,
    }


def _plain(tiers: Sequence[TierSpec]) -> list[tuple[str, int, str | None]]:
    return [(str(tier.medium), tier.capacity, tier.path) for tier in tiers]
