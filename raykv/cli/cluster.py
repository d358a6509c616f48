"""`raykv up`, `down`, `drain`: engines and stores over a whole Ray cluster."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from raykv.cli.base import command, out, plain
from raykv.cli.connected import ADDRESS, NAMESPACE, Bars, on_cluster
from raykv.cli.status import coloured

if TYPE_CHECKING:
    from raykv.launch.up import Progress


def tell(progress: Progress) -> None:
    """One line as it happens."""
    name = f"{progress.kind} {progress.name}".strip()
    out.print(f"  {plain(name):<24} {coloured(progress.state)} [dim]{plain(progress.detail)}[/]")


@command("up")
@click.argument("spec_file", metavar="SPEC.yaml", type=click.Path(dir_okay=False))
@ADDRESS
@NAMESPACE
@click.option("--check", is_flag=True, help="Only read the spec; start nothing, join no cluster.")
def up_command(spec_file: str, address: str | None, namespace: str, check: bool) -> dict[str, Any]:
    """Start the engines, stores and router of SPEC.yaml in a Ray cluster, or change what runs to it.

    Waits until all engines are ready. If one can't start, what was started is ended and its last lines are shown.
    """
    from raykv.launch.spec_file import read_spec

    spec = read_spec(spec_file)
    engines = ", ".join(f"{engine.replicas} x {engine.name} ({engine.role})" for engine in spec.engines)
    out.print(f"[bold]{plain(spec.model)}[/]: {engines}")
    if check:
        out.print("The spec is good. Nodes, memory and folders are checked by `raykv up`, before anything starts.")
        return {"checked": True, "engines": [engine.replica(index) for engine, index in spec.replicas]}
    from raykv.actors import cluster
    from raykv.launch import up

    try:
        done = up.up(spec, tell, address=address, namespace=namespace)
    finally:
        cluster.disconnect()
    if done.router is not None:
        out.print(f"[bold green]Ready[/] at {done.router}/v1")
    else:
        out.print("[bold green]Ready[/]")
        for row in done.status.engines:
            out.print(f"  {row.name}: {row.url}/v1")
    out.print("Look at it with `raykv status`, end it with `raykv down`.")
    return {
        "address": done.address,
        "router": done.router,
        "engines": [dataclasses.asdict(row) for row in done.status.engines],
        "stores": [dataclasses.asdict(row) for row in done.status.stores],
    }


@command("down")
@ADDRESS
@NAMESPACE
@click.option("--timeout", default=180.0, show_default=True, help="Seconds for all of it to end.")
def down_command(address: str | None, namespace: str, timeout: float) -> dict[str, Any]:
    """End what `raykv up` started: router, engines, stores. Disk tiers stay, and so does the Ray cluster."""
    from raykv.actors import cluster
    from raykv.launch import up

    try:
        ended = up.down(tell, address=address, namespace=namespace, timeout=timeout)
    finally:
        cluster.disconnect()
    out.print("All that `raykv up` started is ended." if ended else "`raykv up` has started nothing in this cluster.")
    return {"ended": ended}


@on_cluster("drain")
@click.argument("node")
@click.option("--wait", "wait_s", default=900.0, show_default=True, help="Seconds to wait until the node is empty.")
@click.option("--undo", is_flag=True, help="Use the node again.")
def drain_command(kv: Any, node: str, wait_s: float, undo: bool) -> Any:
    """Empty NODE (its id, the first letters of it, or its host) so that it can be removed.

    Its engines go on until others have taken their places, then they finish their requests and end; the blocks of its
    stores move to where they are still found. Without a Controller (`raykv up`) only the stores are emptied.
    """
    if undo:
        return kv.undrain_node(node)
    with Bars() as bars:
        return kv.drain_node(node, wait_s=wait_s, tell=bars)
