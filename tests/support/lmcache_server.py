"""A real `lmcache server` on loopback, for LMCacheMPConnector."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.process import ProcessGroup, free_ports, tail

START_TIMEOUT_S = 120.0  # 10 to 20 s on two cores


class LMCacheServer:
    """Starts at once; `wait_ready` or `with` waits until it answers. Ends with its whole process group."""

    def __init__(self, port: int | None = None, chunk_size: int = 128, size_gb: int = 1) -> None:
        request_port, http_port = free_ports(2)
        self.port = port or request_port
        self.http_port = http_port
        self.chunk_size = chunk_size
        options = {
            "--host": "127.0.0.1",
            "--port": self.port,
            "--http-host": "127.0.0.1",
            "--http-port": http_port,
            "--chunk-size": chunk_size,
            "--l1-size-gb": size_gb,
            "--l1-init-size-gb": size_gb,
            "--eviction-policy": "LRU",
            # without it the server refuses an engine on a CPU
            "--supported-transfer-mode": "auto",
        }
        arguments = [str(word) for pair in options.items() for word in pair]
        environment = {
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
        }
        # Without --disable-observability it binds a fixed port for its metrics.
        command = [str(Path(sys.executable).with_name("lmcache")), "server", *arguments]
        self.group = ProcessGroup("lmcache", [*command, "--disable-observability"], environment)

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> float:
        """Seconds waited. Raises with the end of its log if it does not come up."""
        begun = time.monotonic()
        while time.monotonic() - begun < timeout_s:
            if not self.group.alive:
                break
            try:
                self._get("healthcheck")
                return time.monotonic() - begun
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        log = tail(self.group.log)
        self.stop()
        raise RuntimeError(f"lmcache server did not come up on port {self.port}\n{log}")

    def __enter__(self) -> LMCacheServer:
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.group.kill()

    def child(self, **raykv: Any) -> dict[str, Any]:
        """The connector config that uses this server; `raykv` are RayKV's own options of the child."""
        extra: dict[str, Any] = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.port}
        if raykv:
            extra["raykv"] = raykv
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    def status(self) -> dict[str, Any]:
        """The server's own view: what it stores and who is connected."""
        return json.loads(self._get("status"))

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/{path}", timeout=2) as answer:
            return answer.read()
