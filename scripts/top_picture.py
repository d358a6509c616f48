"""A picture for the docs: what `raykv top` shows of two real engines under load.

    python -m scripts.top_picture [FOLDER]

Needs Debian's package `chromium`. The cluster, the engines (a tiny random model), their store and their requests are
real, and so is the command: its output on a terminal is drawn as it comes.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from scripts.screenshots import shoot
from tests.support.busy_engines import BusyEngines
from tests.support.models import tiny_llama

NAME = "raykv-top.png"
COLUMNS = 118
WARM_S = 45.0
"""Until all tiers are in use."""


def top() -> str:
    """One frame, as a terminal gets it."""
    command = [sys.executable, "-m", "raykv.cli", "top", "--once", "--every", "3"]
    env = {**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    return subprocess.run(command, env=env, check=True, timeout=120, stdout=subprocess.PIPE, text=True).stdout


def draw(frame: str, target: Path) -> None:
    """Raises RuntimeError without a browser or a picture."""
    console = Console(width=COLUMNS, record=True, file=io.StringIO())
    console.print(Text.from_ansi(frame))
    drawn = console.export_svg(title="raykv top")
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn)
    assert size is not None
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "top.svg")
        page.write_text(drawn)
        shoot(page.as_uri(), target, f"{int(float(size[1])) + 1},{int(float(size[2])) + 1}")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as disk:
        busy = BusyEngines(tiny_llama(), Path(disk))
        try:
            busy.begin()
            time.sleep(WARM_S)
            frame = top()
        finally:
            busy.close()
    if busy.wrong:
        raise RuntimeError(f"a request failed: {busy.wrong[0]}")
    print(Text.from_ansi(frame).plain)
    draw(frame, (folder / NAME).resolve())
    print(folder / NAME)


if __name__ == "__main__":
    main()
