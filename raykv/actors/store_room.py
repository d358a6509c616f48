"""What a store could take of one that is drained: the answer to `NodeStore.room`, also before its pools are open."""

from __future__ import annotations

from collections.abc import Sequence

from raykv.actors.store_stock import Stock
from raykv.peer_messages import Room
from raykv.store_messages import Medium, StoreSpec, TierSpec
from raykv.types import StoreLife


def room_of(
    life: StoreLife, spec: StoreSpec, tiers: Sequence[TierSpec], stock: Stock | None, slot_nbytes: int, door: bool
) -> Room:
    """Room for slots of `slot_nbytes`. `tiers`: those that are now; `door`: there is a way to other nodes' stores."""
    host = next((tier for tier in tiers if tier.medium is Medium.HOST), None)
    if not spec.peer or not door or not spec.checksum or host is None:
        return Room(life, refused="it has no peer tier, no host tier or no checksums")
    if (stock.tiers.slot_nbytes if stock is not None else spec.slot_nbytes or slot_nbytes) != slot_nbytes:
        return Room(life, refused="its slots have another size")
    if stock is None:
        return Room(life, host.capacity // slot_nbytes)
    with stock.lock:
        return Room(life, stock.book.drain.free)
