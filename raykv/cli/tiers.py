"""`raykv tiers`: the tiers of running stores, shown and changed."""

from __future__ import annotations

from typing import Any

import click

from raykv.api.shown import Listing
from raykv.cli.base import main
from raykv.cli.connected import NUMBER, STORE, WAIT, YES, Bars, ListByDefault, confirm, on_cluster
from raykv.cli.content import given


@main.group("tiers", cls=ListByDefault)
def tiers() -> None:
    """Show and change the tiers of running stores; without a command they are listed."""


@on_cluster("list", tiers)
@STORE
def tiers_list(kv: Any, store: str | None) -> Any:
    """List the tiers of all stores."""
    from raykv.api import finding

    stores = kv.stores if store is None else finding.stores(kv.stores, store)
    return Listing(tier for one in stores for tier in one.tiers)


@on_cluster("add", tiers)
@click.argument("medium")
@click.argument("capacity")
@click.option("--path", help="The tier's folder (disk, fs).")
@click.option("--after", help="The medium behind which it is asked and filled; else it is the last.")
@STORE
@WAIT
@NUMBER
def tiers_add(kv: Any, medium: str, capacity: str, wait_s: float | None, **options: Any) -> Any:
    """Give stores a tier of MEDIUM (host, disk or fs) with CAPACITY, such as 64GiB. A drained one is used again."""
    with Bars() as bars:
        return kv.add_tier(medium, capacity, tell=bars, **given(wait_s=wait_s), **options)


@on_cluster("resize", tiers)
@click.argument("medium")
@click.argument("capacity")
@STORE
@WAIT
@NUMBER
def tiers_resize(kv: Any, medium: str, capacity: str, wait_s: float | None, **options: Any) -> Any:
    """Change the room of the tier MEDIUM to CAPACITY, such as 64GiB. What does not fit is evicted."""
    with Bars() as bars:
        return kv.resize_tier(medium, capacity, tell=bars, **given(wait_s=wait_s), **options)


@on_cluster("drain", tiers)
@click.argument("medium")
@STORE
@WAIT
@NUMBER
def tiers_drain(kv: Any, medium: str, wait_s: float | None, **options: Any) -> Any:
    """Put nothing new into the tier MEDIUM, and move what lies only there to another tier."""
    with Bars() as bars:
        return kv.drain_tier(medium, tell=bars, **given(wait_s=wait_s), **options)


@on_cluster("remove", tiers)
@click.argument("medium")
@STORE
@WAIT
@NUMBER
@YES
def tiers_remove(kv: Any, medium: str, wait_s: float | None, yes: bool, **options: Any) -> Any:
    """Drain the tier MEDIUM, then give its memory or its files back."""
    confirm(f"Remove the tier {medium} of {options['store'] or 'all stores'}?", yes)
    with Bars() as bars:
        return kv.remove_tier(medium, tell=bars, **given(wait_s=wait_s), **options)
