"""An engine's desk while Ray's head is away: it goes on, and one that is lost meanwhile is back with the head."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from raykv.actors import cluster
from raykv.actors.processes import Pidfd
from tests.actors.test_head_loss import kill_head, raykv
from tests.actors.test_head_loss import started as started
from tests.support.linked_engine import LinkedEngine
from tests.support.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

PATIENCE = 90.0


def test_a_desk_outlives_the_head_and_a_lost_one_comes_back_with_it(started: dict[str, Any]) -> None:
    cluster.connect(started["address"])
    with LinkedEngine("headless", RAY_ADDRESS=started["address"]) as engine:
        engine.request("r0")
        eventually(lambda: engine.told() == ("r0",))
        desk = engine.desk()
        kill_head(started)
        engine.request("r1")
        eventually(lambda: desk.call("requests", timeout=PATIENCE) == ("r0", "r1"))
        info = desk.call("info", timeout=PATIENCE)
        process = Pidfd.open(info["pid"], info["started"])
        assert process is not None
        process.signal(signal.SIGKILL)
        assert process.wait(PATIENCE)
        engine.request("r2")
        assert raykv("restart-head")["restarted"] == ["gcs_server"]
        back = time.monotonic()
        eventually(lambda: engine.told() == ("r0", "r1", "r2"))
        print(f"with the head the desk was back after {time.monotonic() - back:.1f} s")
        assert engine.end() == {"alive": False}
