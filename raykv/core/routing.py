"""Which engine gets a request: by what it was seen to hold, by load, and by how its last requests ended.

Pure: the caller says when it is and brings the dice. Times are in seconds on any one steady clock. One thread.

The rule. An engine's cost for a request is the number of requests in its hands, plus what it would have to do that the
best holder would not: AFFINITY times the share of the prompt that it was not seen to hold. Among all whose cost is
within SLACK of the lowest, two are drawn and the cheaper one is taken: with several routers, each of which knows its
own requests only, that keeps them from all running to the same engine.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from raykv.cluster_messages import EngineInfo, EngineRole
from raykv.errors import IntegrityError

AFFINITY: Mapping[EngineRole, float] = {EngineRole.PREFILL: 2.0, EngineRole.DECODE: 8.0, EngineRole.BOTH: 4.0}
"""What holding the whole prompt is worth, in requests in hand. A prefill engine works through its requests one after
the other, so a held prompt is worth about the one that it saves, and a little for the tiers' copy; a decode engine
serves many at once, so one more costs the others little."""
SLACK = 1.0
MAX_AVOID_S = 60.0

CHUNK_CHARS = 256
MAX_CHUNKS = 512
HOLDERS = 4

Prefix = tuple[bytes, ...]
"""A prompt cut into chunks, each named by a hash of all text up to its end: equal hashes, equal prefixes."""


def cut(text: str, salt: str = "") -> Prefix:
    """The prompt's prefix chain; a last chunk that is not full is left out. `salt`: what else decides what is cached,
    such as the model's name. About 1 us for 256 characters."""
    running = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8)
    chain = []
    for end in range(CHUNK_CHARS, min(len(text), CHUNK_CHARS * MAX_CHUNKS) + 1, CHUNK_CHARS):
        running.update(text[end - CHUNK_CHARS : end].encode("utf-8", "surrogatepass"))
        chain.append(running.digest())
    return tuple(chain)


class Residency(Protocol):
    """What is believed about which engine can get at which prompt's blocks. Never blocks; one thread."""

    def held(self, prefix: Prefix, engines: Sequence[EngineInfo]) -> Mapping[str, int]:
        """How many chunks, from the first one on, each engine holds, by its name. A missing name: none."""
        ...

    def saw(self, prefix: Prefix, engine: EngineInfo) -> None:
        """The engine has computed or loaded the whole of this prompt just now."""
        ...


class TextPrefixes:
    """A Residency from nothing but the requests that went by: which engines saw a prefix last, by its text.

    Bounded: the `limit` prefixes used last, HOLDERS engines for each (about 250 bytes a prefix).
    """

    def __init__(self, limit: int = 200_000) -> None:
        self._limit = limit
        self._seen: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def held(self, prefix: Prefix, engines: Sequence[EngineInfo]) -> dict[str, int]:
        left = {engine.name for engine in engines}
        found = dict.fromkeys(left, 0)
        for count, chunk in enumerate(prefix, 1):
            left &= set(self._seen.get(chunk, ()))
            if not left:
                break
            for name in left:
                found[name] = count
        return found

    def saw(self, prefix: Prefix, engine: EngineInfo) -> None:
        # Tail first: the head, which most prompts share, is the last to be forgotten.
        for chunk in reversed(prefix):
            before = self._seen.pop(chunk, ())
            self._seen[chunk] = (engine.name, *(name for name in before if name != engine.name))[:HOLDERS]
        while len(self._seen) > self._limit:
            self._seen.popitem(last=False)

    def check_integrity(self) -> None:
        """Raises IntegrityError if a bound does not hold."""
        if len(self._seen) > self._limit:
            raise IntegrityError(f"{len(self._seen)} prefixes are kept, the limit is {self._limit}")
        for names in self._seen.values():
            if not 1 <= len(names) <= HOLDERS or len(set(names)) < len(names):
                raise IntegrityError(f"a prefix has the holders {names}")


@dataclass(slots=True)
class _Record:
    """One start of one engine: its requests in hand, and how the last ones ended."""

    in_hand: int = 0
    failures: int = 0
    avoid_until: float = 0.0


