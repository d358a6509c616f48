"""What a store holds, by model and by tenant, for operators: the answer to `StoreAdmin.view`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raykv.actors.store_models import Models
from raykv.actors.store_stock import Stock
from raykv.admin_messages import OperationState, PinView, StoreView, TenantView
from raykv.core.operator_pins import Pin
from raykv.types import StoreLife

SHOWN_TENANTS = 1000
"""The largest; `StoreView.more["tenants"]` has how many there are."""


def view_of(
    life: StoreLife,
    name: str,
    stock: Stock | None,
    models: Models,
    quotas: Mapping[bytes, int],
    operations: tuple[OperationState, ...],
) -> StoreView:
    """`name`: the store's. `quotas`: bytes by tenant. A short hold of the lock."""
    if stock is None:
        return StoreView(life, name, models.views({}, 0), operations=operations)
    slot_nbytes, contents = stock.tiers.slot_nbytes, stock.book.contents
    with stock.lock:
        blocks = contents.census.blocks(stock.book.own_tiers)
        tenants = [(one.tag, one.slots, one.refused) for one in contents.tenants.all()]
        pins = tuple(_pin_view(pin, slot_nbytes) for pin in contents.pins.all())
        absences = len(contents.absences)
    more = {"tenants": len(tenants), "slot_nbytes": slot_nbytes}
    shown = _tenant_views(tenants, quotas, slot_nbytes)
    return StoreView(life, name, models.views(blocks, slot_nbytes), shown, pins, operations, absences, more)


def _tenant_views(
    tenants: Sequence[tuple[bytes, int, int]], quotas: Mapping[bytes, int], slot_nbytes: int
) -> tuple[TenantView, ...]:
    """Those with a quota first, then by size."""
    by_weight = sorted(tenants, key=lambda one: (one[0] in quotas, one[1]), reverse=True)
    return tuple(
        TenantView(tag.hex(), slots, slots * slot_nbytes, quotas.get(tag), refused)
        for tag, slots, refused in by_weight[:SHOWN_TENANTS]
    )


def _pin_view(pin: Pin, slot_nbytes: int) -> PinView:
    return PinView(pin.number, len(pin.places), len(pin.places) * slot_nbytes, pin.expires, pin.note)
