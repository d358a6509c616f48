"""What the commands share: the group, how a result or an error is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import click
from rich.console import Console

import raykv
from raykv.errors import RayKVError

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(raykv.__version__, prog_name="raykv")
def main() -> None:
    """KV-cache tiering for vLLM on Ray."""


def command(name: str, **more: Any) -> Callable[[Callable[..., dict[str, Any]]], click.Command]:
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
                    err.print(f"[bold red]error:[/] {plain(str(error))}")
                sys.exit(1)
            if as_json:
                click.echo(json.dumps(result, indent=2))

        return main.command(name, **more)(run)

    return decorate


def plain(text: str) -> str:
    """Text of others, in which a bracket is no markup."""
    return text.replace("[", r"\[")
