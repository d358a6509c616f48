"""`raykv start`, `stop`, `restart-head`: the Ray of this machine."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from raykv.cli.base import command, err, out, plain


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
        err.print(f"[yellow]warning:[/] the stores did not end by themselves: {plain(str(error))}")
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
