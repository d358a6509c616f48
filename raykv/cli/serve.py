"""`raykv serve`: one engine in the foreground, with a cache in this node's memory."""

from __future__ import annotations

import sys
from typing import Any

import click

from raykv.cli.base import command, err, out, plain


@command(
    "serve",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True},
    options_metavar="[OPTIONS] [vLLM OPTIONS]",
)
@click.argument("model")
@click.argument("vllm_options", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.option(
    "--host-tier", metavar="SIZE", help="Memory for cached blocks, such as 8GiB. Default: a quarter of the free."
)
@click.option("--disk-tier", metavar="PATH=SIZE", help="A folder on disk for more of them, such as /nvme/raykv=500GiB.")
@click.option("--kv-config", is_flag=True, help="Print the --kv-transfer-config that `vllm serve` would get, and end.")
def serve_command(
    model: str, vllm_options: tuple[str, ...], host_tier: str | None, disk_tier: str | None, kv_config: bool
) -> dict[str, Any]:
    """`vllm serve MODEL` with a cache in this node's memory that outlives requests, and that engines here share.

    Starts a Ray on this machine if none runs. Stays in the foreground; Ctrl-C ends all that it started. All other
    options are vLLM's; unless told otherwise it listens on loopback only.
    """
    from raykv.launch import serve

    wanted = serve.plan(model, vllm_options, host_tier, disk_tier)
    if kv_config:
        click.echo(wanted.config_json)
        return {"kv_transfer_config": wanted.config}

    def note(text: str) -> None:
        out.print(f"[dim]raykv:[/] {plain(text)}")

    status = serve.run(wanted, note, lambda line: print(line, flush=True))
    if status:
        err.print(f"[bold red]error:[/] the engine ended with status {status}.")
        sys.exit(status if 0 < status < 256 else 1)
    return {"status": status}
