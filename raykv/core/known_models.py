"""What a store knows of the models whose blocks it holds: the facts behind each fingerprint, and how two differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MOST_MODELS = 256
"""Beyond, those that were heard of longest ago are forgotten: engines that share with nobody bring one each start."""
MOST_FACTS_LEN = 1 << 20
SHOWN = 3
"""So many facts that differ are named."""
VALUE_LEN = 60
_NOT_THERE = "(not there)"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """`facts`: canonical JSON; `groups`: how many KV groups it has."""

    fingerprint: bytes
    name: str
    facts: str
    groups: int


class KnownModels:
    """By fingerprint. Any thread may ask, one at a time changes."""

    def __init__(self) -> None:
        self._models: dict[bytes, KnownModel] = {}

    def learn(self, model: KnownModel) -> bool:
        """An engine came with it. Whether that is news. Facts that are too long are left out."""
        if len(model.facts) > MOST_FACTS_LEN:
            model = KnownModel(model.fingerprint, model.name, "", model.groups)
        before = self._models.get(model.fingerprint)
        if before is not None and not model.facts:
            model = KnownModel(model.fingerprint, model.name or before.name, before.facts, model.groups)
        models = {fingerprint: one for fingerprint, one in self._models.items() if fingerprint != model.fingerprint}
        models[model.fingerprint] = model
        self._models = dict(list(models.items())[-MOST_MODELS:])
        return model != before

    def get(self, fingerprint: bytes) -> KnownModel | None:
        return self._models.get(fingerprint)

    def all(self) -> tuple[KnownModel, ...]:
        return tuple(self._models.values())


def differences(mine: str, other: str) -> list[str]:
    """Which facts of two canonical JSON texts differ, and both values, for people; empty if one is not known."""
    try:
        a, b = json.loads(mine), json.loads(other)
    except ValueError:
        return []
    return [f"{path}: {_short(left)} here, {_short(right)} there" for path, left, right in _differ(a, b, "")]


def best_difference(mine: Sequence[str], others: Sequence[str]) -> str:
    """Of ranks of one model and of another's: what the two that are most alike differ in."""
    found = [lines for one in mine for other in others if (lines := differences(one, other))]
    if not found:
        return ""
    lines = min(found, key=len)
    more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "; ".join(lines[:SHOWN]) + more


def _differ(a: Any, b: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for name in sorted(set(a) | set(b)):
            yield from _differ(a.get(name, _NOT_THERE), b.get(name, _NOT_THERE), f"{path}.{name}" if path else name)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for at, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from _differ(left, right, f"{path}[{at}]")
    elif a != b:
        yield path or "all", a, b


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= VALUE_LEN else f"{text[: VALUE_LEN - 3]}..."
