"""Everything between a config that was checked and a running connector: the two halves, then recovery."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from raykv.actors import cluster
from raykv.actors.host_watch import RayHostWatch
from raykv.config import ChildConfig, MultiConfig, RunMode
from raykv.connector import vllm_compat
from raykv.connector.inline_child import InlineChild
from raykv.connector.metadata import RayMultiHandshake
from raykv.connector.scheduler_child import SchedulerChild
from raykv.connector.supervisor import Supervisor
from raykv.connector.worker_half import WorkerHalf
from raykv.connector.worker_setup import HostedChild, incarnation_engine_id
from raykv.errors import ConfigError
from raykv.types import Incarnation, Rank

logger = logging.getLogger("raykv")


def ask(child: SchedulerChild, name: str) -> bool:
    """A yes-or-no property of a child's scheduler half; False while it is down."""
    return bool(child.call(name, lambda c: getattr(c, name), False))


# -- the halves ---------------------------------------------------------------------------------------------


def engine_id(vllm_config: VllmConfig) -> str:
    """The engine's id, the same in EngineCore and in every worker."""
    assert vllm_config.kv_transfer_config is not None and vllm_config.kv_transfer_config.engine_id is not None
    return vllm_config.kv_transfer_config.engine_id


def _make(
    child: ChildConfig,
    vllm_config: VllmConfig,
    role: KVConnectorRole,
    kv_cache_config: Any,
    life: Incarnation | None = None,
) -> Any:
    """`life`: of a child that was rebuilt or added; no peer and no store knows the engine by the id it has then."""
    cls: Any = vllm_compat.connector_class(child)
    own_id = incarnation_engine_id(child.engine_id or engine_id(vllm_config), life or Incarnation(0))
    return cls(vllm_compat.child_vllm_config(vllm_config, child, own_id), role, kv_cache_config)


def scheduler_children(config: MultiConfig, vllm_config: VllmConfig, kv_cache_config: Any) -> list[SchedulerChild]:
    """The children's scheduler halves. What one raises is passed on with its name: the engine does not start."""
    children: list[SchedulerChild] = []
    assert vllm_config.kv_transfer_config is not None
    raw = vllm_config.kv_transfer_config.kv_connector_extra_config["connectors"]
    for child in config.children:
        try:
            connector = _make(child, vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)
        except Exception as error:
            for made in children:
                made.shutdown()
            raise ConfigError(
                f"The child {child.name} ({child.connector}) could not be made. "
                f"It said: {type(error).__name__}: {error}"
            ) from error
        if child.is_tier:
            connector.raykv_is_inner()
        named = with_name(raw[child.index], str(child.name))
        children.append(SchedulerChild(child, connector, vllm_config.parallel_config.world_size, named))
    return children


