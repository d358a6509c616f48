"""`raykv pin`, `unpin`, `pins`, `prefetch`, `clear`, `quota`, `verify`: what stores hold."""

from __future__ import annotations

from typing import Any

import click

from raykv.cli.base import out
from raykv.cli.connected import (
    ENGINE,
    NUMBER,
    STORE,
    WAIT,
    YES,
    Bars,
    confirm,
    on_cluster,
    prompt_options,
)


def given(**options: Any) -> dict[str, Any]:
    """The options that were given: for the others the API's own defaults hold."""
    return {name: value for name, value in options.items() if value is not None}


@on_cluster("pin")
@prompt_options
@click.option("--for", "time_limit", required=True, help="How long, such as 10m, 1h30m or 2d.")
@STORE
@click.option("--note", default="", help="Why, for who sees it in `raykv pins`.")
@NUMBER
def pin_command(kv: Any, prompt: Any, time_limit: str, **options: Any) -> Any:
    """Keep the held blocks of a PROMPT from eviction for a time."""
    outcome = kv.pin(prompt, time_limit, **options)
    out.print(f"Free them sooner with `raykv unpin {outcome.number}`.", style="dim", markup=False)
    return outcome


@on_cluster("unpin")
@click.argument("number")
@STORE
def unpin_command(kv: Any, number: str, store: str | None) -> Any:
    """Let the blocks of the pin NUMBER be evicted again."""
    return kv.unpin(number, store=store)


@on_cluster("pins")
@STORE
def pins_command(kv: Any, store: str | None) -> Any:
    """List the pins of operators."""
    return kv.pins(store=store)


@on_cluster("prefetch")
@prompt_options
@click.option("--to", "tier", default="host", show_default=True, help="The tier to copy them into: the fastest.")
@click.option("--node", help="Into this node's store: the node's id, the first letters of it, or its host.")
@STORE
@WAIT
@NUMBER
def prefetch_command(kv: Any, prompt: Any, tier: str, wait_s: float | None, **options: Any) -> Any:
    """Copy the held blocks of a PROMPT up into the fastest tier of a store.

    From its slower tiers; and into a host tier, if the store has a peer tier, from the host tiers of other nodes. It is
    the engine's own store unless --store or --node names another one: to a node means into that node's store.
    """
    with Bars() as bars:
        return kv.prefetch(prompt, tier, tell=bars, **given(wait_s=wait_s), **options)


@on_cluster("clear")
@click.option("--model", help="Blocks of this model only.")
@click.option("--tenant", help="Blocks of this tenant only: its cache salt, or tag:HEX as `raykv quota` lists it.")
@click.option("--prefix", help="Blocks of this prompt only.")
@click.option("--tier", help="Of this tier only: host, disk or fs.")
@click.option("--everything", is_flag=True, help="All blocks.")
@ENGINE
@STORE
@YES
def clear_command(kv: Any, yes: bool, **options: Any) -> Any:
    """Forget blocks that meet all that is given. Pinned ones and those being read stay."""
    what = ", ".join(f"{name} {value}" for name, value in options.items() if value and name != "everything")
    if what or options["everything"]:  # else the API says what is missing
        confirm(f"Forget {'ALL blocks' if options['everything'] else 'the blocks of'} {what}?", yes)
    return kv.clear(**options)


@on_cluster("quota")
@click.argument("tenant", required=False)
@click.argument("limit", metavar="[SIZE|none]", required=False)
@STORE
def quota_command(kv: Any, tenant: str | None, limit: str | None, store: str | None) -> Any:
    """List what each tenant holds; or let TENANT have SIZE bytes in each store, such as 10GiB.

    TENANT is the cache salt of its requests ("" for those without one), or tag:HEX as it is listed.
    """
    if tenant is None:
        return kv.quotas(store=store)
    if limit is None:
        raise click.UsageError("Give the tenant's SIZE, such as 10GiB, or none.")
    return kv.set_quota(tenant, None if limit.lower() == "none" else limit, store=store)


@on_cluster("verify")
@STORE
@WAIT
@NUMBER
def verify_command(kv: Any, store: str | None, wait_s: float | None, number: str | None) -> Any:
    """Read every block of the stores now and check it. A bad one is taken out of use."""
    with Bars() as bars:
        return kv.verify(store=store, tell=bars, number=number, **given(wait_s=wait_s))
