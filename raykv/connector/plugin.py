"""The entry point that vLLM calls in each of its processes (`vllm.general_plugins`)."""

from __future__ import annotations

NAMES = ("RayMultiConnector", "TierConnector")


def register() -> None:
    """Make RayKV's connectors known to vLLM by name. Cheap: nothing of RayKV is imported before it is used."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in NAMES:
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, "raykv.connector", name)
