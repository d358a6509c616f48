"""Moves between tiers: down before (or because) a slot is needed, up again what is read twice.

The theory. A move copies; it never leaves a block without a place. Its source is pinned and its target WRITING from
the decision to `end`. Then the target is published if the copy is good, and, with Cascade.EVICT, the source is freed
if its tier still wants for slots: until then both stay, and a block that lies in a slower tier too is what
`Tiers.make_room` takes first.

Cascade.WRITE keeps a queue of committed keys for each tier, bounded by the tier's slots: when the slower tier does not
keep up, new keys are left out and counted. Cascade.EVICT asks the policy: of the slots that are to be free, those that
are not and whose block would be lost are copied.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from zlib import crc32

from raykv.core.eviction import Ghosts
from raykv.core.store_plans import Move, MoveEnd, MovePlan, Place
from raykv.core.tiers import Tiers
from raykv.errors import IntegrityError
from raykv.store_messages import Cascade


class Moves:
    """The running copies between tiers and what is to be copied next. Not thread-safe."""

    def __init__(self, tiers: Tiers, cascade: Cascade, low: float, queue_limit: int | None) -> None:
        self._tiers = tiers
        self._cascade = cascade
        self._share, self._queue_limit = low, queue_limit
        self._low: dict[int, int] = {}
        self._queues: dict[int, deque[bytes]] = {}
        self._limits: dict[int, int] = {}
        for tier in tiers.order:
            self.sized(tier)
        self._open: dict[Place, Move] = {}  # by target
        self._read_once = Ghosts(tiers.tables[0].slots)
        self.demoted = self.promoted = self.overflows = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Keys in the queues; some may be gone by now."""
        return sum(len(queue) for queue in self._queues.values())

    def sized(self, tier: int) -> None:
        """A tier is new, or has another number of slots."""
        slots = self._tiers.tables[tier].slots
        self._low[tier] = max(1, int(slots * self._share))
        self._limits[tier] = slots if self._queue_limit is None else self._queue_limit
        self._queues.setdefault(tier, deque())

    def removed(self, tier: int) -> None:
        """A tier is gone."""
        del self._low[tier], self._limits[tier], self._queues[tier]

    def moving(self, place: Place) -> bool:
        """Whether a running copy reads the place."""
        return any(move.source == place for move in self._open.values())

    # -- down -----------------------------------------------------------------------------------------------

    def committed(self, tier: int, key: bytes) -> None:
        """A block is READY in a tier now."""
        if self._cascade is not Cascade.WRITE or self._tiers.below(tier) is None:
            return
        if len(self._queues[tier]) < self._limits[tier]:
            self._queues[tier].append(key)
        else:
            self.overflows += 1

    def next_demotions(self, limit: int) -> MovePlan:
        """Up to `limit` moves to the next slower tier."""
        moves: list[Move] = []
        clear: list[Place] = []
        for tier in self._tiers.serving:
            target = self._tiers.below(tier)
            if len(moves) >= limit:
                break
            if target is None or tier in self._tiers.shut:  # what leaves a tier for good is `tier_changes`' business
                continue
            if self._cascade is Cascade.WRITE:
                slots = self._queued(tier, target, limit - len(moves))
            else:
                slots = self._cold(tier, target, limit - len(moves))
            begun = self._begin([Place(tier, slot) for slot in slots], target)
            moves.extend(begun.moves)
            clear.extend(begun.clear)
            if self._cascade is Cascade.WRITE:  # no room: they come first next time
                table = self._tiers.tables[tier]
                self._queues[tier].extendleft(table.key(slot) for slot in reversed(slots[len(begun.moves) :]))
        return MovePlan(tuple(moves), tuple(clear))

    def _queued(self, tier: int, target: int, limit: int) -> list[int]:
        queue, table, slower = self._queues[tier], self._tiers.tables[tier], self._tiers.tables[target]
        slots: dict[int, None] = {}  # a key may wait twice: evicted and saved again
        while queue and len(slots) < limit:
            key = queue.popleft()
            slot = table.find(key)
            if slot is not None and not slower.holds(key):
                slots[slot] = None
        return list(slots)

    def _cold(self, tier: int, target: int, limit: int) -> list[int]:
        table, slower = self._tiers.tables[tier], self._tiers.tables[target]
        slower_than = self._tiers.slower
        on_their_way = sum(
            move.source.tier == tier and slower_than(move.target.tier, tier) for move in self._open.values()
        )
        wanted = self._low[tier] - table.free - on_their_way
        if wanted <= 0:
            return []
        return [slot for slot in table.evictable(wanted) if not slower.holds(table.key(slot))][:limit]

    # -- up -------------------------------------------------------------------------------------------------

    def begin_promotion(self, places: Sequence[Place]) -> MovePlan:
        """Those of the places, read now, that are copied to the fastest tier."""
        fastest = self._tiers.fastest
        if fastest is None:
            return MovePlan()
        wanted: dict[bytes, Place] = {}
        for place in places:
            if not self._tiers.slower(place.tier, fastest) or not self._tiers.is_ready(place):
                continue
            key = self._tiers.key(place)
            if key in wanted or self._tiers.tables[fastest].holds(key):
                continue
            if self._read_once.take(crc32(key)):
                wanted[key] = place
            else:
                self._read_once.add(crc32(key))
        plan = self._begin(list(wanted.values()), fastest, lossless=True)
        for key in list(wanted)[len(plan.moves) :]:  # no room now; its next read asks again
            self._read_once.add(crc32(key))
        return plan

    # -- both -----------------------------------------------------------------------------------------------

    def _begin(self, sources: Sequence[Place], target: int, lossless: bool = False) -> MovePlan:
        """As many moves as there is room for, from the first on."""
        table = self._tiers.tables[target]
        self._tiers.pin(sources)  # making room must not take them
        clear = self._tiers.make_room(target, len(sources), lossless)
        self._tiers.unpin(sources[table.free :])
        sources = sources[: table.free]
        keys = [self._tiers.key(source) for source in sources]
        slots = table.reserve(keys) or []
        moves = [Move(k, s, Place(target, slot)) for k, s, slot in zip(keys, sources, slots, strict=True)]
        self._open.update((move.target, move) for move in moves)
        return MovePlan(tuple(moves), tuple(clear))

    def end(self, move: Move, ok: bool, bad_source: bool) -> MoveEnd:
        """A copy has ended."""
        if self._open.get(move.target) != move:
            raise IntegrityError(f"{move} does not run")
        del self._open[move.target]
        tiers, (key, source, target) = self._tiers, move
        tiers.unpin([source])
        if bad_source:
            tiers.quarantine(source)
        # A source that somebody else found bad meanwhile may have been bad already when it was copied.
        if not ok or bad_source or not tiers.is_ready(source) or target.tier not in tiers.serving:
            tiers.discard([target])
            return MoveEnd()
        tiers.tables[target.tier].publish(target.slot)
        self.committed(target.tier, key)
        if tiers.slower(source.tier, target.tier):
            self.promoted += 1
            return MoveEnd(publish=((key, target),))
        self.demoted += 1
        left = tiers.tables[source.tier]
        if self._cascade is Cascade.WRITE or left.free >= self._low[source.tier] or left.pins(source.slot):
            return MoveEnd(publish=((key, target),))
        left.evict([source.slot])
        return MoveEnd(publish=((key, target),), clear=(source,))

    def pinned(self) -> Counter[Place]:
        """By place: how many pins are moves'."""
        return Counter(move.source for move in self._open.values())

    def targets(self) -> list[Place]:
        """The places that moves write."""
        return list(self._open)
