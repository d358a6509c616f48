"""`raykv completion`: the shell's own completion of commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from raykv.cli.base import main

VARIABLE = "_RAYKV_COMPLETE"


@main.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash: raykv completion bash > ~/.local/share/bash-completion/completions/raykv
    zsh:  raykv completion zsh > "${fpath[1]}/_raykv"
    fish: raykv completion fish > ~/.config/fish/completions/raykv.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None  # click knows these three
    made = kind(main, {}, "raykv", VARIABLE)
    click.echo(made.source_template % made.source_vars())
