"""The JSON of `--kv-transfer-config`, translated once into frozen objects.

The JSON is vLLM's own for its MultiConnector; what is RayKV's stands under `kv_connector_extra_config.raykv`,
of a child or at the top, so that the same JSON stays valid for vLLM's class:

    {"kv_connector": "MultiConnector", "kv_connector_module_path": "raykv.connector", "kv_role": "kv_both",
     "kv_connector_extra_config": {"raykv": {"load_policy": "first"}, "connectors": [
       {"kv_connector": "NixlConnector"},
       {"kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": "kv", "raykv": {"name": "files"}}}]}}

Whatever is wrong with it is a ConfigError. Classes are not resolved here: that needs vLLM.
"""

from raykv.config.model import (
    MAX_RETRY_S,
    ChildConfig,
    ChildOptions,
    LoadPolicy,
    MultiConfig,
    RunMode,
    SaveMode,
    known_synchronous,
)
from raykv.config.parse import parse, unknown_connector

__all__ = [
    "MultiConfig",
    "ChildConfig",
    "ChildOptions",
    "LoadPolicy",
    "RunMode",
    "SaveMode",
    "MAX_RETRY_S",
    "parse",
    "known_synchronous",
    "unknown_connector",
]
