"""Whose blocks a store holds, which of them are kept, and what became of the others: fed by the tables' own changes.

The theory. A table calls its `touch` just before a block becomes READY there or ceases to be, whoever has it do so. So
the census, the tenants' shares, the operators' pins and the memory of what went follow every change, and none of the
many ways in and out has to think of them. Only whose block it is must be said by who brings it: `put` comes before the
slot is READY, and `take` after a slot that never was.

What a move copies within one tier leaves its old slot first, pinned: its tenant waits in `_limbo` for the move's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from raykv.admin_messages import NO_TENANT
from raykv.core.absences import Absences
from raykv.core.census import Census
from raykv.core.operator_pins import OperatorPins
from raykv.core.slot_table import SlotState, SlotTable
from raykv.core.store_plans import Move, Place, Published
from raykv.core.tenants import NOBODY, Tenants
from raykv.core.tiers import Tiers
from raykv.engine_messages import Why
from raykv.store_messages import Medium


class WatchedTiers(Tiers):
    """Tiers that say when there is one more."""

    added: Callable[[int, SlotTable], None] | None = None

    def add(self, table: SlotTable, medium: Medium, position: int) -> int:
        tier = super().add(table, medium, position)
        if self.added is not None:
            self.added(tier, table)
        return tier


class Contents:
    """Not thread-safe; the owner of the book has the lock."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self.absences = Absences()
        self.census = Census()
        self.tenants = Tenants(tiers.shared)
        self.pins = OperatorPins(tiers)
        self._limbo: dict[Place, bytes] = {}

    def touch(self, tier: int, table: SlotTable, key: bytes) -> None:
        """The block is about to become READY in a tier, or to cease to be."""
        slot = table.find(key)
        if slot is None:
            self.census.came(tier, key)
            return
        self.census.went(tier, key)
        self.absences.left(key)
        if not self.tenants.any and not self.pins.any:
            return
        place = Place(tier, slot)
        if self.tenants.any:
            if table.pins(slot) and self.tenants.of(place):
                self._limbo[place] = self.tenants.tag(place)
            self.tenants.take(place)
        self.pins.lost(key, place)

    # -- tenants --------------------------------------------------------------------------------------------

    def discarded(self, places: Sequence[Place]) -> None:
        """These slots were written and never READY."""
        if self.tenants.any:
            for place in places:
                self.tenants.take(place)

    @contextmanager
    def moved(self, move: Move) -> Iterator[list[Published]]:
        """Around the end of a copy, which puts what it has published into the list: it is the same tenant's."""
        published: list[Published] = []
        limbo = self._limbo.pop(move.source, NO_TENANT)
        number = self.tenants.of(move.source) or self.tenants.number(limbo)
        self.tenants.put(move.target, number)
        yield published
        if number and not published:
            self.tenants.take(move.target)

    def within_quotas(
        self, wanted: dict[bytes, int], tags: Sequence[bytes], may: Callable[[Place], bool]
    ) -> tuple[list[Place], set[bytes]]:
        """What is to be thrown out for these blocks (keys, by index into `tags`) by the quotas of their tenants: his
        own coldest; and the blocks for which that does not suffice, the last ones, which are not to be saved."""
        by_tenant: dict[bytes, list[bytes]] = {}
        for key, index in wanted.items():
            by_tenant.setdefault(tags[index], []).append(key)
        victims: list[Place] = []
        refused: set[bytes] = set()
        for tag, keys in by_tenant.items():
            number = self.tenants.known(tag)
            over = self.tenants.over(number, len(keys)) if number is not None else 0
            if number is None or not over:
                continue
            mine = self.tenants.victims(number, over, may)
            victims += mine
            if over > len(mine):
                late = keys[max(0, len(keys) - (over - len(mine))) :]
                self.tenants.refused(number, len(late))
                refused.update(late)
        for key in refused:
            self.absences.note(key, Why.OVER_QUOTA)
        return victims, refused

    def reserved(self, slot_of: Sequence[tuple[int, Place]], tags: Sequence[bytes]) -> None:
        """These slots are written for a save, each by index into `tags`."""
        for index, place in slot_of:
            if tags[index] != NO_TENANT:
                self.tenants.put(place, self.tenants.number(tags[index]))

    # -- pins -----------------------------------------------------------------------------------------------

    def elsewhere(self, key: bytes, place: Place) -> None:
        """The block is READY in another place too, and about to leave this one: who keeps it keeps it there."""
        for tier in self._tiers.serving:
            slot = self._tiers.tables[tier].find(key)
            if slot is not None and (tier, slot) != place and tier not in self._tiers.shared:
                self.pins.hand_on(key, place, Place(tier, slot))
                return

    def check_integrity(self) -> None:
        """Raise IntegrityError unless all of it agrees with the tables. Reads every slot."""
        tiers = self._tiers
        self.absences.check_integrity()
        self.pins.check_integrity()
        ready = [table.in_state(SlotState.READY) for table in tiers.tables]
        self.census.check_integrity([map(t.key, slots) for t, slots in zip(tiers.tables, ready, strict=True)])
        held = [{*r, *t.in_state(SlotState.WRITING)} for r, t in zip(ready, tiers.tables, strict=True)]
        self.tenants.check_integrity(held)


__all__ = ["NOBODY", "Contents", "WatchedTiers"]
