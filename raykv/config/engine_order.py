"""What one engine of a cluster runs: its `vllm serve` command line, with the KV transfer config that its spec means."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from raykv.cluster_messages import EngineOrder, EngineRole
from raykv.config.cluster_parts import flags
from raykv.config.cluster_spec import LOOPBACK, ClusterSpec, EngineSpec, Listen, Transport
from raykv.config.model import ChildOptions
from raykv.config.tiers import parse_tiers

MODULE = "raykv.connector"
NIXL_ROLE = {
    EngineRole.PREFILL: "kv_producer",
    EngineRole.DECODE: "kv_consumer",
    EngineRole.BOTH: "kv_both",
}
LOOK_UP_SLACK_S = 1.0
VLLM = ("vllm", "serve")
"""Its actor takes the vLLM of its own environment for this."""


def order_for(spec: ClusterSpec, engine: EngineSpec, index: int) -> EngineOrder:
    """The order for one replica. The same spec gives the same order, in any process of one environment."""
    command = [*(spec.command or VLLM), spec.model, *flags(engine.options)]
    config = kv_transfer_config(spec, engine)
    if config is not None:
        command += ["--kv-transfer-config", json.dumps(config, sort_keys=True)]
    order = EngineOrder(
        name=engine.replica(index),
        role=engine.role,
        command=tuple(command),
        environment=tuple(sorted(engine.environment.items())),
        host=LOOPBACK if spec.listen is Listen.LOOPBACK else None,
        port=None if engine.port is None else engine.port + index,
        side_ports=engine.ranks if engine.transport is Transport.NIXL else 0,
        startup_timeout_s=spec.startup_timeout_s,
        unhealthy_timeout_s=spec.unhealthy_timeout_s,
    )
    return order.digested(_digest(spec, engine, index))


def kv_transfer_config(spec: ClusterSpec, engine: EngineSpec) -> dict[str, Any] | None:
    """vLLM's --kv-transfer-config: the store first, the other engine for the rest of a prompt. None: no child."""
    children: list[dict[str, Any]] = []
    store = spec.store(engine.store)
    if store is not None:
        children.append(tier_child(store.extra))
    if engine.role is not EngineRole.BOTH and engine.transport is Transport.NIXL:
        children.append(_nixl_child(engine))
    if not children:
        return None
    return multi_config(children, engine.load_policy)


def multi_config(children: Sequence[dict[str, Any]], load_policy: str) -> dict[str, Any]:
    """RayKV's MultiConnector over these children."""
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"raykv": {"load_policy": load_policy}, "connectors": list(children)},
    }


def tier_child(extra: Any) -> dict[str, Any]:
    """A TierConnector with this extra config. Its MultiConnector waits for its look-ups longer than it does itself."""
    limit_s, own = ChildOptions.lookup_timeout_s, parse_tiers(extra).lookup_timeout_s
    around = {"raykv": {"lookup_timeout_s": own + LOOK_UP_SLACK_S}} if own + LOOK_UP_SLACK_S > limit_s else {}
    return {
        "kv_connector": "TierConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**extra, **around},
    }


def _nixl_child(engine: EngineSpec) -> dict[str, Any]:
    child: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": NIXL_ROLE[engine.role]}
    if not engine.selector.resources.get("GPU"):
        child["kv_buffer_device"] = "cpu"
    return child


def _digest(spec: ClusterSpec, engine: EngineSpec, index: int) -> str:
    """Changes exactly when this engine must be started anew."""
    parts = [
        spec.model,
        spec.command,
        spec.listen,
        engine.options,
        engine.environment,
        dict(engine.selector.labels),
        dict(engine.selector.resources),
        None if engine.port is None else engine.port + index,
        engine.role,
        kv_transfer_config(spec, engine),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