class RoutingTable:
    """The engines there are, and the choice among them.

    For each request: `choose`, `begin`, then `worked` or `failed` (or neither: it was cancelled), then `end`.
    """

    def __init__(self, residency: Residency, dice: random.Random, avoid_s: float = 2.0) -> None:
        self._residency = residency
        self._dice = dice
        self._avoid_s = avoid_s
        self._engines: dict[str, EngineInfo] = {}
        # By name and url: an engine that was started anew has none of its predecessor's requests and faults.
        self._records: dict[tuple[str, str], _Record] = {}

    @property
    def engines(self) -> tuple[EngineInfo, ...]:
        """All that are known, ready or not."""
        return tuple(self._engines.values())

    def replace(self, engines: Iterable[EngineInfo]) -> None:
        """These are the engines now. What is in the hands of one that left is still counted until its `end`."""
        self._engines = {engine.name: engine for engine in engines}
        current = {_key(engine) for engine in self._engines.values()}
        self._records = {key: record for key, record in self._records.items() if key in current or record.in_hand}

    def choose(
        self,
        roles: Collection[EngineRole],
        prefix: Prefix,
        now: float,
        tried: Collection[str] = (),
        even_avoided: bool = True,
    ) -> EngineInfo | None:
        """The engine for a request, of one of these roles and none of those `tried` (names); None: there is none.

        One that failed lately is taken only if all others did, and not at all unless `even_avoided`.
        """
        fit = [e for e in self._engines.values() if e.ready and e.role in roles and e.name not in tried]
        sound = [e for e in fit if not self.avoided(e, now)]
        if not sound and not even_avoided:
            return None
        candidates = sound or fit
        if not candidates:
            return None
        costs = self.costs(candidates, prefix)
        limit = min(costs.values()) + SLACK
        best = [e for e in candidates if costs[e.name] <= limit]
        return min(self._dice.sample(best, min(2, len(best))), key=lambda e: costs[e.name])

    def costs(self, engines: Sequence[EngineInfo], prefix: Prefix) -> dict[str, float]:
        """The rule above, by name."""
        held = self._residency.held(prefix, engines) if prefix else {}
        return {
            e.name: self.in_hand(e) + AFFINITY[e.role] * (1 - (held.get(e.name, 0) / len(prefix) if prefix else 0))
            for e in engines
        }

    def avoided(self, engine: EngineInfo, now: float) -> bool:
        """It failed, and its time is not over; or it is, and one request is finding out how it does now."""
        record = self._records.get(_key(engine))
        return record is not None and record.failures > 0 and (now < record.avoid_until or record.in_hand > 0)

    def in_hand(self, engine: EngineInfo) -> int:
        """Requests between `begin` and `end`."""
        record = self._records.get(_key(engine))
        return record.in_hand if record is not None else 0

    def begin(self, engine: EngineInfo) -> None:
        """A request goes to this engine."""
        self._records.setdefault(_key(engine), _Record()).in_hand += 1

    def end(self, engine: EngineInfo) -> None:
        """It has left the engine, however it ended."""
        key = _key(engine)
        record = self._records.get(key)
        if record is None or not record.in_hand:
            raise IntegrityError(f"engine {engine.name} has no request that could end")
        record.in_hand -= 1
        if not record.in_hand and (engine.name not in self._engines or _key(self._engines[engine.name]) != key):
            del self._records[key]

    def worked(self, engine: EngineInfo, prefix: Prefix = ()) -> None:
        """It answered. `prefix`: the prompt that it has seen now."""
        record = self._records.get(_key(engine))
        if record is not None:
            record.failures = 0
        if prefix:
            self._residency.saw(prefix, engine)

    def failed(self, engine: EngineInfo, now: float) -> None:
        """It refused, died or was too slow: avoid it for a while, twice as long each time in a row."""
        record = self._records.get(_key(engine))
        if record is None:
            return
        # Many requests fail of one cause: within the time that it is avoided anyway they count once.
        if not record.failures or now >= record.avoid_until:
            record.failures = min(record.failures + 1, 32)
            record.avoid_until = now + min(self._avoid_s * 2.0 ** (record.failures - 1), MAX_AVOID_S)

    def check_integrity(self) -> None:
        """Raises IntegrityError if a count is wrong or a record is kept for nothing."""
        current = {_key(engine) for engine in self._engines.values()}
        for key, record in self._records.items():
            if record.in_hand < 0 or record.failures < 0:
                raise IntegrityError(f"engine {key}: {record}")
            if key not in current and not record.in_hand:
                raise IntegrityError(f"engine {key} left, has nothing in hand and is still recorded")


def _key(engine: EngineInfo) -> tuple[str, str]:
    return engine.name, engine.url
