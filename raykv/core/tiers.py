"""The tiers of a store as one index: where a block is, which tier comes next, who makes room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raykv.core.eviction import make_policy
from raykv.core.slot_table import SlotState, SlotTable
from raykv.core.store_plans import Place, Published, Row, Run, TierFigures, row_of, runs_of
from raykv.errors import IntegrityError
from raykv.store_messages import HASH_NBYTES, Eviction, Medium

WINDOW = 256
"""So many more of the coldest blocks than are needed are looked at for those that lie in a slower tier too. Without an
end, one save could go through a whole tier; and to keep a cold block at the price of a hot one is a poor trade."""


def _nothing() -> SlotTable:
    """In the place of a tier that was removed."""
    return SlotTable(1, make_policy(Eviction.LRU, 1))


class Tiers:
    """Tables by number, which a tier keeps while it lives. `order` lists those that are, fastest first; `serving` those
    of them that are asked: a tier that is off keeps its table and is asked nothing any more. To a tier that is *shut*
    nothing new goes, and nothing counts as safe because it lies there; what it has is found."""

    def __init__(self, tables: Sequence[SlotTable], media: Sequence[Medium]) -> None:
        if not tables or len(tables) != len(media):
            raise ValueError(f"a store needs a medium for each of its tables: {len(tables)} tables, {len(media)} media")
        self.tables = list(tables)
        self.media = list(media)
        self.shared = {tier for tier, medium in enumerate(media) if medium is Medium.FS}
        """Whose blocks all nodes have: written by a move alone, when they are committed; its slots are entries."""
        for tier in self.shared:
            tables[tier].entries_only = True
        self.order = list(range(len(tables)))
        self.serving = list(self.order)
        self.shut: set[int] = set()
        self._position = list(self.order)  # by number: how many tiers are faster; -1: there is no such tier
        self.dropped = 0
        self.hits = [0] * len(tables)
        self.bad_reads = [0] * len(tables)
        self._off = [""] * len(tables)

    # -- questions ------------------------------------------------------------------------------------------

    @property
    def fastest(self) -> int | None:
        """Where saves go, and what is promoted."""
        return next((tier for tier in self.serving if tier not in self.shared and tier not in self.shut), None)

    def below(self, tier: int) -> int | None:
        """The next slower tier that serves and takes blocks."""
        return next((other for other in self.serving if self.slower(other, tier) and other not in self.shut), None)

    def slower(self, tier: int, other: int) -> bool:
        """Whether a tier comes behind another one."""
        return self._position[tier] > self._position[other]

    def is_off(self, tier: int) -> bool:
        """Whether its medium has failed for good."""
        return bool(self._off[tier])

    def of(self, medium: Medium) -> int | None:
        """The number of the tier with this medium."""
        return next((tier for tier in self.order if self.media[tier] is medium), None)

    def find(self, key: bytes) -> Place | None:
        """The fastest place where the block is READY."""
        for tier in self.serving:
            slot = self.tables[tier].find(key)
            if slot is not None:
                return Place(tier, slot)
        return None

    def own(self, key: bytes) -> bool:
        """Whether the block is READY in a tier of this node's own."""
        place = self.find(key)
        return place is not None and place.tier not in self.shared

    def run(self, head: bytes, hashes: bytes, first: int) -> Run | None:
        """The fastest place where block `first` of a prompt is READY, with those behind it that lie in a row there and
        nowhere faster. See `prefix.Index`."""
        for at, tier in enumerate(self.serving):
            found = self.tables[tier].run(head, hashes, first)
            if found is not None:
                slot, count = found
                return Run(tier, slot, self._until_faster(at, head, hashes, first, count) if at else count)
        return None

    def _until_faster(self, at: int, head: bytes, hashes: bytes, first: int, count: int) -> int:
        """How many of these blocks come before one that is READY in a tier before number `at` of those that serve."""
        numbers = range(first + 1, first + count)
        keys = [head + hashes[HASH_NBYTES * i : HASH_NBYTES * (i + 1)] for i in numbers]
        faster = [self.tables[tier] for tier in self.serving[:at]]
        if not any(table.holds_any(keys) for table in faster):
            return count
        up = (i for i, key in enumerate(keys, 1) if any(table.find(key) is not None for table in faster))
        return next(up, count)

    def slowest(self, n: int, rows: Sequence[Row]) -> tuple[Medium, ...]:
        """By block of a prefix: the slowest medium that a row has it in."""
        tiers = sorted({run.tier for row in rows for run in row.runs}, key=self._position.__getitem__)
        if len(tiers) == 1:
            return (self.media[tiers[0]],) * n
        found = bytearray((tiers[0],)) * n
        for tier in tiers[1:]:  # the slower one comes later and overwrites
            for row in rows:
                at = row.first
                for run in row.runs:
                    if run.tier == tier:
                        found[at : at + run.length] = bytes((tier,)) * run.length
                    at += run.length
        return tuple([self.media[tier] for tier in found])

    def being_written(self, key: bytes) -> bool:
        """For a block that is READY nowhere: whether it is under way."""
        return any(self.tables[tier].holds(key) for tier in self.serving)

    def backed(self, tier: int, slot: int) -> bool:
        """Whether the block of a slot is READY in a slower tier too, so that nothing is lost with the slot."""
        key = self.tables[tier].key(slot)
        return any(
            self.slower(other, tier) and other not in self.shut and self.tables[other].find(key) is not None
            for other in self.serving
        )

    def key(self, place: Place) -> bytes:
        """The block in a place that is WRITING or READY."""
        return self.tables[place.tier].key(place.slot)

    def is_ready(self, place: Place) -> bool:
        return self.tables[place.tier].state(place.slot) is SlotState.READY

    def may_go(self, place: Place) -> bool:
        """Whether the place holds a block that is found, and nobody holds it."""
        return place.tier in self.serving and self.is_ready(place) and not self.tables[place.tier].pins(place.slot)

    # -- which tiers there are ------------------------------------------------------------------------------

    def add(self, table: SlotTable, medium: Medium, position: int) -> int:
        """One more tier, behind `position` others: its number."""
        free = (number for number, at in enumerate(self._position) if at < 0)
        tier = next(free, len(self.tables))
        if tier == len(self.tables):
            self.tables.append(table)
            self.media.append(medium)
            for by_tier in (self.hits, self.bad_reads, self._position):
                by_tier.append(0)
            self._off.append("")
        self.tables[tier], self.media[tier], self._off[tier] = table, medium, ""
        self.hits[tier] = self.bad_reads[tier] = 0
        self.order.insert(position, tier)
        if medium is Medium.FS:
            self.shared.add(tier)
            table.entries_only = True
        self._count_positions()
        self.serving = [one for one in self.order if one in self.serving or one == tier]
        return tier

    def remove(self, tier: int) -> None:
        """The tier is gone: it holds nothing, and nobody has a pin there. Its number may be another one's later."""
        if tier not in self.order or len(self.order) < 2:
            raise IntegrityError(f"tier {tier} is no tier, or the last one")
        if self.tables[tier].occupied_from(0):
            raise IntegrityError(f"tier {tier} still holds something")
        self.order.remove(tier)
        self.shared.discard(tier)
        self.shut.discard(tier)
        self.tables[tier] = _nothing()
        self.serving = [one for one in self.serving if one != tier]
        self._count_positions()

    def _count_positions(self) -> None:
        self._position = [-1] * len(self.tables)
        for position, tier in enumerate(self.order):
            self._position[tier] = position

    # -- changes --------------------------------------------------------------------------------------------

    def off(self, tier: int, why: str) -> None:
        """The tier is asked nothing any more. `why`: for people."""
        if tier in self.serving:
            self.serving.remove(tier)
            self._off[tier] = why or "switched off"

    def pin(self, places: Iterable[Place]) -> None:
        self.pin_runs(runs_of(places))

    def unpin(self, places: Iterable[Place]) -> None:
        self.unpin_runs(runs_of(places))

    def pin_runs(self, runs: Iterable[Run]) -> None:
        """One more reads these READY slots."""
        for tier, slot, count in runs:
            self.tables[tier].pin(slot, count)

    def unpin_runs(self, runs: Iterable[Run]) -> None:
        """That one no longer reads them."""
        for tier, slot, count in runs:
            self.tables[tier].unpin(slot, count)

    def use(self, runs: Iterable[Run]) -> None:
        """Blocks of a prompt were asked for; what comes last is kept longest (see `prefix.tail_first`)."""
        for tier, slot, count in runs:
            self.tables[tier].use(slot, count)

    def read(self, runs: Iterable[Run]) -> None:
        """Blocks of a prompt were found and are pinned; in the order of `use`."""
        for tier, slot, count in runs:
            self.tables[tier].read(slot, count)
            self.hits[tier] += count

    def publish(self, places: Sequence[Place]) -> list[Published]:
        """Blocks of a prompt are complete, in its order; added as they are used, tail first."""
        for place in reversed(places):
            self.tables[place.tier].publish(place.slot)
        return [(self.key(place), place) for place in places]

    def discard(self, places: Iterable[Place]) -> None:
        """What was written there is not to be seen: WRITING → FREE."""
        for place in places:
            self.tables[place.tier].discard(place.slot)

    def evict(self, places: Iterable[Place]) -> None:
        """Throw these out; READY ones without a pin."""
        for tier, slot in places:
            self.tables[tier].evict([slot])

    def quarantine(self, place: Place) -> bool:
        """A read of the place failed its check. False if it is quarantined already."""
        if not self.is_ready(place):
            return False
        self.tables[place.tier].quarantine(place.slot)
        self.bad_reads[place.tier] += place.tier not in self.shared  # there it is most likely gone, not bad
        return True

    def adopt(self, tier: int, keys: Sequence[bytes]) -> tuple[list[Published], list[Place]]:
        """These blocks are READY in a shared tier: the entries made for them, and those forgotten for want of room."""
        table = self.tables[tier]
        new = [key for key in dict.fromkeys(keys) if not table.holds(key)] if tier in self.serving else []
        forgotten = self.make_room(tier, len(new))
        new = sorted(new[: table.free], key=row_of)  # a look-up goes by runs of one row
        places = [Place(tier, slot) for slot in table.reserve(new) or []]
        return self.publish(places), forgotten

    def make_room(self, tier: int, slots: int, lossless: bool = False) -> list[Place]:
        """Evict until so many slots are free, as far as pins allow: the coldest, but first what a slower tier has too.

        `lossless`: nothing else. What is lost is counted as dropped.
        """
        table = self.tables[tier]
        short = slots - table.free
        if short <= 0:
            return []
        victims = table.evictable(short)
        if self.below(tier) is not None and not all(self.backed(tier, slot) for slot in victims):
            safe: list[int] = []
            lost: list[int] = []
            for slot in table.evictable(short + WINDOW):
                (safe if self.backed(tier, slot) else lost).append(slot)
            lost = [] if lossless else lost[: max(0, short - len(safe))]
            victims = safe[:short] + lost
            self.dropped += len(lost)
        elif self.below(tier) is None and lossless:
            return []
        table.evict(victims)
        return [Place(tier, slot) for slot in victims]

    # -- figures --------------------------------------------------------------------------------------------

    def figures(self) -> tuple[TierFigures, ...]:
        """Counts of this moment, fastest tier first."""
        return tuple(
            TierFigures(
                medium=self.media[tier],
                slots=table.slots,
                used=table.used,
                writing=table.writing,
                quarantined=table.quarantined,
                pinned=table.used - table.num_evictable,
                evicted=table.evicted,
                hits=self.hits[tier],
                bad_reads=self.bad_reads[tier],
                off=self._off[tier],
                tier=tier,
                shut=tier in self.shut,
            )
            for tier, table in ((tier, self.tables[tier]) for tier in self.order)
        )

    def check_integrity(self, pinned: dict[Place, int], writing: Sequence[Place]) -> None:
        """Raise IntegrityError unless these are all pins and all places being written, and the tables are sound."""
        if len(set(writing)) != len(writing):
            raise IntegrityError("a place has two writers")
        for tier, table in enumerate(self.tables):
            table.check_integrity()
            mine = {place.slot for place in writing if place.tier == tier}
            if mine != set(table.in_state(SlotState.WRITING)):
                raise IntegrityError(f"tier {tier}: WRITING slots without a writer, or writers without a slot")
            owned = {place.slot: pins for place, pins in pinned.items() if place.tier == tier}
            found = table.pinned()
            if owned != found:
                raise IntegrityError(f"tier {tier}: pins {found}, but their owners have {owned}")
