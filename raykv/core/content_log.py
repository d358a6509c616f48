"""What a store has to tell the Directory: which blocks it holds, and what changes.

How it notes and begins is said in `stream_log`. A copy that goes while another tier has one makes nothing to tell; to
add twice, or to remove what was not added, changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from raykv.core.media_log import MediaLog
from raykv.core.stream_log import LIMIT, StreamLog
from raykv.core.tiers import Tiers


class Changes(NamedTuple):
    """`fresh`: a stream begins with it. `whole`: all that was held at its beginning has been told by now.

    `more`: there is more to take now.
    """

    fresh: bool
    added: list[bytes]
    removed: list[bytes]
    whole: bool
    more: bool


class ContentLog:
    """Off until `begin`. Not thread-safe; the owner of the book has the lock."""

    def __init__(self, tiers: Tiers, limit: int = LIMIT) -> None:
        self._tiers = tiers
        self._log = StreamLog(tiers, tiers.own, limit)
        self.begin, self.stop = self._log.begin, self._log.stop
        self.media = MediaLog(tiers)
        """The same by medium, for the event stream; off until somebody listens."""
        self._touch, self._touch_media = self._log.touch, self.media.touch

    @property
    def waiting(self) -> int:
        return self._log.waiting

    @property
    def dropped(self) -> int:
        """How often too much was waiting."""
        return self._log.dropped

    def touch(self, key: bytes) -> None:
        """The block is about to become READY in a tier, or to cease to be."""
        self._touch_media(key)
        self._touch(key)

    def tier_off(self) -> None:
        """A tier is asked nothing any more: what it alone held is gone."""
        self.media.tiers_changed()
        self._log.begin_again()

    def take(self, limit: int) -> Changes:
        """Up to `limit` keys to tell next. Costs about a microsecond each."""
        added: list[bytes] = []
        removed: list[bytes] = []
        log, held = self._log, self._tiers.own
        fresh, walking = log.take_fresh(), log.walking
        for key, was in log.take(limit):
            if not held(key):
                if was:
                    removed.append(key)
            elif walking or not was:
                added.append(key)
        added += log.walk(limit - len(added) - len(removed), self._told)
        return Changes(fresh, added, removed, not log.walking, more=log.walking or bool(log.waiting))

    def _told(self, tier: int) -> bool:
        return tier in self._tiers.serving and tier not in self._tiers.shared  # what all have is nobody's
