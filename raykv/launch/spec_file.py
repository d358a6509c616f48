"""SPEC.yaml: YAML (or JSON, which is YAML) from a file to a ClusterSpec and the router's options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from raykv.config.cluster_parse import parse_spec
from raykv.config.cluster_spec import ClusterSpec
from raykv.config.router import RouterOptions, parse_router
from raykv.errors import ConfigError
from raykv.launch import vllm_options

MAX_NBYTES = 1 << 20


class _Loader(yaml.SafeLoader):
    """Safe, and strict: a key that stands twice is an error, for YAML would take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                mark = key.start_mark
                raise ConfigError(f"{mark.name}, line {mark.line + 1}: the key {key.value!r} stands there twice.")
            seen.add(getattr(key, "value", ""))
        return super().construct_mapping(node, deep)


def read_spec(path: str | Path) -> ClusterSpec:
    """Read and check a spec. Raises ConfigError with the line for bad YAML, with key, value and fix for a bad spec."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_NBYTES:
            raise ConfigError(f"{path} has more than {MAX_NBYTES} bytes: it can't be a spec.")
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The spec {path} can't be read: {getattr(error, 'strerror', None) or error}.") from error
    return spec_from(text, str(path))


def spec_from(text: str, name: str = "the spec") -> ClusterSpec:
    """The same for a text; `name` says where it is from."""
    try:
        loader = _Loader(text)
        loader.name = name
        try:
            raw = loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}, line {mark.line + 1}" if mark is not None else name
        raise ConfigError(f"{where}: this is no YAML: {getattr(error, 'problem', None) or error}.") from error
    except RecursionError as error:
        raise ConfigError(f"{name} is nested too deep. Make it flatter.") from error
    spec = parse_spec(raw)
    router_options(spec)
    vllm_options.check(spec)
    return spec


def router_options(spec: ClusterSpec, namespace: str = "raykv") -> RouterOptions | None:
    """How the router is to run; None if none is wanted. Raises ConfigError for a key that it does not have."""
    if spec.router is None:
        return None
    own = {"transport": str(spec.transport), "namespace": namespace}
    for key in (*own, "engines"):
        if key in spec.router.extra:
            raise ConfigError(f"router.{key} is not to be set in a spec: it follows from the rest. Leave it out.")
    return parse_router({**spec.router.extra, **own})
