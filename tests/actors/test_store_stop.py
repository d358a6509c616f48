"""`raykv stop` ends the stores of its cluster and gives their memory back; disk tiers stay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from raykv.actors import cluster, store_files, store_handle
from raykv.actors.processes import Pidfd
from raykv.actors.store_worker_link import StoreWorkerLink
from raykv.store_messages import Medium, StoreSpec, TierSpec
from tests.actors.test_head_loss import raykv, started
from tests.support.kv_rank import KVRank

pytestmark = pytest.mark.ray
__all__ = ["started"]


def test_stop_ends_the_stores(started: dict[str, Any], tmp_path: Path) -> None:
    cluster.connect(started["address"])
    disk = tmp_path / "disk"
    tiers = (TierSpec(Medium.HOST, 1 << 20), TierSpec(Medium.DISK, 1 << 20, str(disk)))
    spec = StoreSpec(f"stop{os.getpid()}", tiers)
    rank = KVRank()
    link = StoreWorkerLink(lambda: store_handle.open_store(spec), rank.attach, 60, 60)
    attached = link.start(60)
    process = Pidfd.open(attached.pid, attached.started)
    host = store_files.host_path("raykv", spec.name)
    assert process is not None and host.exists()
    link.close()
    rank.close()
    cluster.disconnect()
    said = raykv("stop")
    assert said["stores"] == [store_handle.store_name(spec.name, said["stores"][0].rpartition("-")[2])]
    assert process.wait(0) and not host.exists()
    assert (disk / "raykv.slots").exists()
