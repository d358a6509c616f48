"""Shared memory and sockets that an engine's processes leave go with them, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raykv.actors import engine_guard
from raykv.actors.engine_guard import Segments
from raykv.actors.engine_process import SOCKETS, EngineProcess
from raykv.actors.processes import parent_of

pytestmark = pytest.mark.process

SHM = Path("/dev/shm")
MAPS = """
import mmap, os, sys, time
for name in sys.argv[1:]:
    fd = os.open("/dev/shm/" + name, os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(fd, 4096)
    held = mmap.mmap(fd, 4096)
    globals()["held" + name] = held
    os.close(fd)
print("mapped", flush=True)
time.sleep(1000)
"""
"""Maps these segments and closes them: as vLLM does, without Python's resource tracker."""
ENGINE = f"""
import os, socket, subprocess, sys, time
folder = os.environ.get("{SOCKETS}", "")
if folder:
    socket.socket(socket.AF_UNIX).bind(folder + "/123e4567-e89b-12d3-a456-426614174000")
print(folder, flush=True)
worker = subprocess.Popen([sys.executable, "-S", "-c", {MAPS!r}, *sys.argv[1:]])
worker.wait()
"""


def until(what: Callable[[], Any], timeout: float = 30) -> Any:
    deadline = time.monotonic() + timeout
    while not (value := what()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return value


@pytest.fixture
def names() -> Iterator[Callable[[str], str]]:
    made: list[str] = []

    def name(kind: str) -> str:
        made.append(f"{kind}{uuid.uuid4().hex}-[0-1]-cpushm_0")
        return made[-1]

    yield name
    for one in made:
        (SHM / one).unlink(missing_ok=True)


@pytest.fixture
def mapper() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*segments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-S", "-c", MAPS, *segments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "mapped\n"
        return process

    yield start
    for process in started:
        end(process)
        assert process.stdout is not None
        process.stdout.close()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def engine(*segments: str, environment: dict[str, str] | None = None) -> tuple[EngineProcess, str]:
    """Runs, and its worker has mapped these; with the folder of its sockets."""
    lines: list[str] = []
    started = EngineProcess(
        [sys.executable, "-S", "-c", ENGINE, *segments],
        {**os.environ, **(environment or {})},
        on_line=lines.append,
        on_end=lambda _: None,
    )
    until(lambda: "mapped" in lines)
    return started, lines[0]


@pytest.mark.parametrize("who", ["all", "its own process", "its guard"])
def test_a_killed_engine_leaves_nothing(names: Callable[[str], str], who: str) -> None:
    segments = [names("vllm_dist_"), names("psm_"), names("sem.mp-"), names("45123-")]
    process, folder = engine(*segments)
    assert all((SHM / name).exists() for name in segments) and os.listdir(folder)
    if who == "all":
        process.kill()
    elif who == "its own process":
        os.kill(process.pid, signal.SIGKILL)
    else:
        os.kill(parent_of(process.pid) or 0, signal.SIGKILL)
    assert process.wait(30)
    assert not Path(folder).exists()
    assert not [name for name in segments if (SHM / name).exists()]


def test_a_folder_of_the_users_own_stays(tmp_path: Path) -> None:
    process, folder = engine(environment={SOCKETS: str(tmp_path)})
    process.kill()
    assert process.wait(30)
    assert folder == str(tmp_path) and os.listdir(folder)


def test_where_a_sockets_name_would_be_too_long_vllm_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    process, folder = engine()
    process.kill()
    assert process.wait(30)
    assert folder == "" and not os.listdir(long)


def test_what_a_process_had_mapped_is_known_after_its_end(
    names: Callable[[str], str], mapper: Callable[..., subprocess.Popen[str]]
) -> None:
    segments, name = Segments(), names("vllm_dist_")
    process = mapper(name)
    segments.watch([process.pid])
    end(process)
    segments.watch([])
    segments.remove()
    assert not (SHM / name).exists()


def test_it_is_looked_at_again_as_it_changes(
    names: Callable[[str], str], mapper: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    looked: list[list[int]] = []
    segments = Segments()
    monkeypatch.setattr(segments, "look", lambda pids: looked.append(list(pids)))
    for now in range(100, 1000):
        segments.watch([1, 2] if now < 900 else [1])
    whole = [number for number, pids in enumerate(looked) if pids == [1, 2]]
    assert 5 < len(whole) < 12, "each time later than before"
    assert looked[len(whole)] == [1]


def test_nobody_elses_is_touched(
    names: Callable[[str], str], mapper: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_guard, "UNMAPPED_S", 0.0)
    before, shared, other, ours = names("psm_"), names("psm_"), names("raykv-0-"), names("psm_")
    (SHM / before).write_bytes(b"x")
    segments = Segments()
    process, outsider = mapper(before, shared, other, ours), mapper(shared)
    segments.look([process.pid])
    end(process)
    segments.remove()
    assert {name for name in (before, shared, other, ours) if (SHM / name).exists()} == {before, shared, other}
    end(outsider)
    segments.remove()
    assert {name for name in (before, shared, other) if (SHM / name).exists()} == {before, other}


def test_a_process_that_hangs_in_the_kernel_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_guard, "STUCK_S", 0.05)
    monkeypatch.setattr(engine_guard, "UNMAPPED_S", 0.0)
    hung, asked = threading.Event(), []

    def mapped(pid: int) -> set[tuple[str, int]]:
        asked.append(pid)
        hung.wait()
        return set()

    monkeypatch.setattr(engine_guard, "mapped", mapped)
    segments = Segments()
    for pid in (1, 2):
        segments.look([pid])
    segments.remove()
    assert asked == [1], "one thread hangs, not one more each time"
    hung.set()


def test_a_name_that_is_used_again_is_another_segment(
    names: Callable[[str], str], mapper: Callable[..., subprocess.Popen[str]]
) -> None:
    segments, name = Segments(), names("vllm_dist_")
    process = mapper(name)
    segments.look([process.pid])
    end(process)
    os.rename(SHM / name, SHM / names("kept"))  # keeps the inode, so that the next file has another one
    (SHM / name).write_bytes(b"the next engine's")
    segments.remove()
    assert (SHM / name).exists()
