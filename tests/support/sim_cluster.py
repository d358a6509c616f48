"""A Ray cluster of several nodes on this machine: one raylet for each, Ray's own test utility, a folder of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


class SimCluster:
    """The head is node 0 and takes no engines unless it is given CPUs. Everything ends with `stop`."""

    def __init__(self, nodes: Sequence[Mapping[str, Any]], head_cpus: int = 0) -> None:
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
        self._before = {name: os.environ.get(name) for name in (*wanted, "RAY_ADDRESS")}
        os.environ.update(wanted)
        self.nodes: list[Any] = []
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

    def add(self, **node: Any) -> Any:
        """Another node; `num_cpus`, `labels`, `resources` as Ray takes them."""
        self.nodes.append(self._cluster.add_node(**node))
        return self.nodes[-1]

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
            for name, value in self._before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            shutil.rmtree(self.folder, ignore_errors=True)
