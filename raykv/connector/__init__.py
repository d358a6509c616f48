"""The one edge to vLLM. `kv_connector_module_path: raykv.connector` finds the connectors here."""

from typing import Any

__all__ = ["MultiConnector", "RayMultiConnector"]


def __getattr__(name: str) -> Any:
    """Import on first use: the actors' side needs other modules of this package than vLLM's."""
    if name in __all__:
        from raykv.connector import multi_connector

        return getattr(multi_connector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
