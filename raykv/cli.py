"""The command line: `raykv start`, `stop`, `restart-head`, `status`, `check`. Ray is imported only by what needs it."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import raykv
from raykv.errors import RayKVError

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(raykv.__version__, prog_name="raykv")
def main() -> None:
    """KV-cache tiering for vLLM on Ray."""


def command(name: str) -> Callable[[Callable[..., dict[str, Any]]], click.Command]:
    """A command that returns a dictionary: printed with --json, else the command has printed for people.

    A RayKVError ends it with status 1 and its one paragraph, as {"error": ...} with --json.
    """

    def decorate(function: Callable[..., dict[str, Any]]) -> click.Command:
        @click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
        @wraps(function)
        def run(as_json: bool, **options: Any) -> None:
            out.quiet = as_json
            try:
                result = function(**options)
            except RayKVError as error:
                if as_json:
                    click.echo(json.dumps({"error": str(error), "type": type(error).__name__}))
                else:
                    err.print(f"[bold red]error:[/] {_plain(str(error))}")
                sys.exit(1)
            if as_json:
                click.echo(json.dumps(result, indent=2))

        return main.command(name)(run)

    return decorate


@command("start")
@click.option("--port", default=6379, show_default=True, help="Port of the head's GCS.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--num-cpus", type=int, help="CPUs that Ray may give to others' tasks (RayKV's actors take none).")
@click.option("--object-store-memory", type=int, help="Bytes of shared memory for Ray's objects (RayKV needs few).")
@click.option("--temp-dir", help="Ray's folder for sockets and logs; keep it short. Ray's default: /tmp/ray.")
@click.option("--dashboard/--no-dashboard", default=True, show_default=True, help="Ray's dashboard.")
@click.option("--dashboard-port", type=int, help="Port of the dashboard. Ray's default: 8265.")
def start_command(**options: Any) -> dict[str, Any]:
    """Start a Ray head on this machine, set up so that engines survive the loss of the head."""
    from raykv.actors import listeners, local_cluster, settings

    chosen = local_cluster.StartOptions(**options)
    out.print("starting Ray (about 10 s) ...", style="dim")
    record, fresh = local_cluster.start(chosen)
    loopback = record.address.startswith(local_cluster.LOOPBACK)
    outside = listeners.reachable_from_outside(local_cluster.members(record)) if loopback else []
    environment = {"RAY_ADDRESS": record.address}
    if loopback:
        environment[settings.ONE_MACHINE.name] = settings.ONE_MACHINE.value
    if record.environment.get("RAY_AUTH_MODE"):
        environment["RAY_AUTH_MODE"] = record.environment["RAY_AUTH_MODE"]

    out.print(f"[bold]{'Ray runs' if fresh else 'Ray was running already'}[/] at {record.address}")
    for process in record.processes:
        out.print(f"  {process.role} (pid {process.pid})")
    if record.dashboard:
        out.print(f"  dashboard: {record.dashboard}")
    out.print(f"  logs: {record.log_dir}")
    out.print("Engines on this machine find it by themselves. Ray's own commands need:")
    out.print("  export " + " ".join(f"{key}={value}" for key, value in environment.items()))
    out.print("Look at it with `raykv status`, stop it with `raykv stop`.")
    for listener in outside:
        err.print(f"[yellow]warning:[/] port {listener.port} of process {listener.pid} listens on {listener.ip}")
    return {
        "started": fresh,
        "address": record.address,
        "dashboard": record.dashboard,
        "log_dir": record.log_dir,
        "environment": environment,
        "processes": {process.role: process.pid for process in record.processes},
        "reachable_from_outside": [dataclasses.asdict(listener) for listener in outside],
    }


@command("stop")
@click.option("--grace", default=10.0, show_default=True, help="Seconds before a process is killed.")
def stop_command(grace: float) -> dict[str, Any]:
    """Stop the cluster that `raykv start` started, with all its actors; no other one, and no engine.

    The memory of its stores' host tiers is given back, disk tiers stay.
    """
    from raykv.actors import local_cluster, store_files

    record = local_cluster.read_record()
    stores = _end_stores(record.address) if record is not None else []
    record = local_cluster.stop(grace)
    removed = store_files.remove_stale()  # of stores that were killed
    if record is None:
        out.print(f"RayKV has started no cluster (no record in {local_cluster.state_dir()}).")
    else:
        out.print(f"Stopped the cluster at {record.address}.")
    for name in removed:
        out.print(f"Gave back the memory of a killed store: {name}")
    return {"stopped": record.address if record else None, "stores": stores, "removed": removed}


def _end_stores(address: str) -> list[str]:
    """Let the stores of this node end by themselves; as good as it goes, for their processes are ended anyway."""
    from raykv.actors import addresses, cluster, store_handle

    if addresses.why_unreachable(*addresses.parse(address), timeout=1) is not None:
        return []
    try:
        cluster.connect(address)
        return store_handle.shutdown_stores()
    except Exception as error:  # Ray's own too: a stop must go on
        err.print(f"[yellow]warning:[/] the stores did not end by themselves: {_plain(str(error))}")
        return []
    finally:
        cluster.disconnect()


@command("restart-head")
@click.option("--timeout", default=30.0, show_default=True, help="Seconds for the head to come back.")
def restart_head_command(timeout: float) -> dict[str, Any]:
    """Start again what is gone of the head of `raykv start`'s cluster, with its state; actors are not touched."""
    from raykv.actors import local_cluster

    record, restarted = local_cluster.restart_head(timeout)
    if restarted:
        out.print(f"Started again: {', '.join(restarted)}. The head is back at {record.address}.")
    else:
        out.print(f"Nothing to do: all of the head at {record.address} runs.")
    return {"address": record.address, "restarted": restarted}


