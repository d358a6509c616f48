import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("other_process.py")
REPOSITORY = SCRIPT.parents[2]


class Other:
    """A line-by-line conversation with other_process.py."""

    def __init__(self, role, path, prefix=(), **popen):
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(SCRIPT), role, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            **popen,
        )
        self.first = self.process.stdout.readline().strip()

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self):
        if self.process.poll() is None:
            self.process.stdin.close()
        code = self.process.wait(timeout=30)
        self.process.stdout.close()
        return code

    def kill(self):
        self.process.kill()
        self.process.wait(timeout=30)


@pytest.fixture
def start(tmp_path):
    """Start the other process: `start("map", handle)` or `start("export")`; ended with the test."""
    others = []

    def _start(role, handle=None, **options):
        path = tmp_path / f"handle-{len(others)}"
        if handle is not None:
            path.write_bytes(pickle.dumps(handle))
        other = Other(role, path, **options)
        others.append(other)
        other.path = path
        return other

    yield _start
    for other in others:
        if other.process.poll() is None:
            other.kill()


@pytest.fixture(autouse=True)
def nothing_left_in_dev_shm():
    # By the names that this part gives: other tests and other people use /dev/shm at the same time.
    before = set(os.listdir("/dev/shm"))
    yield
    left = {n for n in set(os.listdir("/dev/shm")) - before if n.startswith(("raykv-kvcache", "torch_"))}
    assert not left
