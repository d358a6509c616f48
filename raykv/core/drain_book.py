"""What a store that is drained has still to move, and what another one takes of it.

The theory. Only the host tier is moved: who reads by NIXL reads memory, and a disk may come back with its node. A block
is *settled* when it was seen to lie at one of the places (numbered by the caller) where others find it. Settled is a
remark about a slot and its block, not a state: the block stays READY here and is served until the store ends. A place
that fails is doubted as a whole (`doubt`), and what was settled there is to be moved again, which costs a question
where it is there after all.

While its bytes are read for a move a slot has a pin, from `begin` to `end`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

from raykv.core.slot_table import SlotState
from raykv.core.store_plans import Place, Published
from raykv.core.tiers import Tiers
from raykv.errors import IntegrityError
from raykv.store_messages import Cascade, Medium

NOWHERE = 0
"""Not settled."""
HOPELESS = 1
"""In place of a place: it can't be moved (its bytes are bad), and is not tried again."""
FIRST_PLACE, LAST_PLACE = 2, 255


class DrainBook:
    """Both sides of a drain. Not thread-safe; the owner of the book has the lock."""

    def __init__(self, tiers: Tiers, cascade: Cascade, low: float) -> None:
        self._tiers, self._cascade, self._low = tiers, cascade, low
        self._open: Counter[Place] = Counter()
        self._where = bytearray()  # by slot, and empty until a drain begins
        self._what = array("q")  # by slot: a digest of the block that is settled
        self.settled = 0
        """Blocks that lie elsewhere, since `start`."""

    @property
    def _tier(self) -> int | None:
        tier = self._tiers.of(Medium.HOST)
        return tier if tier in self._tiers.serving else None

    @property
    def _taking(self) -> int | None:
        """The host tier, if that is where new blocks go."""
        tier = self._tier
        return tier if tier == self._tiers.fastest else None

    # -- the store that is drained --------------------------------------------------------------------------

    def start(self) -> None:
        """Nothing is settled."""
        self._where, self._what, self.settled = bytearray(), array("q"), 0
        self._fit()

    def _fit(self) -> None:
        """The tier may have grown, or have come, since."""
        more = (self._tiers.tables[self._tier].slots if self._tier is not None else 0) - len(self._where)
        self._where.extend(bytes(max(0, more)))
        self._what.extend(array("q", bytes(8 * max(0, more))))

    def order(self) -> array[int]:
        """The slots whose blocks are not settled, most recently used first. About a microsecond for each slot."""
        tier = self._tier
        if tier is None:
            return array("I")
        self._fit()
        table = self._tiers.tables[tier]
        pinned = [slot for slot in table.pinned() if table.state(slot) is SlotState.READY]
        cold = table.evictable(table.used)
        return array("I", (slot for slot in (*pinned, *reversed(cold)) if not self._place_of(slot)))

    def left(self) -> int:
        """How many blocks lie nowhere else, those that can't be moved among them. As slow as `order`."""
        return len(self.order()) + self._where.count(HOPELESS)

    def begin(self, slots: Iterable[int]) -> list[Published]:
        """The blocks that are READY in these slots, pinned until `end`."""
        tier = self._tier
        if tier is None:
            return []
        table = self._tiers.tables[tier]
        places = [Place(tier, slot) for slot in slots if table.state(slot) is SlotState.READY]
        self._tiers.pin(places)
        self._open.update(places)
        return [(table.key(place.slot), place) for place in places]

    def end(self, places: Sequence[Place]) -> None:
        """These are not read any more."""
        ended = Counter(places)
        if ended - self._open:
            raise IntegrityError(f"no drain reads all of {places}")
        self._open -= ended
        self._tiers.unpin(places)

    def settle(self, moved: Iterable[Published], where: int) -> None:
        """These blocks, of slots that were begun, lie at that place too (or are HOPELESS)."""
        self._fit()
        for key, place in moved:
            if self._tiers.is_ready(place) and self._tiers.key(place) == key and not self._place_of(place.slot):
                self._where[place.slot], self._what[place.slot] = where, hash(key)
                self.settled += where != HOPELESS

    def spoil(self, place: Place) -> bool:
        """The bytes of a slot that was begun are wrong: whether it is quarantined by this."""
        if place not in self._open:
            raise IntegrityError(f"no drain reads {place}")
        return self._tiers.quarantine(place)

    def doubt(self, where: int) -> None:
        """What was settled at this place may be gone."""
        self.settled -= self._where.count(where)
        self._where = self._where.replace(bytes((where,)), bytes((NOWHERE,)))

    def _place_of(self, slot: int) -> int:
        """A slot may have another block by now than the one that was settled."""
        where = self._where[slot]
        if where and self._what[slot] != hash(self._tiers.tables[self._tier or 0].key(slot)):
            self._where[slot] = where = NOWHERE
        return where

    def pinned(self) -> Counter[Place]:
        """By place: how many pins are a drain's."""
        return Counter(self._open)

    # -- the store that takes its blocks --------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Slots of the host tier without a block."""
        return self._tiers.tables[self._taking].free if self._taking is not None else 0

    @property
    def makes_room(self) -> bool:
        """Whether blocks go on to a slower tier, so that slots come free by and by."""
        return self._taking is not None and self._tiers.below(self._taking) is not None

    def lacking(self, keys: Sequence[bytes]) -> tuple[list[bytes], bool]:
        """Those that are not here and to be fetched (`StoreBook.begin_fetch`), the first ones; True: all of them.

        Nothing of this node's is lost for them. Where slots are freed by copies to a slower tier, half of those that
        are kept free stay so: else a save would have to drop a block that has not been copied yet.
        """
        tier = self._taking
        if tier is None:
            return [], False
        table = self._tiers.tables[tier]
        wanted = [key for key in dict.fromkeys(keys) if self._tiers.find(key) is None and not table.holds(key)]
        most = table.free
        if self.makes_room:  # with WRITE what is in the slower tier already makes way at once
            kept = max(1, int(table.slots * self._low)) // 2
            most = max(0, most - kept) if self._cascade is Cascade.EVICT else table.slots
        return wanted[:most], len(wanted) <= most
