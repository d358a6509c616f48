"""The one edge to vLLM. `kv_connector_module_path: raykv.connector` finds the connectors here."""

from typing import Any

__all__ = ["MultiConnector", "RayMultiConnector", "TierConnector"]


def __getattr__(name: str) -> Any:
    """Import on first use: the actors' side needs other modules of this package than vLLM's."""
    if name == "TierConnector":
        from raykv.connector import tier_connector

        return tier_connector.TierConnector
    if name in __all__:
        from raykv.connector import multi_connector

        return getattr(multi_connector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
