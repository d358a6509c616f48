"""`raykv bench`: it measures something, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run, said

pytestmark = pytest.mark.process


def test_it_measures_and_leaves_nothing(raykv: Run, tmp_path: Path) -> None:
    before = set(Path("/dev/shm").glob("raykv-bench-*"))
    done = raykv("bench", "--size", "64MiB", "--disk", str(tmp_path), "--json")
    assert done.exit_code == 0 and said(done)["blocks"] == 64
    names = [figure["what"] for figure in said(done)["figures"]]
    assert names[:3] == ["memcpy", "host tier", "host tier, with checksums"] and names[-1] == "disk tier, read"
    assert all(figure["gbs"] > 0 for figure in said(done)["figures"])
    assert not list(tmp_path.iterdir()) and set(Path("/dev/shm").glob("raykv-bench-*")) <= before


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--size", "1KiB"), "--size is"),
        (("--block", "5000"), "multiple of 4KiB"),
        (("--block", "1GiB"), "quarter of --size"),
        (("--disk", "/nowhere"), "no folder"),
    ],
)
def test_bad_options(raykv: Run, args: tuple[str, ...], says: str) -> None:
    done = raykv("bench", "--size", "64MiB", *args)
    assert done.exit_code == 1 and says in done.stderr
