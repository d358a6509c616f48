"""What the commands share that ask or change a running cluster: options, the connection, progress, confirmation."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from raykv.cli.base import command, err, main, out
from raykv.errors import ConfigError

if TYPE_CHECKING:
    from raykv.api import Cluster, Progress

ADDRESS = click.option("--address", help="host:port of the head; else RAY_ADDRESS, else the cluster on this machine.")
NAMESPACE = click.option("--namespace", default="raykv", show_default=True, help="Ray namespace of the actors.")
TIMEOUT = click.option("--timeout", default=10.0, show_default=True, help="Seconds to wait for each actor's answer.")
ENGINE = click.option("--engine", "-e", help="The engine: its id, the first letters of it, its host or its model.")
STORE = click.option("--store", "-s", help="The store: NAME (on all nodes), NAME@NODE, @NODE or its actor.")
WAIT = click.option("--wait", "wait_s", type=float, help="Seconds to wait for the end; what lasts longer goes on.")
NUMBER = click.option("--number", help="The number of an earlier try: what that has done is not done twice.")
YES = click.option("--yes", "-y", is_flag=True, help="Don't ask.")


@contextlib.contextmanager
def connected(address: str | None, namespace: str, timeout: float) -> Iterator[Cluster]:
    """The cluster, left again at the end."""
    from raykv import api

    with api.connect(address, namespace, timeout) as kv:
        yield kv


def on_cluster(name: str, parent: click.Group = main, **more: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """A command whose function gets the connected cluster and its own options, and returns what shows itself: printed
    as it shows itself, or with --json as `to_dict` says."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        @ADDRESS
        @NAMESPACE
        @TIMEOUT
        @wraps(function)
        def run(address: str | None, namespace: str, timeout: float, **options: Any) -> Any:
            with connected(address, namespace, timeout) as kv:
                result = function(kv, **{key: value for key, value in options.items()})
            out.print(result)
            return result.to_dict()

        return command(name, parent, **more)(run)

    return decorate


class ListByDefault(click.Group):
    """A group that runs its `list` where no command is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """With `list` put in front, unless help is asked for."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


# -- progress ---------------------------------------------------------------------------------------------------------


class Bars:
    """Progress on standard error: bars on a terminal, else a line for each change that says something."""

    def __init__(self) -> None:
        self._live: Any = None
        self._tasks: dict[str, Any] = {}
        self._said: dict[str, str] = {}

    def __enter__(self) -> Bars:
        if err.is_terminal and not out.quiet:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Live

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._live = Live(*columns, TextColumn("[dim]{task.fields[detail]}"), console=err, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.__exit__(*error)

    def __call__(self, progress: Progress) -> None:
        name = f"{progress.what} at {progress.where}"
        if self._live is None:
            self._line(name, progress)
            return
        if name not in self._tasks:
            self._tasks[name] = self._live.add_task(name, total=None, detail="")
        total = progress.total or (1 if progress.ended else None)
        done = progress.done if progress.total else int(progress.ended)
        self._live.update(self._tasks[name], total=total, completed=done, detail=progress.detail)

    def _line(self, name: str, progress: Progress) -> None:
        text = progress.detail or (f"{progress.done:,} of {progress.total:,}" if progress.ended else "")
        if text and self._said.get(name) != text and not out.quiet:
            self._said[name] = text
            err.print(f"{name}: {text}", style="dim", markup=False)


def confirm(question: str, yes: bool) -> None:
    """Go on only if the operator says so; without a terminal only with --yes."""
    if not yes and not click.confirm(question, err=True):
        raise click.Abort()


# -- prompts ----------------------------------------------------------------------------------------------------------


def prompt_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """A prompt in one of four ways, and whose it is: the command gets `prompt` and `lookup`'s keywords."""

    @click.argument("text", metavar="[PROMPT]", required=False)
    @click.option("--file", "-f", type=click.File(), help="Read the prompt's text from a file, - for standard input.")
    @click.option("--tokens", "-t", help="Token ids in place of a text: 1,2,3, or a JSON list.")
    @click.option("--messages", "-m", type=click.File(), help="Chat messages, a JSON file: its chat template is used.")
    @ENGINE
    @click.option("--model", help="The model that the prompt is meant for: checked against the engine's.")
    @click.option("--cache-salt", default="", help="The requests' cache_salt (the tenant).")
    @click.option("--lora", default="", help="The adapter's name.")
    @wraps(function)
    def run(*args: Any, text: str | None, file: Any, tokens: str | None, messages: Any, **options: Any) -> Any:
        return function(*args, prompt=_prompt(text, file, tokens, messages), **options)

    return run


def _prompt(text: str | None, file: Any, tokens: str | None, messages: Any) -> Any:
    given = [one is not None for one in (text, file, tokens, messages)]
    if sum(given) != 1:
        raise click.UsageError("Give one prompt: PROMPT, --file, --tokens or --messages.")
    if file is not None:
        return file.read()
    if tokens is not None:
        return _token_ids(tokens)
    if messages is None:
        return text
    try:
        found = json.load(messages)
    except ValueError as error:
        raise ConfigError(f"{messages.name} is no JSON: {error}. It must be a list of chat messages.") from error
    return found["messages"] if isinstance(found, dict) and "messages" in found else found


def _token_ids(tokens: str) -> list[Any]:
    text = tokens.strip()
    try:
        found = json.loads(text if text.startswith("[") else f"[{text}]")
    except ValueError as error:
        raise click.BadParameter(
            f"{tokens[:60]!r} is no list of numbers such as 1,2,3.", param_hint="--tokens"
        ) from error
    return list(found)
