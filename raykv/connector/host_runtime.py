"""Runs vLLM's side of a child inside a `ConnectorHost`: the hooks of a step, in vLLM's order."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from raykv.config import ChildConfig
from raykv.connector import standins, vllm_compat
from raykv.connector.metadata import ChildWorkerOutput, dump, load
from raykv.core.owed_sends import OwedSends
from raykv.errors import HostedConnectorError
from raykv.kvcache.fence import MappedFence, open_fence
from raykv.kvcache.handles import CacheHandles
from raykv.kvcache.share import MappedKVCache, open_kv_caches
from raykv.messages import HookFault, HostReport, Phase, StepRecord
from raykv.types import Incarnation, Rank, RequestId, StepId

logger = logging.getLogger("raykv")


@dataclass(frozen=True)
class HostSetup:
    """All that a host needs to build its child: pickled in the worker, for this engine's own host only."""

    child: ChildConfig
    vllm_config: VllmConfig
    kv_cache_config: Any
    engine_id: str
    rank: Rank
    incarnation: Incarnation
    groups: dict[str, tuple[int, tuple[int, ...]]]
    backends: dict[str, str]
    device: str


def build(setup: bytes) -> HostedRuntime:
    """The factory that a ConnectorHost imports."""
    return HostedRuntime(cloudpickle.loads(setup))


