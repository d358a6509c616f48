"""What `raykv doctor` is asked for and what it says."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from raykv.api.shown import Shown


class Level(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding(Shown):
    """What one check found. `fix`: what to do; empty where all is well."""

    check: str
    level: Level
    said: str
    fix: str = ""


@dataclass(frozen=True)
class Wanted:
    """What is to be looked at. `folders` of disk tiers; `connect`: also the running cluster; `deep`: also what takes a
    minute and GPU memory."""

    address: str | None = None
    namespace: str = "raykv"
    connect: bool = True
    folders: Sequence[str] = ()
    ports: Sequence[int] = ()
    deep: bool = False
    timeout_s: float = 10.0
