"""Connector configs the tests, the demo and the benchmark share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def example_child(folder: str | Path, **raykv: Any) -> dict[str, Any]:
    """vLLM's ExampleConnector, saving below `folder`; `raykv` are RayKV's own options of the child."""
    extra: dict[str, Any] = {"shared_storage_path": str(folder)}
    if raykv:
        extra["raykv"] = raykv
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def multi(
    children: Sequence[Mapping[str, Any]],
    module: str | None = "raykv.connector",
    raykv: Mapping[str, Any] | None = None,
    **top: Any,
) -> dict[str, Any]:
    """A MultiConnector config. `module=None` is vLLM's own class, the default is RayKV's."""
    extra: dict[str, Any] = {"connectors": [dict(child) for child in children]}
    if raykv:
        extra["raykv"] = dict(raykv)
    config: dict[str, Any] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
        **top,
    }
    if module is not None:
        config["kv_connector_module_path"] = module
    return config


def file_child(folder: str | Path, **raykv: Any) -> dict[str, Any]:
    """The tests' own FileChild: its blocks and its control folder lie below `folder`."""
    extra: dict[str, Any] = {"folder": str(Path(folder) / "blocks"), "control": str(Path(folder) / "control")}
    if raykv:
        extra["raykv"] = raykv
    return {
        "kv_connector": "FileChild",
        "kv_connector_module_path": "tests.support.file_child",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def nixl_child(role: str, **raykv: Any) -> dict[str, Any]:
    """vLLM's NixlConnector as `kv_producer` or `kv_consumer`, over CPU memory."""
    extra: dict[str, Any] = {"raykv": raykv} if raykv else {}
    return {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": extra,
    }


def tier_child(
    store: str, host: str | None = None, disk: str | None = None, path: str | Path | None = None, **more: Any
) -> dict[str, Any]:
    """RayKV's TierConnector over the node's store of that name; `host` and `disk` are capacities."""
    tiers: list[dict[str, str]] = []
    if host is not None:
        tiers.append({"medium": "host", "capacity": host})
    if disk is not None:
        tiers.append({"medium": "disk", "capacity": disk, "path": str(path)})
    return {
        "kv_connector": "TierConnector",
        "kv_connector_module_path": "raykv.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": store, "tiers": tiers, **more},
    }
