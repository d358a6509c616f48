"""Typed access to foreign JSON. An error names key, place, value and fix in one paragraph."""

import difflib
import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from raykv.errors import ConfigError

E = TypeVar("E", bound=StrEnum)

MAX_SECONDS = 86_400.0  # a day; a wait much longer overflows the timers of the C library, and is a mistake
MAX_DEPTH = 64  # of nested JSON; Python's own stack is next


def show(value: object) -> str:
    """A foreign value as JSON on one line, at most 80 characters: fit for a message, whatever it is."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # no JSON, a cycle or a number without end
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(word: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `valid` that was probably meant, letter case aside; None if none is close."""
    by_lower = {name.lower(): name for name in sorted(valid)}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """The sentence that helps: the nearest valid name, and all of them."""
    names = sorted(valid)
    close = nearest(word, names)
    return (f"Did you mean {show(close)}? " if close else "") + f"Valid: {', '.join(names) or 'none'}."


def copy_json(value: Any, depth: int = 0) -> Any:
    """A copy that shares no dict, list or tuple with `value`; anything else in it is shared.

    Raises ConfigError if it is nested more than MAX_DEPTH deep.
    """
    if depth > MAX_DEPTH:
        raise ConfigError(f"The config is nested more than {MAX_DEPTH} levels deep. Make it flatter.")
    if isinstance(value, Mapping):
        return {key: copy_json(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [copy_json(item, depth + 1) for item in value]
    if isinstance(value, tuple):
        return tuple(copy_json(item, depth + 1) for item in value)
    return value


class Reader:
    """One JSON object and where it stands. Methods raise ConfigError; an absent key gives the default."""

    def __init__(self, raw: Mapping[Any, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def path(self, key: str) -> str:
        """Where a key stands, from the top of the config, such as `connectors[1].kv_role`."""
        return f"{self.where}.{key}" if self.where else key

    def wrong(self, key: str, needed: str) -> ConfigError:
        """The error for a value that is not what is needed."""
        return ConfigError(f"{self.path(key)} is {show(self.raw[key])}. It must be {needed}.")

    def only(self, valid: Iterable[str], elsewhere: Mapping[str, str]) -> None:
        """Refuse any key that is not `valid`. `elsewhere`: keys that belong to another place, and which."""
        valid = frozenset(valid)
        for key in self.raw:
            if key in valid:
                continue
            place = self.where or "the KV transfer config"
            problem = f"Unknown key {show(key)} in {place}."
            if key in elsewhere:
                raise ConfigError(f"{problem} It belongs in {elsewhere[key]}.")
            raise ConfigError(f"{problem} {did_you_mean(str(key), valid)}")

    def inner(self, key: str) -> "Reader":
        """The object at this key; empty if the key is absent or null."""
        raw = self.raw.get(key)
        if raw is not None and not isinstance(raw, Mapping):
            raise self.wrong(key, "an object, such as {}")
        return Reader(raw or {}, self.path(key))

    def text(self, key: str) -> str | None:
        """A text that is not empty; None if absent or null."""
        value = self.raw.get(key)
        if value is not None and (not isinstance(value, str) or not value.strip()):
            raise self.wrong(key, "a text that is not empty")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def count(self, key: str, default: int, least: int = 1, most: int = 1_000_000) -> int:
        """A whole number in [least, most]. true is none, though Python takes it for 1."""
        value = self.raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, f"a whole number from {least} to {most}")
        return value

    def seconds(self, key: str, default: float, most: float = MAX_SECONDS) -> float:
        """A number of seconds in (0, most]."""
        value = self.raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            raise self.wrong(key, f"a number of seconds above 0 and at most {most:g}")
        return float(value)

    def choice(self, key: str, kind: type[E], default: E) -> E:
        """One of an enum's values."""
        value = self.raw.get(key, default)
        if not isinstance(value, str) or value not in list(kind):
            raise ConfigError(f"{self.path(key)} is {show(value)}. {did_you_mean(str(value), list(kind))}")
        return kind(value)
