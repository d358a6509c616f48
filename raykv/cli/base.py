"""What the commands share: the group, how a result or an error is printed, what an exit code means."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import click
from rich.console import Console

import raykv
from raykv.errors import RayKVError

DONE, ERROR, USAGE, PARTLY = 0, 1, 2, 3
"""Exit codes: done; an error, nothing was changed; wrong usage; done in part, or what was asked for is not there."""

CODES = """
\b
Exit codes:
  0  done
  1  an error; nothing was changed unless the message says so
  2  wrong usage
  3  done in part or still under way; or what was asked for is not there
"""

PIPE_COLUMNS = 200
"""A pipe has no width; tables for people are not to be folded in it."""

out = Console(
    highlight=False,
    soft_wrap=True,
    width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS,
)
err = Console(stderr=True, highlight=False, soft_wrap=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, epilog=CODES)
@click.version_option(raykv.__version__, prog_name="raykv")
def main() -> None:
    """KV-cache tiering for vLLM on Ray."""


def command(
    name: str, parent: click.Group = main, **more: Any
) -> Callable[[Callable[..., dict[str, Any] | list[Any]]], click.Command]:
    """A command that returns a dictionary: printed with --json, else the command has printed for people.

    A RayKVError ends it with status ERROR (PARTLY for what is not there, or was begun and not done) and its one
    paragraph, as {"error": ...} with --json. A result with "ok": false ends it with PARTLY.
    """

    def decorate(function: Callable[..., dict[str, Any] | list[Any]]) -> click.Command:
        @click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
        @wraps(function)
        def run(as_json: bool, **options: Any) -> None:
            out.quiet = as_json
            try:
                result = function(**options)
            except RayKVError as error:
                fail(error, as_json)
            if as_json:
                click.echo(json.dumps(result, indent=2))
            if isinstance(result, dict) and result.get("ok") is False:
                sys.exit(PARTLY)

        return parent.command(name, **more)(run)

    return decorate


def fail(error: RayKVError, as_json: bool) -> None:
    """Print an error and end with its exit code."""
    if as_json:
        click.echo(json.dumps({"error": str(error), "type": type(error).__name__}))
    else:
        err.print(f"[bold red]error:[/] {plain(str(error))}")
    sys.exit(PARTLY if type(error).__name__ in ("NotFoundError", "NotDoneError") else ERROR)


def plain(text: str) -> str:
    """Text of others, in which a bracket is no markup."""
    return text.replace("[", r"\[")