class HostedRuntime:
    """One child's worker half outside vLLM's worker. One thread: the host's hooks thread."""

    def __init__(self, setup: HostSetup) -> None:
        from vllm.platforms import current_platform
        from vllm.plugins import load_general_plugins

        self.child = str(setup.child.name)
        self.rank = setup.rank
        self.incarnation = setup.incarnation
        self._setup = setup
        load_general_plugins()
        if setup.device.startswith("cuda"):
            current_platform.set_device(0)  # the host sees one GPU only
        standins.install_groups(setup.groups)
        config = vllm_compat.child_vllm_config(setup.vllm_config, setup.child, setup.engine_id)
        config.compilation_config.static_forward_context = {
            name: standins.LayerStandIn(None, path) for name, path in setup.backends.items()
        }
        # For the life of the process: connectors look the config up in their hooks as well.
        self._config_scope = set_current_vllm_config(config)
        self._config_scope.__enter__()
        cls = vllm_compat.connector_class(setup.child)
        self._connector: KVConnectorBase_V1 = cls(config, KVConnectorRole.WORKER, setup.kv_cache_config)
        self._settles_in_hook = vllm_compat.settles_in_hook(setup.child)
        self._mapped: MappedKVCache | None = None
        self._fence: MappedFence | None = None
        self._mla_layers = vllm_compat.mla_layers(setup.kv_cache_config)
        self._bound = False
        self._owed = OwedSends(vllm_compat.pulled_by_peers(setup.child))
        self._last_step = StepId(-1)

    def register(self, caches: bytes) -> bytes | None:
        handles: CacheHandles = cloudpickle.loads(caches)
        self._mapped = open_kv_caches(handles.caches)
        self._fence = open_fence(handles.fence)
        self._connector.register_kv_caches(self._mapped.kv_caches)
        self._connector.set_host_xfer_buffer_ops(vllm_compat.copy_kv_blocks())
        refusal = vllm_compat.silent_refusal(self._connector)
        if refusal is not None:
            raise HostedConnectorError(f"it can do nothing here: {refusal}")
        handshake = self._connector.get_handshake_metadata()
        return None if handshake is None else dump(handshake)

    # -- a step ---------------------------------------------------------------------------------------------

    def run(self, record: StepRecord, report: HostReport, tick: Callable[[], None]) -> None:
        """Hooks of a step in vLLM's order; the first one that raises ends the step (see `HookFault`)."""
        connector = self._connector
        assert self._mapped is not None and self._fence is not None

        def hook(name: str, call: Callable[[], Any], moves_data: bool = True) -> bool:
            try:
                call()
            except Exception as error:
                logger.warning("child %s raised in %s: %s", self.child, name, error, exc_info=True)
                unsettled = moves_data and not self._settles_in_hook
                report.faults.append(HookFault(name, _short(error), unsettled))
                return False
            finally:
                tick()
            return True

        self._last_step = record.step
        self._owed.owe(record.owed)
        context = standins.forward_context(self._mapped.kv_caches, self._mla_layers, record.forward)
        fine = True
        if record.phase is not Phase.SAVE:
            meta = load(record.meta)
            fine = hook("handle_preemptions", lambda: connector.handle_preemptions(meta))
            connector.bind_connector_metadata(meta)
            self._bound = True
        save = self._setup.child.saves and not record.skip_saves
        if record.phase is not Phase.LOAD and fine and record.forward and save:
            self._fence.wait()
            fine = self._save_layers(context, hook)
        if record.phase is not Phase.SAVE and fine:
            fine = hook("start_load_kv", lambda: connector.start_load_kv(context))
        if record.phase is Phase.LOAD and fine:
            for layer in self._mapped.kv_caches:
                fine = fine and hook("wait_for_layer_load", partial(connector.wait_for_layer_load, layer))
            self._synchronize()
        if record.phase is not Phase.LOAD:
            if fine and save:
                hook("wait_for_save", connector.wait_for_save)
            self._collect(report, set(record.finished))
            if self._bound:
                connector.clear_connector_metadata()
                self._bound = False
        else:
            hook("get_block_ids_with_load_errors", lambda: self._load_errors(report), moves_data=False)

    def _save_layers(self, context: Any, hook: Callable[..., bool]) -> bool:
        assert self._mapped is not None
        for name, cache in self._mapped.kv_caches.items():
            metadata = context.attn_metadata[name]
            if not hook(
                "save_kv_layer",
                lambda n=name, c=cache, m=metadata: self._connector.save_kv_layer(n, c, m),
            ):
                return False
        return True

    def _synchronize(self) -> None:
        """A synchronous load's copies must be in memory before the forward pass of another process starts."""
        if self._setup.device.startswith("cuda"):
            import torch

            torch.cuda.synchronize()

    # -- completions ----------------------------------------------------------------------------------------

    def poll(self, report: HostReport) -> bool:
        before = len(report.sending) + len(report.receiving) + len(report.faults)
        self._collect(report, set())
        return len(report.sending) + len(report.receiving) + len(report.faults) > before

    def _load_errors(self, report: HostReport) -> None:
        report.invalid_blocks |= self._connector.get_block_ids_with_load_errors()

    def _collect(self, report: HostReport, finished: set[str]) -> None:
        """The hooks after a forward pass that report; they move no data, so a fault here is only counted."""
        connector = self._connector
        output = ChildWorkerOutput(step=self._last_step)

        def results() -> None:
            found = connector.get_transfer_results(finished)
            asked, unasked = self._owed.done(map(RequestId, found.finished_sending))
            report.sending |= asked
            report.unasked |= unasked
            report.receiving |= found.finished_recving
            report.failed |= found.failed_recving

        def statistics() -> None:
            stats = connector.get_kv_connector_stats()
            output.stats = None if stats is None or stats.is_empty() else stats

        def events() -> None:
            output.kv_events = connector.get_kv_connector_kv_cache_events()

        def worker_meta() -> None:
            output.worker_meta = connector.build_connector_worker_meta()

        for name, call in (
            ("get_transfer_results", results),
            ("get_block_ids_with_load_errors", lambda: self._load_errors(report)),
            ("get_kv_connector_stats", statistics),
            ("get_kv_connector_kv_cache_events", events),
            ("build_connector_worker_meta", worker_meta),
        ):
            try:
                call()
            except Exception as error:
                logger.warning("child %s raised in %s: %s", self.child, name, error, exc_info=True)
                report.faults.append(HookFault(name, _short(error), unsettled=False))
        if not output.is_empty:
            report.objects.append(dump(output))

    def close(self) -> None:
        self._connector.shutdown()
        if self._mapped is not None:
            self._mapped.close()


def _short(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()[:500]
