"""Tells the event stream what a store holds, and where: as `publisher` tells the Directory, which see."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache

from raykv.actors.directory_call import FindDirectory
from raykv.actors.publisher import HEARTBEAT_S, LOCK_KEYS, Publisher
from raykv.actors.store_sessions import Sessions
from raykv.core.media_log import MediaLog
from raykv.event_messages import ModelFacts, Now, Tell
from raykv.store_messages import HASH_NBYTES, KEY_NBYTES
from raykv.types import StoreLife

BATCH_KEYS = 2500
"""80 KB: larger messages than 100 KB take Ray's object store."""
LONGEST_PAUSE_S = 10.0
"""The stream is off in most clusters, and may be switched on at any time."""
MOST_MODELS = 256
_HEAD = KEY_NBYTES - HASH_NBYTES


class EventFeed(Publisher):
    """Started by `start`, ended by `close`; while there is no stream nothing is logged."""

    longest_pause_s = LONGEST_PAUSE_S

    def __init__(
        self,
        media: MediaLog,
        lock: AbstractContextManager[object],
        find: FindDirectory,
        node: str,
        store: str,
        life: StoreLife,
        models: Callable[[], Sequence[ModelFacts]] = tuple,
    ) -> None:
        """As a Publisher's. `models`: those of the engines that are there now; they are remembered."""
        super().__init__(media, lock, find, node, store, life)
        self._media, self._models = media, models
        self._known: dict[ModelFacts, None] = {}

    def _next(self, now: float) -> Tell | None:
        """The next batch; None: there is nothing to say."""
        last: dict[bytes, int] = {}
        fresh, whole, self._more = False, True, True
        limit = min(LOCK_KEYS, BATCH_KEYS)
        while self._more and len(last) <= BATCH_KEYS - limit:
            with self._lock:
                lying = self._media.take(limit)
            if lying.fresh:
                last.clear()
                fresh = True
            last.update(lying.now)
            whole, self._more = lying.whole, lying.more
        models = [model for model in self._models() if model not in self._known]
        self._known.update(dict.fromkeys(models))
        if fresh:
            self._stream, self._number = self._stream + 1, 0
            models = list(self._known)[-MOST_MODELS:]
        elif not last and not models and now - self._sent_at < HEARTBEAT_S:
            return None
        parts: dict[tuple[bytes, int], list[bytes]] = {}
        for key, media in last.items():
            parts.setdefault((key[:_HEAD], media), []).append(key[_HEAD:])
        told = tuple(Now(head, media, b"".join(hashes)) for (head, media), hashes in parts.items())
        number, self._number = self._number, self._number + 1
        return Tell(self._node, self._store, self._life, self._stream, number, told, whole, tuple(models))


def models_of(sessions: Sessions) -> list[ModelFacts]:
    """The models of the engines that are attached with all their ranks."""
    found = []
    for name in sessions.engine_ids():
        complete, engine = sessions.complete(name), sessions.find(name)
        if complete is None or engine is None or not complete[1]:
            continue
        attach = next((session.attach for session in list(engine.sessions.values())), None)
        if attach is not None:
            fingerprints = tuple(complete[1])
            model = attach.model or f"fingerprint-{fingerprints[0].hex()}"
            found.append(ModelFacts(model, fingerprints, _block_size(attach.facts)))
    return found


@lru_cache(maxsize=64)
def _block_size(facts: str) -> int:
    """Tokens, from the facts behind a fingerprint; 0: they don't say."""
    try:
        size = json.loads(facts)["block_size"]
    except (ValueError, KeyError, TypeError):
        return 0
    return size if isinstance(size, int) else 0
