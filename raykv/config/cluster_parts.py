"""Reading the parts of a cluster's spec: lists of mappings, amounts, environments, vLLM's options."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from raykv.config.reader import Reader, did_you_mean, show
from raykv.errors import ConfigError

RESERVED = {
    "model": "model at the top of the spec",
    "host": "listen at the top of the spec",
    "port": "port of an engine",
    "kv_transfer_config": "tiers or stores at the top, and transport of an engine: RayKV makes it of these",
    "uds": "nowhere: the router reaches engines by address",
}
"""vLLM's options that RayKV sets itself, and what to set instead."""


class Named(Reader):
    """A Reader whose place has a name of its own, for where there is no path."""

    def __init__(self, raw: Mapping[Any, Any], where: str, name: str) -> None:
        super().__init__(raw, where)
        self.name = name

    def only(self, valid: Iterable[str], elsewhere: Mapping[str, str]) -> None:
        """As Reader's, in this place's words."""
        valid = frozenset(valid)
        for key in self.raw:
            if key in valid:
                continue
            if key in elsewhere:
                raise ConfigError(f"Unknown key {show(key)} in {self.name}. It belongs in {elsewhere[key]}.")
            raise ConfigError(f"Unknown key {show(key)} in {self.name}. {did_you_mean(str(key), valid)}")


def mapping_of(reader: Reader, key: str) -> Mapping[Any, Any]:
    """The mapping at this key; empty if absent or null."""
    value = reader.raw.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise reader.wrong(key, "a mapping")
    return value or {}


def listed(reader: Reader, key: str, example: str) -> list[Named]:
    """The mappings of a list that must not be empty."""
    value = reader.raw.get(key)
    if value is None:
        raise ConfigError(f"{reader.path(key)} is missing. It must be a list, such as [{example}].")
    if not isinstance(value, list) or not value:
        raise reader.wrong(key, f"a list with at least one entry, such as [{example}]")
    entries = []
    for index, one in enumerate(value):
        where = f"{reader.path(key)}[{index}]"
        if not isinstance(one, Mapping):
            raise ConfigError(f"{where} is {show(one)}. It must be a mapping, such as {example}.")
        entries.append(Named(one, where, where))
    return entries


def number_of(reader: Reader, key: Any, default: float) -> float:
    """An amount of a resource: a number of at least 0."""
    value = reader.raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise reader.wrong(key, "a number of at least 0")
    return float(value)


def texts_of(reader: Reader, key: str) -> list[str]:
    """A list of texts; empty if absent or null."""
    value = reader.raw.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise reader.wrong(key, "a list of texts, one for each argument")
    return list(value)


def environment_of(reader: Reader) -> dict[str, str]:
    """Environment variables: texts, or numbers taken as such."""
    found = {}
    for name, value in mapping_of(reader, "environment").items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ConfigError(f"{reader.path('environment')} names the variable {show(name)}, which can't be one.")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(f"{reader.path('environment')}.{name} is {show(value)}. It must be a text, in quotes.")
        found[name] = str(value)
    return found


def vllm_options(reader: Reader, key: str) -> dict[str, Any]:
    """Options of `vllm serve` by their names, with underscores. Not whether vLLM has them."""
    options = {}
    for name, value in mapping_of(reader, key).items():
        if not isinstance(name, str) or not name.strip("-"):
            raise ConfigError(f"{reader.path(key)} names the option {show(name)}. Write it as max_model_len: 4096.")
        plain = name.lstrip("-").replace("-", "_")
        if plain in RESERVED:
            raise ConfigError(f"{reader.path(key)}.{name} is not to be set there. Set {RESERVED[plain]}.")
        options[plain] = value
    return options


def flags(options: Mapping[str, Any]) -> list[str]:
    """The command line of these options, as vLLM reads it: true is `--name`, false `--no-name`, null leaves it out."""
    arguments: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            continue
        if value is True:
            arguments.append(flag)
        elif value is False:
            arguments.append("--no-" + flag[2:])
        elif isinstance(value, Mapping):
            arguments += [flag, json.dumps(value)]
        elif isinstance(value, list):
            arguments += [flag, *(json.dumps(one) if isinstance(one, Mapping | list) else str(one) for one in value)]
        else:
            arguments += [flag, str(value)]
    return arguments
