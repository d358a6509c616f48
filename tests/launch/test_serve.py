"""`raykv serve`: what it runs, what it refuses, and that Ctrl-C leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from raykv.actors import node_facts
from raykv.config import parse
from raykv.config.tiers import parse_tiers
from raykv.errors import ConfigError
from raykv.launch import serve
from tests.support.process import REPOSITORY, ProcessGroup, free_ports

pytestmark = pytest.mark.process


def test_the_config_is_one_that_raykv_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_facts, "free_memory", lambda: 10 << 30)
    plan = serve.plan("org/model", ["--max-model-len", "64"], None, "/nvme/kv=2GiB")
    [child] = parse(plan.config).children
    tiers = parse_tiers(child.extra).store.tiers
    assert [(tier.medium, tier.capacity, tier.path) for tier in tiers] == [
        ("host", (10 << 30) // 4, None),
        ("disk", 2 << 30, "/nvme/kv"),
    ]
    assert plan.arguments == ("--max-model-len", "64", "--host", "127.0.0.1")
    assert "--host" in serve.plan("m", ["--host=0.0.0.0"], "1GiB", None).arguments[0]
    assert len(serve.plan("m", ["--host=0.0.0.0"], "1GiB", None).arguments) == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("./no/such/model", [], None, None), "The model ./no/such/model does not exist"),
        (("m", ["--kv-transfer-config={}"], None, None), "is what `raykv serve` sets"),
        (("m", [], "4PiB", None), "this machine has"),
        (("m", [], "many", None), "--host-tier"),
        (("m", [], None, "2GiB"), "--disk-tier is '2GiB'"),
        (("m", [], None, "/x=lots"), "capacity"),
    ],
)
def test_what_can_not_be_is_said_before_anything_starts(arguments: tuple[Any, ...], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        serve.plan(*arguments)


def test_kv_config_prints_json_for_vllm_serve() -> None:
    command = [sys.executable, "-m", "raykv.cli", "serve", "m", "--kv-config", "--host-tier", "1GiB", "--seed", "3"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert parse(json.loads(done.stdout)).children[0].connector == "TierConnector"


STUB = """
import sys
from raykv.actors.local_cluster import StartOptions
from raykv.launch import serve
serve.VLLM = (sys.executable, "-S", sys.argv[1])
serve.ray_processes = lambda: []  # other clusters on this machine are other tests'
serve.OWN_RAY = StartOptions(port=int(sys.argv[2]), temp_dir=sys.argv[3], dashboard=False, object_store_memory=1 << 27)
from raykv.cli import main
main(sys.argv[4:])
"""


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fails", [False, True])
def test_it_starts_a_ray_and_leaves_nothing(tmp_path: Path, fails: bool) -> None:
    fake = Path(__file__).resolve().parents[1] / "support" / "fake_vllm.py"
    folder = Path("/tmp") / f"rk-serve-{os.getpid()}"
    env = {
        "RAYKV_STATE_DIR": str(tmp_path / "state"),
        "RAY_ADDRESS": "",
        "PYTHONPATH": str(REPOSITORY),
    }
    port, ray_port = free_ports(2)
    # `vllm serve MODEL`: the fake takes "serve" for the model and passes the rest over.
    options = ["serve", "m", "--host-tier", "64MiB", "--port", str(port), *(["--fail", "bad option"] if fails else [])]
    group = ProcessGroup("serve", [sys.executable, "-c", STUB, str(fake), str(ray_port), str(folder), *options], env)
    try:
        if not fails:
            deadline = time.monotonic() + 120
            while "\nready\n" not in group.log.read_text():
                assert group.alive and time.monotonic() < deadline, group.log.read_text()
                time.sleep(0.2)
            os.kill(group.pid, signal.SIGINT)
        assert group.wait(120), group.log.read_text()
        text = group.log.read_text()
        assert ("bad option" in text and "ended with status 3" in text) if fails else "ending the engine" in text
        assert "ending Ray" in text
        assert group.members() == []
        assert not raylets_below(folder)
    finally:
        group.kill()
        subprocess.run(["rm", "-rf", str(folder)], check=False)


def raylets_below(folder: Path) -> list[int]:
    from raykv.actors.processes import ray_processes

    return [process.pid for process in ray_processes() if str(folder) in " ".join(process.args.values())]
