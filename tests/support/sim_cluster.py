"""A Ray cluster of several nodes on this machine: one raylet for each, Ray's own test utility, a folder of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from raykv.actors.processes import command_of, environment_of, pids
from tests.support.process import REPOSITORY

SETTINGS = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "100000",
    "RAY_worker_niceness": "0",
    # A node whose raylet was killed is known to be dead after about 2 s instead of 14.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
CLONE_NEWNS = 0x00020000


class SimCluster:
    """The head is node 0 and takes no engines unless it is given CPUs. Everything ends with `stop`."""

    def __init__(self, nodes: Sequence[Mapping[str, Any]], head_cpus: int = 0, durable: bool = False) -> None:
        """`durable`: the head keeps its state on the disk, so that it may be lost and come back."""
        from ray.cluster_utils import Cluster

        # Ray's socket paths lie below this folder and must stay under 108 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="rk", dir="/tmp"))
        wanted = {
            **SETTINGS,
            "RAY_TMPDIR": str(self.folder),
            "RAYKV_STATE_DIR": str(self.folder / "state"),
            "RAYKV_TEST_SESSION": str(os.getpid()),
            "PYTHONPATH": str(REPOSITORY),
        }
        if durable:
            wanted |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self.folder / "gcs")}
        self._before = {name: os.environ.get(name) for name in (*wanted, "RAY_ADDRESS")}
        os.environ.update(wanted)
        self.nodes: list[Any] = []
        self.disk = self.folder / "disk"
        """On each node that was added with `own_disk` another folder, as where each machine has its own disk."""
        self._threads: list[ThreadPoolExecutor] = []
        self._gcs: tuple[list[str], dict[str, str]] | None = None
        self._new_gcs: subprocess.Popen[bytes] | None = None
        try:
            self._cluster = Cluster(
                initialize_head=True,
                head_node_args={"num_cpus": head_cpus, "include_dashboard": False},
                shutdown_at_exit=True,
            )
            self.address = str(self._cluster.address)
            os.environ["RAY_ADDRESS"] = self.address
            for node in nodes:
                self.add(**node)
        except BaseException:
            self.stop()
            raise

    def add(self, own_disk: bool = False, **node: Any) -> Any:
        """Another node; `num_cpus`, `labels`, `resources` as Ray takes them. `own_disk` needs root."""
        if not own_disk:
            self.nodes.append(self._cluster.add_node(**node))
            return self.nodes[-1]
        # A raylet ends with the thread that started it (Ray asks the kernel for that), so the thread stays.
        self._threads.append(ThreadPoolExecutor(1))
        disk = self.folder / f"disk-{len(self._threads)}"
        self.nodes.append(self._threads[-1].submit(self._add_with_disk, disk, node).result())
        return self.nodes[-1]

    def _add_with_disk(self, disk: Path, node: Mapping[str, Any]) -> Any:
        """In a thread with mounts of its own, which all that it starts gets."""
        disk.mkdir()
        self.disk.mkdir(exist_ok=True)
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "a disk for each node needs mounts of its own, which only root may have")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "--bind", str(disk), str(self.disk)], check=True)
        # Ray sets a signal handler, as for the head before, which only the main thread may.
        with mock.patch("ray._private.utils.set_sigterm_handler"):
            return self._cluster.add_node(**node)

    def lose_head(self) -> None:
        """SIGKILL for the head's GCS; its raylet and all other nodes run on."""
        [found] = self._cluster.head_node.all_processes["gcs_server"]
        self._gcs = command_of(found.process.pid), environment_of(found.process.pid) or {}
        found.process.kill()
        found.process.wait()

    def restart_head(self) -> None:
        """The same GCS again, on its port, with its state (only if `durable`); does not wait until it answers."""
        assert self._gcs is not None, "it was not lost"
        command, environment = self._gcs
        port = f"--gcs_server_port={self.address.rpartition(':')[2]}"  # it had been told to choose one
        command = [port if part.startswith("--gcs_server_port=") else part for part in command]
        self._new_gcs = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)

    @property
    def head_raylet(self) -> int:
        """The process whose children are the workers on the head's node."""
        return int(self._cluster.head_node.all_processes["raylet"][0].process.pid)

    def kill(self, node: Any) -> None:
        """SIGKILL for its raylet and all that belongs to it."""
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def stop(self) -> None:
        with contextlib.suppress(Exception):
            from raykv.actors import cluster

            cluster.disconnect()
        try:
            with contextlib.suppress(AttributeError):
                self._cluster.shutdown()
        finally:
            if self._new_gcs is not None:
                self._new_gcs.kill()
                self._new_gcs.wait()
            for thread in self._threads:
                thread.shutdown()
            for name, value in self._before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            shutil.rmtree(self.folder, ignore_errors=True)


def router_replicas() -> list[int]:
    """The processes of the router, of this test's clusters."""
    mine = str(os.getpid())
    return [
        pid
        for pid in pids()
        if any("ServeReplica:raykv-router" in part for part in command_of(pid))
        and (environment_of(pid) or {}).get("RAYKV_TEST_SESSION") == mine
    ]
