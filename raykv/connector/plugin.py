"""The entry point that vLLM calls in each of its processes (`vllm.general_plugins`)."""

from __future__ import annotations

from typing import Any

NAMES = ("RayMultiConnector", "TierConnector")


def register() -> None:
    """Make RayKV's connectors known to vLLM by name. Cheap: nothing of RayKV is imported before it is used."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in NAMES:
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, "raykv.connector", name)
    _check_configs_early(KVConnectorFactory)


def _check_configs_early(factory: Any) -> None:
    """Let vLLM say what is wrong with a config of RayKV's as soon as it asks whether that takes several KV groups.

    That is while the process that the user started makes its VllmConfig (`supports_hma_config`, 0.32). The connectors
    themselves are made in other processes, after the model was loaded: there an error comes minutes later. A vLLM
    that doesn't ask so says it then.
    """
    ask = getattr(getattr(factory, "supports_hma_config", None), "__func__", None)
    if ask is None or getattr(ask, "checks_raykv", False):
        return

    def supports_hma_config(cls: Any, kv_transfer_config: Any) -> Any:
        if _is_ours(kv_transfer_config):
            from raykv.connector import start_checks

            start_checks.check_json(kv_transfer_config)
        return ask(cls, kv_transfer_config)

    supports_hma_config.checks_raykv = True  # type: ignore[attr-defined]
    factory.supports_hma_config = classmethod(supports_hma_config)


def _is_ours(kv_transfer_config: Any) -> bool:
    path = kv_transfer_config.kv_connector_module_path
    if path is None:
        return kv_transfer_config.kv_connector in NAMES
    return path == "raykv.connector"
