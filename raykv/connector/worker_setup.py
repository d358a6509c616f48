"""What the worker half needs once, at start-up: the exported KV cache, and the host of each child."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import cloudpickle
import torch

from raykv.actors.child_link import ChildLink
from raykv.actors.hosted_process import HostedProcess, HostLauncher
from raykv.actors.link_parts import LinkOptions
from raykv.config import MAX_RETRY_S, ChildConfig
from raykv.connector import vllm_compat
from raykv.connector.host_runtime import CacheHandles, HostSetup
from raykv.connector.metadata import load
from raykv.kvcache.cuda_ipc import device_uuid, exportable_pool_context
from raykv.kvcache.fence import new_fence
from raykv.kvcache.share import export_kv_caches
from raykv.messages import StepRecord
from raykv.types import Incarnation, Rank

logger = logging.getLogger("raykv")

FACTORY = "raykv.connector.host_runtime:build"
PASSED_ON = ("VLLM_", "LMCACHE_", "UCX_", "NIXL_", "MOONCAKE_", "HF_", "RAYKV_", "PYTHONHASHSEED", "PYTHONPATH")
"""Environment that a child expects of its process, by prefix."""
SERIALS = 1000
"""Hosts of a child that are started while another child is not added: their names must not meet."""
TRY_AGAIN_S = 1.0
NOT_PASSED_ON = ("RAYKV_OWNER", "RAYKV_LAUNCH_ID")


class KVCacheExport:
    """The worker's KV cache as other processes of the node see it."""

    def __init__(self, kv_caches: Mapping[str, Any]) -> None:
        self._shared = export_kv_caches(kv_caches)
        first = next(iter(kv_caches.values()))
        self.device: torch.device = (first if isinstance(first, torch.Tensor) else first[0]).device
        self._fence = new_fence(self.device)
        self.handles = cloudpickle.dumps(CacheHandles(self._shared.handle, self._fence.handle))

    @staticmethod
    def pool_context() -> AbstractContextManager[Any] | None:
        return exportable_pool_context()

    def forward_done(self) -> None:
        """The step's forward pass was launched: hosts wait for it before they read."""
        self._fence.record()

    def close(self) -> None:
        self._shared.close()


class HostedChild:
    """One hosted child on one rank: starts its hosts, with one setup for each incarnation."""

    def __init__(
        self,
        config: ChildConfig,
        rank: Rank,
        vllm_config: Any,
        kv_cache_config: Any,
        namespace: str,
        engine_id: str,
        first: Incarnation | None = None,
    ) -> None:
        """`first`: the first incarnation, of a child that is added to a running engine."""
        options = config.options
        self._first = first or Incarnation(0)
        self._host: HostedProcess | None = None
        self.index = config.index
        self.handshake: bytes | None = None
        self._config = config
        self._rank = rank
        self._engine_id = config.engine_id or engine_id
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._caches = b""
        self._device = "cpu"
        self._link: ChildLink | None = None
        self._launcher = HostLauncher(
            engine_id=engine_id,
            child=str(config.name),
            rank=rank,
            namespace=namespace,
            factory=FACTORY,
            env=_environment(),
            cuda_uuid=device_uuid(torch.device("cuda", torch.cuda.current_device()))
            if vllm_compat.device_type() == "cuda"
            else None,
            startup_timeout_s=options.startup_timeout_s,
            warm_spare=options.warm_spare,
            first_serial=self._first * SERIALS,
        )
        self._launcher.prelaunch()

    def connect(self, export: KVCacheExport) -> ChildLink:
        """Start the first host and the link in front of it; blocks."""
        options = self._config.options
        self._caches, self._device = export.handles, str(export.device)
        self._link = ChildLink(
            name=str(self._config.name),
            child=self.index,
            rank=self._rank,
            options=LinkOptions(
                timeout_s=options.timeout_s,
                load_timeout_s=options.load_timeout_s,
                max_faults=options.max_faults,
                fault_window_s=options.fault_window_s,
                retry_s=options.retry_s,
                max_retry_s=MAX_RETRY_S,
            ),
            start_host=self._start,
            after_death=self._after_death,
        )
        self._link.incarnation = self._first
        self._link.start(self._start(self._first))
        return self._link

    def _start(self, incarnation: Incarnation) -> HostedProcess:
        setup = HostSetup(
            child=self._config,
            vllm_config=vllm_compat.portable_vllm_config(self._vllm_config),
            kv_cache_config=self._kv_cache_config,
            engine_id=incarnation_engine_id(self._engine_id, incarnation),
            rank=self._rank,
            incarnation=incarnation,
            groups=dict(vllm_compat.parallel_ranks()),
            backends=vllm_compat.attention_backends(self._vllm_config),
            device=self._device,
        )
        host, self.handshake = self._launcher.start(cloudpickle.dumps(setup), self._caches)
        self._host = host
        return host

    def _after_death(self, records: Sequence[StepRecord]) -> None:
        metas = [load(record.meta) for record in records if record.meta]
        removed = vllm_compat.remove_half_saved(self._config, metas)
        if removed:
            logger.info("child %s: removed %d half-written folders", self._config.name, removed)

    def retire(self, incarnation: Incarnation) -> None:
        """Have the host of this incarnation end: the link then starts a new one."""
        if self._link is not None:
            self._link.retire(incarnation)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        with contextlib.suppress(Exception):
            self._launcher.close()

    def end(self) -> None:
        """Take the child out of a running engine: its hosts shut down. Returns when none of them lives any more, which
        is confirmed and tried for ever; so it blocks, seconds as a rule, and any thread may call it."""
        try:
            self.close()
        except Exception:
            logger.exception("child %s: shutting its host down", self._config.name)
        host = self._host
        while host is not None and host.alive():
            try:
                host.kill()
            except Exception:
                logger.exception("child %s: its host (pid %s) could not be killed", self._config.name, host.pid)
                time.sleep(TRY_AGAIN_S)


def incarnation_engine_id(engine_id: str, incarnation: Incarnation) -> str:
    """Peers cache what they know of an engine by its id, so a child that was rebuilt has a new one."""
    return engine_id if incarnation == 0 else f"{engine_id}.{incarnation}"


def _environment() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if name.startswith(PASSED_ON) and name not in NOT_PASSED_ON
    }
