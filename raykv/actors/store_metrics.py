"""A store's figures for operators, gathered in one place: `metrics_of` is what `NodeStore.metrics` answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raykv.actors.peer_tier import PeerTier
from raykv.actors.store_meter import LOOK_UP, Meter
from raykv.actors.store_saves import Saver
from raykv.actors.store_stock import Stock
from raykv.core.ever_held import EverHeld
from raykv.core.histogram import Histogram
from raykv.core.store_plans import Published
from raykv.store_messages import HASH_NBYTES


class LookUpMeter:
    """How long look-ups take, and how many blocks they could have found had nothing been thrown out.

    `took` and `looked_up` are called in the thread of look-ups, `held` in that of commits: no lock, a few microseconds.
    """

    def __init__(self) -> None:
        self.seconds = Histogram()
        self.asked = self.reusable = 0
        """Blocks that were asked for, and those of them that are held or were since the store's start."""
        self._ever = EverHeld()

    def took(self, seconds: float) -> None:
        """A call with one look-up or several."""
        self.seconds.add(seconds)

    def looked_up(self, fingerprint: bytes, hashes: bytes, found: int) -> None:
        """The first `found` blocks of a prompt are held. Those of the first rank and group stand for all."""
        self.asked += len(hashes) // HASH_NBYTES
        self.reusable += self._ever.prefix(fingerprint, hashes, found)

    def held(self, published: Sequence[Published]) -> None:
        """These blocks are held from now on."""
        self._ever.add([key for key, _ in published])


def metrics_of(
    stock: Stock | None, saver: Saver | None, peers: PeerTier | None, look_ups: LookUpMeter, opened_s: float
) -> dict[str, Any]:
    """`tiers` by medium, `counts`, `gauges`, and what the Meter reads. Without a stock (no engine came yet): zeros."""
    meter = (stock.meter if stock is not None else Meter()).read()
    seconds = {**meter.pop("seconds"), LOOK_UP: look_ups.seconds.read()}
    found: dict[str, Any] = {**meter, "seconds": seconds, "opened_s": opened_s}
    found |= {
        "tiers": {},
        "counts": {},
        "gauges": {},
        "asked_blocks": look_ups.asked,
        "reusable_blocks": look_ups.reusable,
    }
    if stock is None:
        return found
    with stock.lock:
        figures, ages = stock.book.figures(), stock.book.ages()
        pins = [len(pin.places) for pin in stock.book.contents.pins.all()]
        refused = stock.book.contents.tenants.refused_blocks
    for tier in figures.tiers:
        age = ages[tier.tier]
        found["tiers"][str(tier.medium)] = {
            "slot_nbytes": stock.tiers.slot_nbytes,
            "slots": tier.slots,
            "used": tier.used,
            "writing": tier.writing,
            "quarantined": tier.quarantined,
            "pinned": tier.pinned,
            "evicted": tier.evicted,
            "hits": tier.hits,
            "bad_reads": tier.bad_reads,
            "never_read": age.never_read,
            "age": age.evicted.read(),
            "off": bool(tier.off),
            **stock.tiers.counts(tier.tier),
        }
    over_backlog = saver.over_backlog if saver is not None else 0
    found["counts"] = {
        "look_ups": figures.look_ups,
        "hit_blocks": figures.hit_blocks,
        "saved_blocks": figures.saved_blocks,
        "loaded_blocks": figures.loaded_blocks,
        "demoted_blocks": figures.demoted_blocks,
        "promoted_blocks": figures.promoted_blocks,
        "no_room": figures.skipped_blocks - refused,
        "over_quota": refused,
        "over_backlog": over_backlog,
        "lost_on_the_way_down": figures.dropped_blocks,
        "queue_full": figures.queue_overflows,
    }
    found["gauges"] = {
        "leases": figures.leases,
        "operator_pins": len(pins),
        "operator_pinned_blocks": sum(pins),
        "moves_waiting": figures.waiting_moves,
        "moves_running": figures.open_moves,
        "saves_open": figures.open_jobs,
        "backlog_nbytes": saver.backlog_nbytes if saver is not None else 0,
    }
    if peers is not None:
        status = peers.status()
        found["counts"] |= {"lent_blocks": status.lent_blocks, "peer_read_blocks": status.read_blocks}
        found["gauges"]["lent_now"] = status.lent_now
        found["faults"]["bad peer block"] = status.bad_blocks
    return found
