"""Which tiers a store has by an operator's word, kept beside its host pool for its next life.

What is configured stays what an engine says. A live change makes the tiers as they are *now* differ from it, and a
store that dies comes back with those. The file lies in shared memory: it ends with `raykv stop` and with the machine,
and then what is configured holds again. It is locked by the store that has it, replaced in one step, and not trusted:
of another version, another configuration or damaged, it is passed over with a line in the log.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from raykv.errors import StorageError
from raykv.storage.files import open_private
from raykv.store_messages import Medium, StoreSpec, TierSpec

logger = logging.getLogger("raykv")

VERSION = 1


@dataclass(frozen=True, slots=True)
class TierState:
    """The tiers as they are, fastest first, which of them are drained, and folders of disk tiers that were removed and
    are to be deleted."""

    tiers: tuple[TierSpec, ...]
    drained: frozenset[Medium] = frozenset()
    trash: tuple[str, ...] = ()


class TierStateFile:
    """One per open store, one thread at a time."""

    def __init__(self, host: Path, spec: StoreSpec) -> None:
        """`host`: where the host pool is, or would be."""
        self.path, self._spec, self._fd = host.with_suffix(".tiers"), spec, -1

    def read(self) -> TierState:
        """As an earlier life left them, else as they are configured."""
        configured = TierState(self._spec.tiers)
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return configured
        except OSError as error:
            logger.warning("%s can't be read (%s): the tiers are as configured", self.path, error.strerror)
            return configured
        try:
            return _parsed(raw, self._spec)
        except Exception as error:  # whatever is wrong with it
            logger.warning("%s is not used (%s): the tiers are as configured", self.path, error)
            return configured

    def write(self, state: TierState) -> None:
        """Replace it in one step. Raises StorageError; what was there stays then."""
        body = json.dumps(
            {
                "version": VERSION,
                "configured": _plain(self._spec.tiers),
                "now": _plain(state.tiers),
                "drained": sorted(state.drained),
                "trash": list(state.trash),
            }
        )
        fresh = self.path.with_suffix(".tiers-new")
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()  # a kill left it
        fd = open_private(str(fresh))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # so that nobody takes it for one that was left
            os.write(fd, f"{xxhash.xxh3_64_hexdigest(body)}\n{body}\n".encode())
            fresh.replace(self.path)
        except OSError as error:
            os.close(fd)
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise StorageError(f"Can't write {self.path}: {error.strerror}.") from error
        self._let_go()
        self._fd = fd

    def close(self, remove: bool) -> None:
        """Unlock; `remove`: the next life has the tiers that are configured."""
        if remove:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._let_go()

    def _let_go(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _plain(tiers: Sequence[TierSpec]) -> list[list[Any]]:
    return [[str(tier.medium), tier.capacity, tier.path] for tier in tiers]


def _parsed(raw: bytes, spec: StoreSpec) -> TierState:
    digest, _, body = raw.decode().partition("\n")
    body = body.rstrip("\n")
    if digest != xxhash.xxh3_64_hexdigest(body):
        raise ValueError("it is damaged")
    found = json.loads(body)
    if found["version"] != VERSION:
        raise ValueError(f"it has version {found['version']}, not {VERSION}")
    if found["configured"] != _plain(spec.tiers):
        raise ValueError("it is about another configuration")
    tiers = tuple(TierSpec(Medium(medium), int(capacity), path) for medium, capacity, path in found["now"])
    media = [tier.medium for tier in tiers]
    if not tiers or len(set(media)) != len(media) or media != sorted(media, key=list(Medium).index):
        raise ValueError(f"it lists the tiers {', '.join(media)}")
    return TierState(tiers, frozenset(map(Medium, found["drained"])), tuple(map(str, found["trash"])))
