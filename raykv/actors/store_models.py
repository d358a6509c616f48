"""The models whose blocks a store may have: remembered over its lives, and seen from the engines that are attached."""

from __future__ import annotations

from collections.abc import Mapping

from raykv.actors.store_sessions import Sessions
from raykv.admin_messages import ModelView
from raykv.core.known_models import KnownModels


class Models:
    """The models whose blocks may be in a store, and what its attached engines say of them. Any thread."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self.known = KnownModels()

    def windows(self, fingerprint: bytes) -> list[int]:
        """What the KV groups of the model with it need of a prefix; where no engine says so, all of it."""
        model = self.known.get(fingerprint)
        return list(self.attached_windows(fingerprint)) or [0] * (model.groups if model is not None else 1)

    def attached_windows(self, fingerprint: bytes) -> tuple[int, ...]:
        """The same; empty where no engine says so."""
        for attach in self._sessions.attaches():
            if attach.fingerprint == fingerprint:
                return tuple(group.window_blocks for group in attach.groups)
        return ()

    def views(self, blocks: Mapping[bytes, int], slot_nbytes: int) -> tuple[ModelView, ...]:
        """Of all that are known, attached, or have blocks (by fingerprint: how many)."""
        engines = self._engines()
        fingerprints = {*(model.fingerprint for model in self.known.all()), *engines, *blocks}
        return tuple(self._view(one, blocks.get(one, 0), slot_nbytes, engines) for one in sorted(fingerprints))

    def _engines(self) -> dict[bytes, list[str]]:
        found: dict[bytes, list[str]] = {}
        for attach in self._sessions.attaches():
            engines = found.setdefault(attach.fingerprint, [])
            if str(attach.engine) not in engines:
                engines.append(str(attach.engine))
        return found

    def _view(self, one: bytes, blocks: int, slot_nbytes: int, engines: dict[bytes, list[str]]) -> ModelView:
        model = self.known.get(one)
        name, facts = (model.name, model.facts) if model is not None else ("", "")
        windows = self.attached_windows(one) if one in engines else ()
        return ModelView(one.hex(), name, facts, blocks, blocks * slot_nbytes, tuple(engines.get(one, ())), windows)
