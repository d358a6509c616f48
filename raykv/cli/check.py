"""`raykv check`: a --kv-transfer-config without an engine. `raykv doctor FILE` checks the machine too."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from raykv.cli.base import command, out, plain

if TYPE_CHECKING:
    from raykv.config import MultiConfig


@command("check")
@click.argument("file", type=click.File())
@click.option("--ray/--no-ray", default=True, show_default=True, help="Also join the Ray cluster that it would use.")
def check_command(file: Any, ray: bool) -> dict[str, Any]:
    """Check a --kv-transfer-config (JSON in FILE, or - for standard input) without starting an engine.

    `raykv doctor FILE` does the same, and checks this machine.
    """
    config = check_config(file)
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


def check_config(file: Any) -> MultiConfig:
    """Parse a file and print its children. Raises ConfigError."""
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
        table.add_row(*(plain(str(cell)) for cell in cells))
    out.print(table)
    return config