@command("status")
@click.option("--address", help="host:port of the head; else RAY_ADDRESS, else the cluster on this machine.")
@click.option("--namespace", default="raykv", show_default=True, help="Ray namespace of the actors.")
@click.option("--timeout", default=3.0, show_default=True, help="Seconds to wait for each actor.")
def status_command(address: str | None, namespace: str, timeout: float) -> dict[str, Any]:
    """Show the cluster's nodes and RayKV's actors."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    from raykv.actors import cluster, observer

    try:
        view = observer.look(address, namespace, timeout)
    finally:
        cluster.disconnect()
    hosts_by_node = {node["node_id"]: node["host"] for node in view.nodes}
    out.print(f"Ray at [bold]{view.address}[/]")
    table = Table("node", "host", "address", "state", "CPUs", "GPUs", box=None)
    for node in view.nodes:
        resources = node["resources"]
        count = [f"{resources.get(kind, 0):g}" for kind in ("CPU", "GPU")]
        table.add_row(node["node_id"][:8], node["host"], node["ip"], "alive" if node["alive"] else "dead", *count)
    out.print(table)
    table = Table("child", "rank", "state", "pid", "node", "actor", box=None)
    for row in view.hosts:
        cells = (row.child, row.rank, row.state, row.pid, hosts_by_node.get(row.node_id or ""), row.name)
        table.add_row(*("-" if cell is None else _plain(str(cell)) for cell in cells))
    out.print(table if view.hosts else f"No actors of RayKV in namespace {namespace!r}: no engine runs children.")
    return {
        "address": view.address,
        "nodes": view.nodes,
        "hosts": [dataclasses.asdict(row) for row in view.hosts],
    }


@command("check")
@click.argument("file", type=click.File())
@click.option("--ray/--no-ray", default=True, show_default=True, help="Also join the Ray cluster that it would use.")
def check_command(file: Any, ray: bool) -> dict[str, Any]:
    """Check a --kv-transfer-config (JSON in FILE, or - for standard input) without starting an engine."""
    from raykv.config import parse
    from raykv.errors import ConfigError

    try:
        config = parse(json.load(file))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file.name} is no JSON: {error}. It must hold vLLM's --kv-transfer-config.") from error
    table = Table("child", "connector", "role", "runs", "load", "save", box=None)
    for child in config.children:
        options = child.options
        cells = (child.name, child.connector, child.role, options.run, "yes" if options.load else "no", options.save)
        table.add_row(*(_plain(str(cell)) for cell in cells))
    out.print(table)
    address = None
    if ray:
        from raykv.actors import cluster

        try:
            address = cluster.connect(config.ray_address, namespace=config.namespace).address
        finally:
            cluster.disconnect()
        out.print(f"Ray at {address} answers.")
    out.print(
        "The config is good. What only the engine knows (model, layouts, vLLM's registry) is checked at its start."
    )
    children = [
        {"name": c.name, "connector": c.connector, "role": c.role, "run": c.options.run} for c in config.children
    ]
    return {"children": children, "load_policy": config.load_policy, "ray": address}


def _plain(text: str) -> str:
    """Text of others, in which a bracket is no markup."""
    return text.replace("[", r"\[")


if __name__ == "__main__":
    main()
