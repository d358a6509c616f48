"""Pictures for the docs: Ray's dashboard of a small cluster with RayKV's actors, as headless Chromium shows it.

    python -m scripts.screenshots [FOLDER]

Needs Debian's package `chromium`. The cluster is real, and so are its store, Directory and Controller; no engine runs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.metrics_cluster import MetricsCluster

PAGES = {"ray-actors.png": "/#/actors"}
SIZE = "1600,640"
SETTLE_MS = 15_000
"""Of the page's own clock: it asks the dashboard for its figures, and draws them."""
FLAGS = (
    "--headless",
    "--no-sandbox",  # it may run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def shoot(url: str, target: Path, size: str = SIZE) -> None:
    """`size`: width and height in pixels. Raises RuntimeError without a browser or a picture."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise RuntimeError("there is no Chromium here: apt-get install --no-install-recommends chromium")
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *FLAGS, f"--user-data-dir={profile}", f"--window-size={size}"]
        command += [f"--virtual-time-budget={SETTLE_MS}", f"--screenshot={target}", url]
        subprocess.run(command, check=True, timeout=180, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if not target.is_file():
        raise RuntimeError(f"Chromium made no picture of {url}")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as disk:
        cluster = MetricsCluster(Path(disk), "pictures")
        try:
            for _ in range(3):
                cluster.work()
            for name, page in PAGES.items():
                shoot(f"{cluster.ray.record.dashboard}{page}", (folder / name).resolve())
                print(folder / name)
        finally:
            cluster.close()


if __name__ == "__main__":
    main()
