"""Tiers that come, change their size, are emptied and go, while blocks are saved, read and moved.

The theory. A tier goes through the stages of `tier_stages`. To shrink, to drain and to leave is one work: a tier is
*shut* from some slot on (from 0 on, but to shrink), nothing new comes there, and what lies there is emptied, a few
blocks at a time (`next_moves`). A block goes, in this order of preference,

    1. nowhere: it lies in another tier that stays, or the tier is shared (drained, all that it has stays; left, its
       files do);
    2. to a free slot of its own tier that stays (only to shrink);
    3. to the next slower tier that takes blocks, as by a cascade;
    4. to a faster one, where that loses nothing there;
    5. else it stays where it is, found as before (DRAINING), or is lost (SHRINKING, LEAVING).

Of a tier whose medium has failed nothing can be copied: all of it is lost.

A move to another tier copies first and retires its source after: the block is always found. In its own tier a key has
one slot at most, so there the source is retired first, and for the time of one copy the block is a miss. Retired
slots are read by those who hold pins on them, and come free with the last pin. A tier is empty when all its shut slots
are free or out of use; only then are they given away, and never before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from raykv.core.moves import Moves
from raykv.core.operator_pins import OperatorPins
from raykv.core.slot_table import SlotTable
from raykv.core.store_plans import Move, MoveEnd, Place
from raykv.core.tier_stages import NEXT, Change, Stage
from raykv.core.tier_steps import Emptied, OpenMoves, Step
from raykv.core.tiers import Tiers
from raykv.errors import IntegrityError
from raykv.store_messages import Medium

SCAN = 512
"""So many slots one call looks at: tens of microseconds to a few hundred under the book's lock."""


