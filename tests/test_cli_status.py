"""`raykv status`: what it says of stores and of the Directory. The cluster is faked at RayKV's edge to Ray."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from raykv.actors import cluster, controller_handle, directory_handle, handles, observer, ray_calls
from raykv.cli import main
from raykv.directory_messages import DirectoryStatus, HolderStatus
from raykv.errors import HostTimeout
from raykv.store_messages import Medium, StoreStatus, TierStatus
from raykv.types import EngineId, StoreLife

NODE = "a1" * 14
LIFE = StoreLife("1.2.x")
STORE = f"raykv-store-default-{NODE[:12]}"
CHILD = "raykv-host-e-NixlConnector-0-1"
DIRECTORY = directory_handle.NAME


def store(*tiers: TierStatus) -> StoreStatus:
    figures = dict.fromkeys(
        ("leases", "look_ups", "hit_blocks", "missed_blocks", "saved_blocks", "skipped_blocks", "loaded_blocks"), 0
    )
    return StoreStatus(LIFE, "default", 7, tiers, (EngineId("e"),), **figures)


def tier(medium: Medium, used: int, **more: Any) -> TierStatus:
    path = None if medium is Medium.HOST else "/folder"
    return TierStatus(medium, path, 4096, 5000, used, 0, 0, 3, 11, more.pop("bad_reads", 0), **more)


def directory(*whole: bool) -> DirectoryStatus:
    holders = tuple(HolderStatus(f"n{i}", "s", LIFE, 9, told, 0.1) for i, told in enumerate(whole))
    return DirectoryStatus("life", 8, 1234567, 92_000_000, len(whole), holders, 1, 0, 2, 0, 0, 3, 4, 5)


class Cluster:
    """Actors by name: what each answers when asked for its status, or raises; or that it is gone by then (None)."""

    def __init__(self) -> None:
        self.actors: dict[str, Any] = {}

    def find(self, name: str, namespace: str) -> Any:
        answer = self.actors[name]
        if answer is None:
            return None

        def call(method: str, timeout: float) -> Any:
            if method == "info":
                return {"pid": 7, "node_id": NODE}
            if isinstance(answer, Exception):
                raise answer
            return answer

        return SimpleNamespace(call=call)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    node = {"node_id": NODE, "host": "left", "ip": "10.0.0.1", "alive": True, "resources": {"CPU": 2.0}}
    monkeypatch.setattr(cluster, "connect", lambda *_, **__: SimpleNamespace(address="10.0.0.1:6379"))
    monkeypatch.setattr(cluster, "disconnect", lambda: None)
    monkeypatch.setattr(cluster, "nodes", lambda: [node])
    monkeypatch.setattr(controller_handle, "find", lambda namespace: None)
    monkeypatch.setattr(ray_calls, "names", lambda namespace: list(made.actors))
    monkeypatch.setattr(handles, "find", made.find)
    return made


def status(*options: str) -> str:
    done = CliRunner().invoke(main, ["status", *options], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def lines(output: str, word: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if word in line]


def notes(output: str) -> list[str]:
    """What is said of the store below its table."""
    start = "store default on a1a1a1a1"
    return [line.partition(": ")[2] for line in output.splitlines() if line.startswith(start)]


def seen() -> dict[str, Any]:
    return json.loads(status("--json"))


@pytest.mark.usefixtures("there")
def test_a_cluster_without_any() -> None:
    assert "Directory" not in status() and "No actors of RayKV" in status()
    said = seen()
    assert said["directory"] is None and said["stores"] == said["hosts"] == []


def test_the_directory(there: Cluster) -> None:
    there.actors[DIRECTORY] = directory(True, False, False)
    [line] = lines(status(), "Directory")
    assert " ".join(line) == (
        "Directory: 1,234,567 blocks on 3 nodes, 3 stores, 92.0 MB (pid 7), 2 stores still to tell all"
    )
    said = seen()
    assert said["directory"]["figures"]["keys"] == 1234567 and said["directory"]["state"] == "directory"
    assert said["hosts"] == []
    there.actors[DIRECTORY] = directory(True)
    [line] = lines(status(), "Directory")
    assert " ".join(line).endswith("on 1 node, 1 store, 92.0 MB (pid 7)")


@pytest.mark.parametrize(("answer", "says"), [(HostTimeout("it hangs"), "no answer: it hangs"), (None, "gone")])
def test_a_directory_and_a_store_that_do_not_answer(there: Cluster, answer: Any, says: str) -> None:
    there.actors = {DIRECTORY: answer, STORE: answer}
    output = status()
    assert f"Directory: {says}\n" in output
    assert notes(output) == [says]
    assert "figures" not in seen()["directory"]


def test_a_store_by_tier(there: Cluster) -> None:
    there.actors = {
        STORE: store(
            tier(Medium.HOST, 1234), tier(Medium.DISK, 5, off="the disk is [full]"), tier(Medium.FS, 6, bad_reads=2)
        ),
        CHILD: SimpleNamespace(child="NixlConnector", rank=0, incarnation=1, registered=True),
    }
    output = status()
    assert [" ".join(line) for line in lines(output, "5,000")] == [
        "default a1a1a1a1 left host 1,234 5,000 11 3",
        "default a1a1a1a1 left disk 5 5,000 11 3",
        "default a1a1a1a1 left fs 6 5,000 11 3",
    ]
    assert notes(output) == ["disk is off: the disk is [full]", "fs: 2 bad blocks, each a miss"]
    said = seen()
    assert [row["name"] for row in said["hosts"]] == [CHILD] and lines(output, "NixlConnector")
    assert [row["name"] for row in said["stores"]] == [STORE]
    assert [one["medium"] for one in said["stores"][0]["figures"]["tiers"]] == ["host", "disk", "fs"]


def test_a_store_that_no_engine_has_used(there: Cluster) -> None:
    there.actors[STORE] = store()
    assert notes(status()) == ["no engine has opened its tiers yet"]


def test_what_a_store_lent_and_read(there: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    there.actors[STORE] = store(tier(Medium.HOST, 1))
    assert notes(status()) == []
    peer = {"lent_blocks": 2500, "lent_now": 12, "read_blocks": 40, "bad_blocks": 0}
    with_peer = {**dataclasses.asdict(there.actors[STORE]), "peer": peer}
    monkeypatch.setattr(observer, "_figures", lambda _: with_peer)
    assert notes(status()) == ["peer: lent 2,500 blocks to other nodes (12 now), read 40 from them"]
    peer["bad_blocks"] = 1
    assert notes(status())[0].endswith("read 40 from them; 1 bad block not used")


def test_a_store_that_is_drained(there: Cluster) -> None:
    there.actors[STORE] = dataclasses.replace(store(tier(Medium.HOST, 1)), drain="3 blocks moved, 1 left")
    assert notes(status()) == ["drained: 3 blocks moved, 1 left"]


def test_an_actor_of_another_raykv(there: Cluster) -> None:
    there.actors = {DIRECTORY: {"keys": 3}, STORE: SimpleNamespace(name="default")}
    output = status()
    assert "Directory: it runs another RayKV\n" in output and notes(output) == ["it runs another RayKV"]
