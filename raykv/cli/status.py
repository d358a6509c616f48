"""`raykv status`: nodes, engines, stores, the Directory and the actors of engines."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from raykv.api.objects import Engine, Listing, shares
from raykv.cli.base import command, out, plain

if TYPE_CHECKING:
    from raykv.actors.observer import ClusterView, HostRow
    from raykv.cluster_messages import ClusterStatus

STYLES = {
    **dict.fromkeys(("ready", "up", "alive", "drained"), "green"),
    **dict.fromkeys(("failed", "dead", "no answer", "gone", "unhealthy"), "red"),
}


@command("status")
@click.option("--address", help="host:port of the head; else RAY_ADDRESS, else the cluster on this machine.")
@click.option("--namespace", default="raykv", show_default=True, help="Ray namespace of the actors.")
@click.option("--timeout", default=3.0, show_default=True, help="Seconds to wait for each actor.")
def status_command(address: str | None, namespace: str, timeout: float) -> dict[str, Any]:
    """Show the cluster's nodes, what `raykv up` started, and RayKV's actors."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    from raykv.actors import cluster, controller_handle, observer
    from raykv.errors import ClusterError

    status, problem = None, ""
    try:
        view = observer.look(address, namespace, timeout)
        controller = controller_handle.find(namespace)
        if controller is not None:
            try:
                status = controller.status(timeout)
            except ClusterError as error:
                problem = str(error)
        engines = engines_of(namespace, timeout)
    finally:
        cluster.disconnect()
    out.print(f"Ray at [bold]{view.address}[/]")
    _print_nodes(view, status)
    if status is not None:
        _print_cluster(view, status)
    elif problem:
        out.print(f"[red]{plain(problem)}[/]")
    _print_directory(view.directory)
    _print_stores(view)
    hosts = [row for row in view.hosts if _of_an_engine(row)]
    if engines:
        _print_engines(engines)
    _print_hosts(view, hosts, namespace, status is not None or bool(view.stores))
    return {
        "address": view.address,
        "nodes": view.nodes,
        "hosts": [_plain_row(row) for row in hosts],
        "stores": [_plain_row(row) for row in view.stores],
        "directory": None if view.directory is None else _plain_row(view.directory),
        "cluster": None if status is None else _as_json(status),
        "engines": engines.to_dict(),
        "problem": problem,
    }


def engines_of(namespace: str, timeout: float) -> Listing[Engine]:
    """The engines that have a desk, as they describe themselves. This process is in the cluster."""
    from raykv.actors import cluster, desk_handle
    from raykv.api.looking import engines_at
    from raykv.errors import RayKVError

    callers = {}
    for name in desk_handle.desks(namespace):
        with contextlib.suppress(RayKVError):  # it is gone by now
            callers[name] = desk_handle.find_desk(name, namespace)
    hosts = {node["node_id"]: node["host"] for node in cluster.nodes()} if callers else {}
    return engines_at(callers, timeout, hosts)


def _as_json(status: ClusterStatus) -> dict[str, Any]:
    spec = json.loads(status.spec) if status.spec else None
    return {**dataclasses.asdict(status), "spec": spec, "ready": status.ready}


def _plain_row(row: HostRow) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(row).items() if key != "figures" or value is not None}


def _of_an_engine(row: HostRow) -> bool:
    """Not what the other tables show."""
    from raykv.actors.desk_handle import PREFIX as DESK
    from raykv.actors.directory_handle import NAME as DIRECTORY
    from raykv.actors.engine_actors import PREFIX
    from raykv.actors.event_handle import NAME as EVENTS
    from raykv.cluster_messages import CONTROLLER

    return (
        not row.is_store and not row.name.startswith((PREFIX, DESK)) and row.name not in (CONTROLLER, DIRECTORY, EVENTS)
    )


def _print_nodes(view: ClusterView, status: ClusterStatus | None) -> None:
    drained = {row.node: row.state for row in status.nodes} if status is not None else {}
    table = Table("node", "host", "address", "state", "CPUs", "GPUs", box=None)
    for node in view.nodes:
        resources = node["resources"]
        count = [f"{resources.get(kind, 0):g}" for kind in ("CPU", "GPU")]
        state = drained.get(node["node_id"], "alive") if node["alive"] else "dead"
        table.add_row(node["node_id"][:8], node["host"], node["ip"], coloured(state), *count)
    out.print(table)


def _print_cluster(view: ClusterView, status: ClusterStatus) -> None:
    if status.problem:
        out.print(f"[red]{plain(status.problem)}[/]")
    hosts = {node["node_id"]: node["host"] for node in view.nodes}
    table = Table("engine", "role", "state", "pid", "restarts", "node", "url", box=None)
    for row in status.engines:
        node = f"{row.node[:8]} {hosts.get(row.node, '')}".strip() or "-"
        cells = (coloured(row.state), str(row.pid or "-"), str(row.restarts), plain(node), row.url or "-")
        table.add_row(row.name, row.role, *cells)
    if status.engines:
        out.print(table)
    table = Table("store", "state", "node", box=None)
    for store in status.stores:
        table.add_row(store.store, coloured(store.state), f"{store.node[:8]} {hosts.get(store.node, '')}")
    if status.stores:
        out.print(table)
    for row in status.engines:
        if row.error:
            out.print(f"[yellow]{row.name}:[/] {plain(row.error)}")
            for line in row.log_tail[-5:]:
                out.print(f"    {plain(line)}", style="dim")
    for store in status.stores:
        if store.error:
            out.print(f"[yellow]store {store.store}:[/] {plain(store.error)}")