class TierChanges:
    """Not thread-safe; the owner of the book has the lock. A tier is worked on by one caller at a time."""

    def __init__(self, tiers: Tiers, moves: Moves, touch: Callable[[bytes], None]) -> None:
        """`touch`: that of new tables (`SlotTable.touch`)."""
        self._tiers, self._moves, self._touch = tiers, moves, touch
        self._stages: dict[int, Stage] = {}
        self._cursor: dict[int, int] = {}
        self._open = OpenMoves()

    def follow(self, moved: Callable[[bytes, Place], None], pins: OperatorPins) -> None:
        """`moved` is called when a block is READY in another place and about to leave its old one: with its key and
        that one. `pins` keep what is moved within its tier."""
        self._open.moved, self._open.pins = moved, pins

    def stage(self, tier: int) -> Stage:
        return self._stages.get(tier, Stage.SERVING)

    # -- steps ----------------------------------------------------------------------------------------------

    def _step(self, tier: int, change: Change) -> None:
        stage = self.stage(tier)
        after = NEXT.get((stage, change))
        if after is None or tier not in self._tiers.order:
            raise IntegrityError(f"tier {tier} is {stage.value}: it can't {change.value}")
        self._stages[tier] = after

    def shrink(self, tier: int, slots: int) -> int:
        """Begin to empty the slots from `slots` on; how many blocks those are about."""
        table = self._tiers.tables[tier]
        if not 0 < slots < table.slots:
            raise IntegrityError(f"a tier of {table.slots} slots can't shrink to {slots}")
        self._step(tier, Change.SHRINK)
        return self._shut(tier, slots)

    def drain(self, tier: int) -> int:
        """Nothing new goes to the tier; how many blocks there are. A shared one's stay: all nodes read them."""
        self._step(tier, Change.DRAIN)
        self._tiers.shut.add(tier)
        return self._shut(tier, self._tiers.tables[tier].slots if tier in self._tiers.shared else 0)

    def leave(self, tier: int) -> int:
        """The tier is to go: it is not asked any more, and what is left in it is lost. How many blocks that is."""
        others = [other for other in self._tiers.order if other != tier and other not in self._tiers.shared]
        if all(self.stage(other) is Stage.LEAVING for other in others):
            raise IntegrityError(f"tier {tier} is the last one of this node's own")
        self._step(tier, Change.LEAVE)
        self._tiers.shut.add(tier)
        return self._shut(tier, 0)

    def _shut(self, tier: int, limit: int) -> int:
        table = self._tiers.tables[tier]
        table.shut(limit)
        self._cursor[tier] = limit
        return table.used if limit == 0 else sum(1 for slot in range(limit, table.slots) if table.is_used(slot))

    def reopen(self, tier: int) -> list[Place]:
        """A drained tier takes blocks again. Clear the headers of what is returned."""
        table = self._tiers.tables[tier]
        if table.retired:
            raise IntegrityError(f"tier {tier} has retired slots that are still read")
        self._step(tier, Change.REOPEN)
        stale = [Place(tier, slot) for slot in table.free_slots(table.limit)]
        table.shut(table.slots)
        self._tiers.shut.discard(tier)
        return stale

    def settle(self, tier: int) -> list[Place]:
        """It has shrunk or is drained. Clear the headers of what is returned: what was there lies elsewhere."""
        table = self._tiers.tables[tier]
        shrunk = self.stage(tier) is Stage.SHRINKING
        if table.retired or table.writing_from(table.limit) or (shrunk and table.occupied_from(table.limit)):
            raise IntegrityError(f"tier {tier} still holds something that is to leave it")
        self._step(tier, Change.SETTLE)
        stale = [Place(tier, slot) for slot in table.free_slots(table.limit)]
        if shrunk:
            table.resize(table.limit)
            self._moves.sized(tier)
        return stale

    # -- the set of tiers -----------------------------------------------------------------------------------

    def grow(self, tier: int, slots: int) -> None:
        """The tier has more slots now."""
        table = self._tiers.tables[tier]
        if self.stage(tier) is not Stage.SERVING or slots < table.slots:
            raise IntegrityError(f"tier {tier} ({self.stage(tier).value}, {table.slots} slots) can't grow to {slots}")
        table.resize(slots)
        self._moves.sized(tier)

    def add(self, table: SlotTable, medium: Medium, position: int, drained: bool = False) -> int:
        """One more tier behind `position` others: its number. `StoreBook.recovered` tells what it holds already."""
        table.touch = self._touch
        tier = self._tiers.add(table, medium, position)
        self._moves.sized(tier)
        self._stages.pop(tier, None)
        if drained:
            self.be_drained(tier)
        return tier

    def be_drained(self, tier: int) -> None:
        """The tier was drained in an earlier life."""
        self.drain(tier)
        self._stages[tier] = Stage.DRAINED

    def remove(self, tier: int) -> None:
        """A tier that leaves is empty, and gone with this."""
        if self.stage(tier) is not Stage.LEAVING:
            raise IntegrityError(f"tier {tier} is {self.stage(tier).value}: it can't be removed")
        self._tiers.remove(tier)
        self._moves.removed(tier)
        del self._stages[tier], self._cursor[tier]

    def queue_again(self, tier: int, first: int, most: int) -> int | None:
        """Blocks of a tier that has another slower one now are to be copied there, where the cascade does that at once.

        Looks at `most` slots from `first` on; where to go on, None at the end.
        """
        table = self._tiers.tables[tier]
        if tier not in self._tiers.serving or self._tiers.below(tier) is None:
            return None
        for slot in range(first, min(first + most, table.slots)):
            if table.is_ready(slot):
                self._moves.committed(tier, table.key(slot))
        return first + most if first + most < table.slots else None

    # -- emptying -------------------------------------------------------------------------------------------

    def is_empty(self, tier: int) -> bool:
        """Whether nothing is in the shut slots of a tier, and nobody reads there."""
        table = self._tiers.tables[tier]
        return not table.occupied_from(table.limit)

    def rests(self, tier: int) -> bool:
        """Whether no shut slot is written, read for a move, or retired and still read by somebody."""
        table = self._tiers.tables[tier]
        return not (table.retired or table.writing_from(table.limit) or self._open.any_of(tier))

    def next_moves(self, tier: int, most: int) -> Emptied:
        """Go on to empty the shut slots: up to `most` copies, each ended by `end`."""
        table, stage = self._tiers.tables[tier], self.stage(tier)
        if stage in (Stage.SERVING, Stage.DRAINED):
            raise IntegrityError(f"tier {tier} is {stage.value}: nothing is to leave it")
        if stage is Stage.LEAVING and tier in self._tiers.serving:
            self._tiers.serving.remove(tier)
        step = Step(self._tiers, self._moves, self._open, tier, stage, most)
        slot = self._cursor[tier]
        for _ in range(SCAN):
            found = table.ready_from(slot)
            if found is None:
                step.flush()
                self._cursor[tier] = table.limit
                return step.result(round_over=True)
            slot = found + 1
            if step.take(found):
                break
        step.flush()
        self._cursor[tier] = slot
        return step.result(round_over=False)

    def end(self, move: Move, ok: bool, bad_source: bool) -> MoveEnd:
        """A copy has ended. As `Moves.end`."""
        keepers = self._open.end(move)
        tiers, (key, source, target) = self._tiers, move
        inside = source.tier == target.tier
        if bad_source:
            tiers.quarantine(source)
        # A source that somebody else found bad meanwhile may have been bad already when it was copied.
        good = ok and not bad_source and target.tier in tiers.serving and (inside or tiers.is_ready(source))
        if good:
            tiers.tables[target.tier].publish(target.slot)
            self._moves.committed(target.tier, key)
            self._open.leaves(key, source)
            if not inside:
                tiers.tables[source.tier].retire(source.slot)
            elif self._open.pins is not None:
                self._open.pins.keep_again(key, keepers, target)
        else:
            tiers.discard([target])
        tiers.unpin([source])
        return MoveEnd(publish=((key, target),)) if good else MoveEnd()

    def runs(self, move: Move) -> bool:
        """Whether it is a move of this book's that has not ended."""
        return self._open.runs(move)

    def pinned(self) -> Counter[Place]:
        """By place: how many pins are these moves'."""
        return self._open.pinned()

    def targets(self) -> list[Place]:
        """The places that these moves write."""
        return self._open.targets()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless stages, shut tiers and shut slots agree."""
        tiers = self._tiers
        for tier in tiers.order:
            stage, table = self.stage(tier), tiers.tables[tier]
            emptied = stage in (Stage.DRAINING, Stage.DRAINED, Stage.LEAVING)
            stays = tier in tiers.shared and stage is not Stage.LEAVING
            if emptied != (tier in tiers.shut) or (table.limit == 0) != (emptied and not stays):
                raise IntegrityError(f"tier {tier} is {stage.value}, and its slots are shut from {table.limit} on")
            if (stage is Stage.SERVING or stays) != (table.limit == table.slots):
                raise IntegrityError(f"tier {tier} is {stage.value} with {table.limit} of {table.slots} slots open")
        if set(self._stages) - set(tiers.order) or tiers.shut - set(tiers.order):
            raise IntegrityError("a tier that is gone has a stage")
        self._open.check_integrity()


def position_of(medium: Medium, present: Sequence[Medium]) -> int:
    """Behind how many of these tiers (fastest first) one of this medium goes: the order of media is fixed."""
    order = list(Medium)
    return sum(order.index(other) < order.index(medium) for other in present)
