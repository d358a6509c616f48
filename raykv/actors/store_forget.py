"""Forgetting blocks on an operator's order, a part at a time, each in a short hold of the book's lock.

What somebody holds - a pin, a lease, a copy - stays. Any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from raykv.actors.store_stock import Stock
from raykv.admin_messages import Done
from raykv.core.selections import Chosen
from raykv.core.store_plans import Published
from raykv.errors import DiskError, StoreError
from raykv.store_messages import Medium


def forget(stock: Stock, what: Chosen, heads: Sequence[bytes]) -> Done:
    """As `StoreAdmin.forget`. `heads`: those that the keys of known models begin with."""
    gone = held = files = 0
    for part in stock.book.select(what, heads):
        with stock.lock:
            found = part()
            cleared = set(stock.book.forget_all([place for _, place in found]))
            stock.tiers.clear(list(cleared))
        gone, held = gone + len(cleared), held + len(found) - len(cleared)
        files += _forget_files(stock, [one for one in found if one[1] in cleared])
    files += _forget_unknown_files(stock, what, heads)
    said = f"{gone:,} blocks are forgotten"
    if files:
        said += f", with {files:,} files of the shared folder"
    if held:
        said += f"; {held:,} are pinned, leased or being copied, and stay"
    return Done(gone, gone * stock.tiers.slot_nbytes, f"{said}.")


def _forget_files(stock: Stock, gone: Sequence[Published]) -> int:
    shared = stock.tiers.shared()
    if shared is None:
        return 0
    tier, pool = shared
    try:
        return pool.remove([key for key, place in gone if place.tier == tier])
    except DiskError as error:
        raise StoreError(f"Not all files could be removed: {error}") from error


def _forget_unknown_files(stock: Stock, what: Chosen, heads: Sequence[bytes]) -> int:
    """Files that other nodes wrote, of named blocks or of a model."""
    shared = stock.tiers.shared()
    if shared is None or what.medium not in (None, Medium.FS) or what.tenant is not None:
        return 0
    _, pool = shared
    try:
        if what.hashes is not None:
            with stock.lock:
                keys = [head + one for one in what.hashes for head in what.heads(heads)]
                keys = [key for key in keys if stock.book.find(key) is None]
            return pool.remove(keys)
        return pool.remove_all(what.fingerprints)
    except DiskError as error:
        raise StoreError(f"Not all files could be removed: {error}") from error


def clear(stock: Stock, medium: Medium | None) -> int:
    """As `StoreAdmin.clear`: how many slots came free. `medium` None: of all tiers."""
    gone = 0
    for part in stock.book.select(Chosen(frozenset(), None, None, medium), ()):
        with stock.lock:
            cleared = stock.book.forget_all([place for _, place in part()])
            stock.tiers.clear(cleared)
        gone += len(cleared)
    return gone
