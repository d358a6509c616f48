"""A killed owner: its lock is gone, and of what it wrote only whole blocks are recovered and verified."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from raykv.errors import StorageError
from raykv.storage.checksum import matches
from raykv.storage.disk_pool import DiskPool, aligned_buffer
from raykv.storage.host_pool import HostPool

WRITER = """
import random
import torch
from raykv.storage.checksum import checksum
from raykv.storage.{module} import {pool}
pool = {pool}.open({path!r}, {slots}, {nbytes})
dice = random.Random({seed})
print("open", flush=True)
while True:
    slot, fill = dice.randrange({slots}), dice.randrange(256)
    pool.headers.clear(slot)
    block = torch.full(({nbytes},), fill, dtype=torch.uint8)
    pool.{write}
    pool.headers.publish(slot, bytes([fill]) * 49, {nbytes}, checksum(block))
"""
WRITES = {"host": "slots[slot].copy_(block)", "disk": "write(slot, block)"}


@pytest.mark.process
@pytest.mark.parametrize("medium", ["host", "disk"])
def test_after_a_kill_the_lock_is_free_and_only_whole_blocks_are_good(medium: str, tmp_path: Path) -> None:
    path, slots, nbytes = str(tmp_path / "pool"), 8, 1 << 18
    names = {"host": ("host_pool", "HostPool"), "disk": ("disk_pool", "DiskPool")}[medium]
    open_pool = HostPool.open if medium == "host" else DiskPool.open
    found = 0
    for seed in range(2):
        code = WRITER.format(
            module=names[0],
            pool=names[1],
            path=path,
            slots=slots,
            nbytes=nbytes,
            seed=seed,
            stop=1,
            write=WRITES[medium],
        )
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"open\n"
        with pytest.raises(StorageError, match=f"process {child.pid}"):
            open_pool(path, slots, nbytes)
        threading.Event().wait(0.05 * (seed + 1))
        child.kill()
        child.wait()
        child.stdout.close()
        pool: Any = open_pool(path, slots, nbytes)
        for slot, key, size, expected, _ in pool.recovered:
            if medium == "host":
                block = pool.slots[slot]
            else:
                pool.read(slot, size, block := aligned_buffer(nbytes))
            assert matches(block, expected) and block.unique().tolist() == [key[0]]
            found += 1
        pool.close(remove=seed == 1)
        del block
    assert found > 0
