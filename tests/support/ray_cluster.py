"""A Ray of the caller's own, started by RayKV's own commands: a head on loopback with free ports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.process import forget_session, free_ports, watch_session


class RayCluster:
    """Runs from construction to `stop`. `address` is what RAY_ADDRESS should be, `env` what engines need.

    RayKV keeps one cluster per state folder. This one has a folder of its own, so that a cluster of the user's is
    neither used nor ended.
    """

    def __init__(self, num_cpus: int = 8, dashboard: bool = False) -> None:
        from raykv.actors import local_cluster

        # Ray's socket paths lie below this folder and must stay under 108 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="rk", dir="/tmp"))
        port, dashboard_port = free_ports(2)
        options = local_cluster.StartOptions(
            port=port,
            num_cpus=num_cpus,
            object_store_memory=100 << 20,
            temp_dir=str(self.folder / "ray"),
            dashboard=dashboard,
            dashboard_port=dashboard_port,
        )
        self._before = {name: os.environ.get(name) for name in ("RAYKV_STATE_DIR", "RAY_ADDRESS")}
        os.environ["RAYKV_STATE_DIR"] = str(self.folder / "state")
        try:
            self.record, _ = local_cluster.start(options)
        except BaseException:
            self._clean()
            raise
        for session in self.record.sessions:
            watch_session(session)
        self.address = self.record.address
        os.environ["RAY_ADDRESS"] = self.address
        self.env = {"RAY_ADDRESS": self.address, "RAY_gcs_rpc_server_reconnect_timeout_s": "100000"}

    def stop(self) -> None:
        from raykv.actors import local_cluster

        try:
            # In a process of its own: it joins the cluster, to end the stores in order.
            subprocess.run([sys.executable, "-m", "raykv.cli", "stop", "--grace", "5"], stdout=subprocess.DEVNULL)
            local_cluster.stop(grace=5)
            for session in self.record.sessions:
                forget_session(session)
        finally:
            self._clean()

    def _clean(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(self.folder, ignore_errors=True)
