"""`raykv lookup`, `explain`, `watch`: questions to a running cluster."""

from __future__ import annotations

import json
from typing import Any

import click

from raykv.cli.base import fail, main, out, plain
from raykv.cli.connected import ADDRESS, ENGINE, NAMESPACE, STORE, TIMEOUT, connected, on_cluster, prompt_options
from raykv.errors import RayKVError


@on_cluster("lookup")
@prompt_options
@STORE
def lookup_command(kv: Any, prompt: Any, **options: Any) -> Any:
    """Which blocks of a PROMPT are held: in which tiers of which nodes."""
    return kv.lookup(prompt, **options)


@on_cluster("explain")
@click.argument("request", required=False)
@ENGINE
def explain_command(kv: Any, request: str | None, engine: str | None) -> Any:
    """Where each token of REQUEST's prompt came from, and why the computed ones were not loaded.

    REQUEST is its id, as the client or vLLM knows it, or the beginning of it. Without one the known ones are listed.
    """
    return kv.requests(engine=engine) if request is None else kv.explain(request, engine=engine)


@main.command("watch")
@ADDRESS
@NAMESPACE
@TIMEOUT
@click.option("--every", default=1.0, show_default=True, help="Seconds between two looks.")
@click.option("--for", "for_time", help="End after this time, such as 90s or 10m; else Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print each event as a line of JSON.")
def watch_command(
    address: str | None, namespace: str, timeout: float, every: float, for_time: str | None, as_json: bool
) -> None:
    """Print what changes as it happens: nodes, engines, children, stores, tiers, operations, pins."""
    from raykv.api.words import seconds

    out.quiet = as_json
    try:
        limit = None if for_time is None else seconds(for_time, "--for")
        with connected(address, namespace, timeout) as kv:
            for event in kv.watch(every, limit):
                if as_json:
                    click.echo(json.dumps(event.to_dict()))
                else:
                    out.print(f"[dim]{clock(event.at)}[/] {plain(event.said)}")
    except RayKVError as error:
        fail(error, as_json)
    except KeyboardInterrupt:
        pass  # the way to end it


def clock(at: float) -> str:
    """The time of day, as this machine's people read it."""
    import time

    return time.strftime("%H:%M:%S", time.localtime(at))
