"""The harness itself: what is started ends, and what a benchmark counts is right."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.support import models, process
from tests.support.configs import example_child, multi


def test_a_group_ends_with_its_orphans() -> None:
    # The shell ends at once; its child stays behind in the session, as a daemon would.
    group = process.ProcessGroup("orphan", ["sh", "-c", "sleep 600 & echo started"])
    assert group.wait(10)
    orphans = group.members()
    assert len(orphans) == 1
    assert orphans[0] in process.survivors()
    group.kill()
    assert group.members() == []
    assert not set(orphans) & set(process.survivors())
    assert process.tail(group.log) == "started"


def test_a_killed_run_leaves_nothing() -> None:
    code = (
        "from tests.support import process\n"
        "import os, signal\n"
        "group = process.ProcessGroup('victim', ['sleep', '600'])\n"
        "print(group.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = process.ProcessGroup("run", [sys.executable, "-c", code])
    assert run.wait(30)
    victim = int(process.tail(run.log))
    run.kill()
    deadline = time.monotonic() + 10
    while process.session_of(victim) == victim and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.session_of(victim) != victim


def test_left_over_shared_memory_goes_with_the_group() -> None:
    code = (
        "from multiprocessing import resource_tracker as t, shared_memory\n"
        "s = shared_memory.SharedMemory(create=True, size=4096)\n"
        "t.unregister(s._name, 'shared_memory')\n"
        "print(s.name, flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    group = process.ProcessGroup("shm", [sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 30
        while not (name := process.tail(group.log)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert name in process.shm_names()
    finally:
        group.kill()
    assert name not in process.shm_names()


def test_a_model_that_failed_to_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        (path / "half").touch()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        models.once("model", fail, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_built_once(tmp_path: Path) -> None:
    built = []
    for _ in range(2):
        path = models.once("model", built.append, tmp_path)
    assert path == tmp_path / "model"
    assert len(built) == 1


def test_ports_differ() -> None:
    assert len(set(process.free_ports(20))) == 20


def test_the_same_config_serves_both_classes() -> None:
    ours = multi([example_child("/x", name="files")])
    theirs = multi([example_child("/x", name="files")], module=None)
    assert ours.pop("kv_connector_module_path") == "raykv.connector"
    assert ours == theirs
