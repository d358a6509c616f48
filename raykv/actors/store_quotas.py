"""A tenant's quota in a store: checked as operators give it, and carried out, a part at a time."""

from __future__ import annotations

from raykv.actors.store_stock import Stock
from raykv.admin_messages import NO_TENANT
from raykv.core.selections import checked_tenant
from raykv.errors import StoreError

MOST_QUOTA = 1 << 62


def checked_quota(tenant: str, nbytes: int | None) -> bytes:
    """The tenant's tag. Raises StoreError for bad input. `nbytes` None: no limit."""
    tag = checked_tenant(tenant)
    if tag == NO_TENANT:
        raise StoreError("Blocks without a tenant have no quota: it is the tiers' capacity that limits them.")
    if nbytes is not None and (
        not isinstance(nbytes, int) or isinstance(nbytes, bool) or not 0 <= nbytes <= MOST_QUOTA
    ):
        raise StoreError(f"A quota is a number of bytes from 0 on, or None for no limit, not {nbytes!r:.40}.")
    return tag


def apply_quota(stock: Stock, tag: bytes, nbytes: int | None) -> int:
    """It holds from now on; how many blocks went for it. Callers take turns; the lock is held a part at a time."""
    book, gone = stock.book, 0
    tenants = book.contents.tenants
    slots = nbytes // stock.tiers.slot_nbytes if nbytes is not None else None
    with stock.lock:
        number = tenants.set_quota(tag, slots)
        tiers = book.own_tiers
    for tier in tiers if slots is not None else ():
        first: int | None = 0
        while first is not None:
            with stock.lock:
                first = tenants.scan(number, tier, first)
    while slots is not None:
        with stock.lock:
            cut = book.quota_cut(tag)
            stock.tiers.clear(cut)
        if not cut:
            break
        gone += len(cut)
    return gone
