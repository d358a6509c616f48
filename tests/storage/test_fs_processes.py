"""Processes that share nothing but a directory: each reads what the others wrote, and a kill leaves whole files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raykv.storage.fs_header import HEADER_NBYTES, is_block, is_temp
from raykv.storage.fs_pool import FsPool
from raykv.storage.headers import Header, SlotState

pytestmark = pytest.mark.process

SLOT = 1 << 18
FILE = SLOT + HEADER_NBYTES

WRITER = f"""
import sys
import torch
from raykv.storage.fs_pool import FsPool
path, files, first, last = sys.argv[1], *map(int, sys.argv[2:])
pool = FsPool.open(path, files * {FILE}, {SLOT})
print("open", flush=True)
number = first
while number < last or last < 0:
    fill = number % 251
    key = bytes([fill]) * 16 + number.to_bytes(33, "big")
    pool.write(key, {SLOT}, None, torch.full(({SLOT},), fill).to(torch.uint8))
    number += 1
    if number == first + 8:
        print("some", flush=True)
pool.close()
"""


def key(number: int) -> bytes:
    return bytes([number % 251]) * 16 + number.to_bytes(33, "big")


def served(pool: FsPool, number: int) -> bool:
    out = torch.zeros(SLOT, dtype=torch.uint8)
    good = pool.read(Header(SlotState.READY, key(number), SLOT), out)
    assert not good or out.unique().tolist() == [number % 251]
    return good


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    tmp_path.chmod(0o700)
    yield tmp_path


def start(folder: Path, files: int, first: int, last: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), *map(str, (files, first, last))], stdout=subprocess.PIPE
    )


def line(child: subprocess.Popen[bytes]) -> bytes:
    assert child.stdout is not None
    return child.stdout.readline()


def test_a_fleet_of_processes_shares_blocks_and_keeps_one_limit(folder: Path) -> None:
    files, each, nodes = 130, 100, 2
    children = [start(folder, files, node * each, node * each + each) for node in range(nodes)]
    peak = 0
    while any(child.poll() is None for child in children):
        time.sleep(0.01)
        peak = max(peak, sum(is_block(path.name) for path in folder.rglob("*")))
    for child in children:
        assert child.wait() == 0
        assert child.stdout is not None
        child.stdout.close()
    pool = FsPool.open(str(folder), files * FILE, SLOT)
    found = [number for number in range(nodes * each) if served(pool, number)]
    pool.close()
    assert len(found) == sum(is_block(path.name) for path in folder.rglob("*")) <= files
    assert len(found) >= 0.9 * files and peak <= files + nodes


def test_after_a_kill_what_is_there_is_whole_and_leftovers_go(folder: Path) -> None:
    files, leftovers = 40, 0
    for life in range(2):
        child = start(folder, files, life * 10_000, -1)
        assert line(child) == b"open\n" and line(child) == b"some\n"
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    names = [path for path in folder.rglob("*") if is_block(path.name)]
    assert names
    pool = FsPool.open(str(folder), files * FILE, SLOT, sweep_s=3600)
    for path in names:
        assert path.stat().st_size == FILE and served(pool, int(path.name[32:], 16))
    for path in [path for path in folder.rglob(".*") if is_temp(path.name)]:
        leftovers += 1
        os.utime(path, (0, 1))
    pool.write(key(1), SLOT, None, torch.full((SLOT,), 1, dtype=torch.uint8))
    assert pool._folder is not None and pool._folder.folders == 1
    assert pool.counts["leftovers"] == leftovers
    assert not [path for path in folder.rglob(".*") if is_temp(path.name)]
    assert sum(path.stat().st_size for path in folder.rglob("*") if is_block(path.name)) <= files * FILE
    pool.close()