def with_name(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A child's JSON with its name in it."""
    extra = dict(raw.get("kv_connector_extra_config") or {})
    extra["raykv"] = {**(extra.get("raykv") or {}), "name": name}
    return {**raw, "kv_connector_extra_config": extra}


def worker_half(config: MultiConfig, vllm_config: VllmConfig, kv_cache_config: Any) -> WorkerHalf:
    """The worker half, with the hosts' processes already starting. Raises ClusterError or ConfigError."""
    rank = Rank(vllm_compat.global_rank(vllm_config))
    maker = WorkerMaker(config, rank, vllm_config, kv_cache_config)
    hosted_configs = [c for c in config.children if c.options.run is RunMode.ACTOR]
    hosted = [maker.hosted(c, Incarnation(0)) for c in hosted_configs]
    inline = [maker.inline(c, Incarnation(0)) for c in config.children if c.options.run is RunMode.INLINE]
    return WorkerHalf(rank, hosted, inline, vllm_config.parallel_config.world_size, maker)


class WorkerMaker:
    """Makes the worker halves of children on one rank, at the start and later (`worker_chain.Maker`)."""

    def __init__(self, config: MultiConfig, rank: Rank, vllm_config: VllmConfig, kv_cache_config: Any) -> None:
        self._config, self._rank = config, rank
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._joined = False

    def hosted(self, config: ChildConfig, life: Incarnation) -> HostedChild:
        """Its first process is starting when this returns. Raises ClusterError; of an added child, whose `life` is not
        0, also ConfigError, where the engine's KV cache is laid out otherwise."""
        namespace = self._config.namespace
        if not self._joined:
            info = cluster.connect(self._config.ray_address, namespace=namespace)
            logger.info("RayKV joined the Ray cluster at %s (node %s)", info.address, info.node_id[:8])
            for lacking in cluster.check_head_loss_settings():
                logger.warning("this engine may not survive the loss of Ray's head: %s is missing", lacking)
            self._joined = True
        if life:
            check_layout(config, self._vllm_config)
        own_id = engine_id(self._vllm_config)
        return HostedChild(config, self._rank, self._vllm_config, self._kv_cache_config, namespace, own_id, life)

    def inline(self, config: ChildConfig, life: Incarnation) -> InlineChild:
        """Raises what the child raises."""
        if life:
            check_layout(config, self._vllm_config)
        connector = _make(config, self._vllm_config, KVConnectorRole.WORKER, self._kv_cache_config, life)
        return InlineChild(config, self._rank, connector, config.saves)


def check_layout(config: ChildConfig, vllm_config: VllmConfig) -> None:
    """Whether the KV cache, once allocated, lies as the child wants it. Raises ConfigError.

    vLLM notes in each worker how it does (`CacheConfig.kv_cache_layout`, 0.32).
    """
    cls: Any = vllm_compat.connector_class(config)
    wanted = cls.get_required_kvcache_layout(vllm_compat.child_vllm_config(vllm_config, config))
    have = getattr(vllm_config.cache_config, "kv_cache_layout", None)
    if wanted is not None and have is not None and wanted != have:
        raise ConfigError(
            f"Child {config.name} ({config.connector}) requires the KV cache layout {wanted}, and this engine's is "
            f"{have}. Start an engine with the child in its config."
        )


def handshake(worker: WorkerHalf) -> RayMultiHandshake | None:
    """This rank's handshake metadata of all children; None if no child has any."""
    found = worker.handshakes()
    return RayMultiHandshake(worker.rank, found) if found else None


# -- recovery -----------------------------------------------------------------------------------------------


class Recovery:
    """Passes handshake metadata to the children, at start-up and again after a rebuild."""

    def __init__(
        self, config: MultiConfig, children: Iterable[SchedulerChild], vllm_config: VllmConfig, kv_cache_config: Any
    ) -> None:
        """`children` may be another chain each time it is iterated."""
        self._children = children
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._keys: dict[Rank, tuple[int, int]] = {}
        self._manager: Any = None
        num_ranks = vllm_config.parallel_config.world_size
        watch = RayHostWatch(config.ray_address, config.namespace, engine_id(vllm_config))
        self._supervisor = Supervisor(children, num_ranks, watch, self._rebuild)
        # Ranks without handshake metadata have no key of vLLM's; TP alone is the common case.
        self._default_keys = {Rank(rank): (0, rank) for rank in range(num_ranks)}

    def start(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager
        self._supervisor.start()

    def stop(self) -> None:
        self._supervisor.stop()

    def watch(self) -> None:
        """A child was added: look at its hosts, too."""
        self._supervisor.start()

    def build(self, child: SchedulerChild, handshakes: Mapping[Rank, Any]) -> Any:
        """The scheduler half of an inline child that is added, once its worker halves are there. Blocks: a
        TierConnector waits for its store. Raises whatever the child does."""
        connector = self._make(child, child.life)
        if child.config.is_tier:
            connector.raykv_is_inner()
        return self._bound(connector, handshakes)

    def handshakes_arrived(self, metadata: Mapping[tuple[int, int], RayMultiHandshake]) -> None:
        """Every child gets its own, of every rank that has some."""
        self._keys = {found.rank: key for key, found in metadata.items()}
        for child in self._children:
            mine = {
                key: found.children[child.index] for key, found in metadata.items() if child.index in found.children
            }
            if mine:
                self._tell(child, mine)

    @staticmethod
    def _tell(child: SchedulerChild, metadata: dict[tuple[int, int], Any]) -> None:
        child.call("set_xfer_handshake_metadata", lambda c: c.set_xfer_handshake_metadata_pp_aware(metadata), None)

    def _rebuild(self, child: SchedulerChild, incarnation: Incarnation, handshakes: Mapping[Rank, Any]) -> Any:
        return self._bound(self._make(child, incarnation), handshakes)

    def _make(self, child: SchedulerChild, life: Incarnation) -> Any:
        return _make(child.config, self._vllm_config, KVConnectorRole.SCHEDULER, self._kv_cache_config, life)

    def _bound(self, connector: KVConnectorBase_V1, handshakes: Mapping[Rank, Any]) -> KVConnectorBase_V1:
        try:
            connector.bind_kv_cache_manager(self._manager)
            if handshakes:
                keys = {**self._default_keys, **self._keys}
                connector.set_xfer_handshake_metadata_pp_aware({keys[rank]: m for rank, m in handshakes.items()})
        except BaseException:
            connector.shutdown()  # else its listener keeps the port, and no later try can succeed
            raise
        return connector
