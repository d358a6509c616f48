"""What a store's next life is to know of operators and models: facts, quotas and pins, in a file beside its pools.

It lies with the slowest tier that is this node's own, since that one lives longest. Every field is checked when it is
read: what makes no sense is passed over, and the rest is used.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raykv.admin_messages import NO_TENANT, TENANT_NBYTES
from raykv.core.known_models import KnownModel
from raykv.errors import StorageError
from raykv.storage.notes import read_notes, remove_notes, write_notes
from raykv.store_messages import FINGERPRINT_NBYTES, KEY_NBYTES, Medium, StoreSpec

logger = logging.getLogger("raykv")

NAME = "raykv.notes"


@dataclass(frozen=True, slots=True)
class KeptPin:
    """A pin with its keys; where their blocks lie is found anew. `medium`: where they were kept, "" for the fastest."""

    number: str
    expires: float
    note: str
    keys: tuple[tuple[Medium, tuple[bytes, ...]], ...]


@dataclass(frozen=True, slots=True)
class Notes:
    """`quotas`: bytes, by tag."""

    models: tuple[KnownModel, ...] = ()
    quotas: dict[bytes, int] = field(default_factory=dict)
    pins: tuple[KeptPin, ...] = ()


class NotesFile:
    """One per store. One thread at a time."""

    def __init__(self, spec: StoreSpec, host: Path) -> None:
        disks = [tier.path for tier in spec.tiers if tier.medium is Medium.DISK and tier.path]
        self._path = str(Path(disks[-1], NAME)) if disks else notes_beside(host)
        self._goes_with_host = not disks
        self._failed = False

    def write(self, notes: Notes) -> bool:
        """Whether it could be written; if not, that is logged once."""
        try:
            write_notes(self._path, _packed(notes))
        except StorageError as error:
            if not self._failed:
                logger.warning("what operators have set is not kept for the store's next life: %s", error)
            self._failed = True
            return False
        self._failed = False
        return True

    def read(self) -> Notes:
        """What the life before has left; empty if there is nothing that can be believed."""
        found = read_notes(self._path)
        return Notes(
            tuple(_models(_list(found.get("models")))),
            dict(_quotas(_list(found.get("quotas")))),
            tuple(_pins(_list(found.get("pins")))),
        )

    def host_removed(self) -> None:
        """The host tier is gone for good, and with it what was noted of it, unless a disk tier stays."""
        if self._goes_with_host:
            remove_notes(self._path)


def notes_beside(host: Path) -> str:
    """Of a store without a disk tier."""
    return f"{host}.notes"


def _packed(notes: Notes) -> dict[str, Any]:
    return {
        "models": [[one.fingerprint, one.name, one.facts, one.groups] for one in notes.models],
        "quotas": [[tag, nbytes] for tag, nbytes in notes.quotas.items()],
        "pins": [
            [pin.number, pin.expires, pin.note, [[str(medium), b"".join(keys)] for medium, keys in pin.keys]]
            for pin in notes.pins
        ],
    }


def _list(value: Any) -> list[Any]:
    return [one for one in value if isinstance(one, list)] if isinstance(value, list) else []


def _models(rows: Sequence[list[Any]]) -> Iterable[KnownModel]:
    for row in rows:
        match row:
            case [bytes() as fingerprint, str() as name, str() as facts, int() as groups]:
                if len(fingerprint) == FINGERPRINT_NBYTES and 0 < groups < 256:
                    yield KnownModel(fingerprint, name, facts, groups)


def _quotas(rows: Sequence[list[Any]]) -> Iterable[tuple[bytes, int]]:
    for row in rows:
        match row:
            case [bytes() as tag, int() as nbytes]:
                if len(tag) == TENANT_NBYTES and tag != NO_TENANT and nbytes >= 0:
                    yield tag, nbytes


def _pins(rows: Sequence[list[Any]]) -> Iterable[KeptPin]:
    for row in rows:
        match row:
            case [str() as number, float() as expires, str() as note, list() as by_medium]:
                if number and math.isfinite(expires):
                    yield KeptPin(number, expires, note, tuple(_keys(_list(by_medium))))


def _keys(rows: Sequence[list[Any]]) -> Iterable[tuple[Medium, tuple[bytes, ...]]]:
    for row in rows:
        match row:
            case [str() as name, bytes() as keys]:
                if name in list(Medium) and not len(keys) % KEY_NBYTES:
                    cut = tuple(keys[at : at + KEY_NBYTES] for at in range(0, len(keys), KEY_NBYTES))
                    yield Medium(name), cut