def _print_engines(engines: Listing[Engine]) -> None:
    """Each engine's chain of children, and where its prompt tokens came from."""
    table = Table("engine", "model", "children, first asked first", "tokens by source", box=None)
    for engine in engines:
        chain = " ".join(f"{plain(child.name)} {coloured(child.state)}" for child in engine.children) or "-"
        tokens = plain(shares(engine.tokens)) or "-"
        table.add_row(plain(engine.label), plain(engine.served[0] if engine.served else engine.model), chain, tokens)
    out.print(table)
    for engine in engines:
        if engine.problem:
            out.print(f"[yellow]engine {plain(engine.label)}:[/] {plain(engine.problem)}")


def _print_directory(row: HostRow | None) -> None:
    if row is None:
        return
    if row.figures is None:
        out.print(f"Directory: {plain(_why_none(row))}", style="yellow")
        return
    figures = row.figures
    filling = sum(not holder["whole"] for holder in figures["holders"])
    out.print(
        f"Directory: {figures['keys']:,} blocks on {_count(figures['nodes'], 'node')}, "
        f"{_count(len(figures['holders']), 'store')}, {figures['index_nbytes'] / 1e6:,.1f} MB (pid {row.pid})"
        + (f", [yellow]{_count(filling, 'store')} still to tell all[/]" if filling else "")
    )


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("s" if number != 1 else "")


def _print_stores(view: ClusterView) -> None:
    """A row for each tier. What needs words, and what a store lent to others and read from them, is in lines below."""
    hosts = {node["node_id"]: node["host"] for node in view.nodes}
    table = Table("tiers of store", "node", "tier", "blocks", "room", "hits", "evicted", box=None)
    notes = []
    for row in view.stores:
        name, node = row.store_and_node
        place = (plain(name), f"{node[:8]} {plain(hosts.get(row.node_id or '', ''))}".strip())
        figures = row.figures
        if figures is None or not figures["tiers"]:
            table.add_row(*place, *"-----")
            notes.append((place, "no engine has opened its tiers yet" if figures is not None else _why_none(row)))
            continue
        for tier in figures["tiers"]:
            table.add_row(*place, tier["medium"], *(f"{tier[key]:,}" for key in ("used", "slots", "hits", "evicted")))
            notes += [(place, note) for note in _tier_notes(tier)]
        notes += [(place, note) for note in _peer_notes(figures.get("peer"))]
        if figures.get("drain"):
            notes.append((place, f"drained: {figures['drain']}"))
    if view.stores:
        out.print(table)
    for (name, node), note in notes:
        out.print(f"[yellow]store {name} on {node}:[/] {plain(note)}")


def _why_none(row: HostRow) -> str:
    if row.error:
        return f"{row.state}: {row.error}"
    return "it runs another RayKV" if row.pid is not None else row.state


def _tier_notes(tier: dict[str, Any]) -> list[str]:
    notes = []
    if tier["off"]:
        notes.append(f"{tier['medium']} is off: {tier['off']}")
    if tier["bad_reads"]:
        notes.append(f"{tier['medium']}: {_count(tier['bad_reads'], 'bad block')}, each a miss")
    return notes


def _peer_notes(peer: dict[str, Any] | None) -> list[str]:
    """Of a store with a peer tier."""
    if peer is None:
        return []
    bad = f"; {_count(peer['bad_blocks'], 'bad block')} not used" if peer["bad_blocks"] else ""
    lent = f"lent {_count(peer['lent_blocks'], 'block')} to other nodes ({peer['lent_now']:,} now)"
    return [f"peer: {lent}, read {peer['read_blocks']:,} from them{bad}"]


def _print_hosts(view: ClusterView, hosts: list[Any], namespace: str, controlled: bool) -> None:
    names = {node["node_id"]: node["host"] for node in view.nodes}
    table = Table("child", "rank", "state", "pid", "node", "actor", box=None)
    for row in hosts:
        cells = (row.child, row.rank, row.state, row.pid, names.get(row.node_id or ""), row.name)
        table.add_row(*("-" if cell is None else plain(str(cell)) for cell in cells))
    if hosts:
        out.print(table)
    elif not controlled:
        out.print(f"No actors of RayKV in namespace {namespace!r}: no engine runs children.")


def coloured(state: str) -> str:
    """A state in its colour."""
    return f"[{STYLES.get(state, 'yellow')}]{plain(state)}[/]"
