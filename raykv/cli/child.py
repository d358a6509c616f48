"""`raykv child`: the children of a running engine, shown and changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from raykv.api.shown import Listing
from raykv.cli.base import main
from raykv.cli.connected import ENGINE, NUMBER, WAIT, YES, Bars, ListByDefault, confirm, on_cluster
from raykv.cli.content import given


@main.group("child", cls=ListByDefault)
def child() -> None:
    """Show and change the children of a running engine; without a command they are listed."""


@on_cluster("list", child)
@ENGINE
def child_list(kv: Any, engine: str | None) -> Any:
    """List the children of all engines, in the order in which they are asked."""
    engines = kv.engines if engine is None else [kv.engine(engine)]
    return Listing(one for of in engines for one in of.children)


@on_cluster("add", child)
@click.argument("config", metavar="CONFIG")
@click.option("--before", default="", help="The child in front of which it goes; else it is the last.")
@ENGINE
@WAIT
@NUMBER
def child_add(kv: Any, config: str, wait_s: float | None, **options: Any) -> Any:
    """Add a child to an engine. CONFIG is an entry as in `connectors`: JSON, @FILE, or - for standard input."""
    text = config
    if config == "-" or config.startswith("@"):
        try:
            with click.open_file(config.removeprefix("@")) as file:
                text = file.read()
        except OSError as error:
            raise click.BadParameter(f"{config[1:]} can't be read: {error.strerror}.", param_hint="CONFIG") from error
    with Bars() as bars:
        return kv.add_child(text, tell=bars, **given(wait_s=wait_s), **options)


@on_cluster("remove", child)
@click.argument("name")
@ENGINE
@WAIT
@NUMBER
@YES
def child_remove(kv: Any, name: str, wait_s: float | None, yes: bool, **options: Any) -> Any:
    """Take a child out of an engine. What it still owes is settled first."""
    confirm(f"Remove the child {name} of {options['engine'] or 'the engine'}?", yes)
    with Bars() as bars:
        return kv.remove_child(name, tell=bars, **given(wait_s=wait_s), **options)


def _simple(verb: str, doc: str) -> None:
    def run(kv: Any, name: str, wait_s: float | None, **options: Any) -> Any:
        change: Callable[..., Any] = getattr(kv, f"{verb}_child")
        with Bars() as bars:
            return change(name, tell=bars, **given(wait_s=wait_s), **options)

    run.__doc__ = doc
    on_cluster(verb, child)(click.argument("name")(ENGINE(WAIT(NUMBER(run)))))


_simple("pause", "Ask a child for nothing new and save nothing to it, until `resume`.")
_simple("resume", "Use a paused child again.")
_simple("restart", "End a child's hosts and start new ones.")


@on_cluster("reorder", child)
@click.argument("names", nargs=-1, required=True)
@ENGINE
@WAIT
@NUMBER
def child_reorder(kv: Any, names: tuple[str, ...], wait_s: float | None, **options: Any) -> Any:
    """Ask the children in this order: all their NAMES, the first asked first."""
    with Bars() as bars:
        return kv.reorder_children(names, tell=bars, **given(wait_s=wait_s), **options)
