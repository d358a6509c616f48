"""What a store has to tell the event stream: in which media each block lies, and what changes.

As `content_log`, but by medium (see `stream_log`). What is said of a block replaces what was said before, so that to
say it twice changes nothing. Shared tiers count too: as far as this store knows.
"""

from __future__ import annotations

from typing import NamedTuple

from raykv.core.stream_log import LIMIT, StreamLog
from raykv.core.tiers import Tiers
from raykv.event_messages import MEDIUM_BIT


class Lying(NamedTuple):
    """`now`: by block the media that it lies in (MEDIUM_BIT), 0: none. The rest as in `content_log.Changes`."""

    fresh: bool
    now: dict[bytes, int]
    whole: bool
    more: bool


class MediaLog:
    """Off until `begin`. Not thread-safe; the owner of the book has the lock."""

    def __init__(self, tiers: Tiers, limit: int = LIMIT) -> None:
        self._tiers = tiers
        self._log = StreamLog(tiers, self._media, limit)
        self.begin, self.stop, self.touch = self._log.begin, self._log.stop, self._log.touch
        self.tiers_changed = self._log.begin_again
        """A tier is asked nothing any more, or there is another one."""

    @property
    def waiting(self) -> int:
        return self._log.waiting

    @property
    def dropped(self) -> int:
        """How often too much was waiting."""
        return self._log.dropped

    def take(self, limit: int) -> Lying:
        """Up to `limit` blocks to tell of next. About a microsecond each."""
        log, now = self._log, dict[bytes, int]()
        fresh, walking = log.take_fresh(), log.walking
        for key, was in log.take(limit):
            media = self._media(key)
            if walking or media != was:
                now[key] = media
        for key in log.walk(limit - len(now), self._tiers.serving.__contains__):
            now[key] = self._media(key)
        return Lying(fresh, now, not log.walking, more=log.walking or bool(log.waiting))

    def _media(self, key: bytes) -> int:
        tiers, found = self._tiers, 0
        for tier in tiers.serving:
            if tiers.tables[tier].find(key) is not None:
                found |= MEDIUM_BIT[tiers.media[tier]]
        return found
