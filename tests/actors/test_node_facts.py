"""What a node says about itself, and which raylet of a machine a process joins."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from raykv.actors import node_facts, own_node
from raykv.actors.ports import free_port, free_ports_in_a_row, is_free


def test_a_folder_that_is_not_there_has_the_room_of_its_disk(tmp_path: Path) -> None:
    facts = node_facts.probe([str(tmp_path / "not" / "yet")], None)
    stat = os.statvfs(tmp_path)
    assert facts.disks[str(tmp_path / "not" / "yet")] == pytest.approx(stat.f_frsize * stat.f_bavail, rel=0.1)


def test_what_a_store_has_written_already_counts_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pool").write_bytes(b"x" * (1 << 20))
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_frsize=4096, f_bavail=0, f_blocks=1))
    assert node_facts.probe([str(tmp_path)], None).disks[str(tmp_path)] >= 1 << 20


def test_the_smallest_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shm = os.statvfs(node_facts.SHM)
    assert 0 < node_facts.store_memory() <= shm.f_frsize * shm.f_blocks
    limit = tmp_path / "memory.max"
    limit.write_text("1048576\n")
    monkeypatch.setattr(node_facts, "CGROUP_LIMITS", (str(limit), str(tmp_path / "none")))
    assert node_facts.store_memory() == 1 << 20
    limit.write_text("max\n")
    assert node_facts.store_memory() > 1 << 20
    assert 0 < node_facts.free_memory() <= node_facts.store_memory()


def test_a_model_is_looked_for_by_its_path_only(tmp_path: Path) -> None:
    assert node_facts.probe([], str(tmp_path)).model is True
    assert node_facts.probe([], str(tmp_path / "none")).model is False
    assert node_facts.probe([], None).model is None


def test_ports() -> None:
    import socket

    port = free_port("127.0.0.1")
    assert is_free("127.0.0.1", port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert not is_free("127.0.0.1", port)
    first = free_ports_in_a_row("127.0.0.1", 4)
    assert all(is_free("127.0.0.1", first + offset) for offset in range(4))


def test_a_process_joins_the_node_that_its_engine_names(monkeypatch: pytest.MonkeyPatch) -> None:
    services = SimpleNamespace(find_node_ids=lambda: ["a", "b"])
    with own_node.joined(services):
        assert services.find_node_ids() == ["a", "b"]
    monkeypatch.setenv(own_node.NODE_VARIABLE, "b")
    with own_node.joined(services):
        assert services.find_node_ids() == ["b"]
    monkeypatch.setenv(own_node.NODE_VARIABLE, "gone")  # of another cluster, or not up yet
    with own_node.joined(services):
        assert services.find_node_ids() == ["a", "b"]
    assert services.find_node_ids() == ["a", "b"]
