"""Says what is going on and for how long, on a terminal and in a log file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn


class Progress:
    """One line for each slow part, with its seconds; `seconds` keeps them for the report."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, title: str) -> Iterator[None]:
        begun = time.perf_counter()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        if self.console.is_terminal:
            with Bars(*columns, console=self.console, transient=True) as bars:
                bars.add_task(title)
                yield
        else:
            self.console.print(f"  … {title}")
            yield
        took = time.perf_counter() - begun
        self.seconds[title] = round(took, 2)
        self.console.print(f"[green]✓[/] {title} [dim]{took:.1f} s[/]", highlight=False)
