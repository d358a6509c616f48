"""One tier: which block lies in which slot, and what may be done with the slot now.

One state machine, so one file, longer than others: every step is checked against the same few arrays.

The theory. A slot is in one of five states; `pins` counts who reads it:

    FREE ──reserve──▶ WRITING ──publish──▶ READY ──evict (no pin)──▶ FREE
      ▲                  │ discard           │ quarantine (also pinned)
      └──────────────────┘                   ▼
                                        QUARANTINED   (for ever: its memory or its medium is not to be trusted;
                                                       in a table of entries only: until its last pin is gone)
                         │ retire (also pinned)
                         ▼
                      RETIRED ──its last pin is gone──▶ FREE

A tier that shrinks or is drained is *shut* from slot `limit` on: nothing new comes there. What lies there is moved and
then retired: nobody finds it any more, and who holds a pin reads on. A retired slot's header is still there and true.

Any other step raises IntegrityError and changes nothing. A key has one slot at most, WRITING or READY. Pins are taken
on READY slots and given back on READY or QUARANTINED ones; nothing but a state of FREE gives a slot a new owner.

Per slot there is one object, the key in the index; all else are bytes in arrays. A free slot, or a run of them, is
found by searching the array of states for zero bytes, which runs at memory speed.

What was saved together lies together. So a prompt is looked up by *runs*, slots next to each other whose blocks follow
each other: the index is asked for the first block of a run, and all others are compared as bytes, hashes with hashes.
Use and pins take runs too. A thousand blocks in one run cost microseconds, in a thousand runs a millisecond or two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum

from raykv.core.eviction import Policy
from raykv.core.slot_ages import SlotAges
from raykv.core.slot_keys import SlotKeys
from raykv.core.slot_pins import SlotPins
from raykv.errors import IntegrityError
from raykv.store_messages import HASH_NBYTES


class SlotState(IntEnum):
    """FREE is 0: the search for free slots looks for it."""

    FREE = 0
    WRITING = 1
    READY = 2
    QUARANTINED = 3
    RETIRED = 4


FREE, WRITING, READY, QUARANTINED, RETIRED = (int(state) for state in SlotState)
_READY = bytes((READY,))


def _nobody(key: bytes) -> None:
    """No log of changes is kept."""


class SlotTable:
    """The slots of one tier. Not thread-safe; the owner of the book has the lock."""

    def __init__(self, slots: int, policy: Policy) -> None:
        if slots < 1:
            raise ValueError(f"a tier needs a slot, not {slots}")
        self.slots = slots
        self.evicted = 0
        """Since the start."""
        self.touch: Callable[[bytes], None] = _nobody
        """Called just before a block becomes READY, or ceases to be."""
        self.entries_only = False
        """The slots are no medium but knowledge of one: what is quarantined comes free with its last pin."""
        self.ages = SlotAges(slots)
        """For operators."""
        self._was_read = self.ages.was_read
        self._policy = policy
        self._index: dict[bytes, int] = {}
        self._keys = SlotKeys(slots)
        self._state = bytearray(slots)
        self._pins = SlotPins(slots)
        self._counts = [slots, 0, 0, 0, 0]
        self._limit = slots
        self._shut_free = 0  # FREE slots from the limit on
        self._pinned_ready = 0
        self._next = 0  # where the search for free slots goes on: what was written together lies together

    # -- questions ------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """FREE slots that may be taken."""
        return self._counts[FREE] - self._shut_free

    @property
    def limit(self) -> int:
        """The first slot that is shut; `slots`: none is."""
        return self._limit

    @property
    def retired(self) -> int:
        """Slots that are RETIRED."""
        return self._counts[RETIRED]

    @property
    def writing(self) -> int:
        """Slots that are WRITING."""
        return self._counts[WRITING]

    @property
    def used(self) -> int:
        """READY slots."""
        return self._counts[READY]

    @property
    def quarantined(self) -> int:
        """Slots that are QUARANTINED."""
        return self._counts[QUARANTINED]

    @property
    def num_evictable(self) -> int:
        """READY slots without a pin."""
        return self._counts[READY] - self._pinned_ready

    def find(self, key: bytes) -> int | None:
        """The slot where the block is READY."""
        slot = self._index.get(key)
        return slot if slot is not None and self._state[slot] == READY else None

    def run(self, head: bytes, hashes: bytes, first: int) -> tuple[int, int] | None:
        """Where block number `first` of a prompt is READY, and how many from it on lie there next to each other.

        `hashes`: the prompt's, concatenated; `head`: what its keys begin with. None: that block is not here.
        """
        at = HASH_NBYTES * first
        slot = self.find(head + hashes[at : at + HASH_NBYTES])
        if slot is None:
            return None
        count = self._keys.same_hashes(slot, hashes, first)
        if count > 1:
            states = self._state[slot : slot + count]
            count -= len(states.lstrip(_READY))  # where a block was, its hash may still be
            count = self._keys.same_heads(slot, count, head)
        return slot, count

    def holds(self, key: bytes) -> bool:
        """Whether the block is READY or being written."""
        return key in self._index

    def holds_any(self, keys: Iterable[bytes]) -> bool:
        """Whether one of these blocks is READY or being written."""
        return any(map(self._index.__contains__, keys))

    def key(self, slot: int) -> bytes:
        """The block in a slot that is WRITING or READY."""
        if self._state[slot] not in (READY, WRITING):
            raise IntegrityError(f"slot {slot} ({self.state(slot).name}) holds no block")
        return self._keys.get(slot)

    def state(self, slot: int) -> SlotState:
        return SlotState(self._state[slot])

    def pins(self, slot: int) -> int:
        """How many read the slot."""
        return self._pins.count(slot)

    def is_ready(self, slot: int) -> bool:
        return self._state[slot] == READY

    def is_used(self, slot: int) -> bool:
        """Whether it is READY or WRITING."""
        return self._state[slot] in (READY, WRITING)

    def writing_from(self, slot: int) -> bool:
        """Whether any slot from this one on is WRITING."""
        return self._state.find(WRITING, slot) >= 0

    def ready_from(self, slot: int) -> int | None:
        """The first READY slot at or behind `slot`."""
        found = self._state.find(READY, slot)
        return None if found < 0 else found

    def in_state(self, state: SlotState) -> list[int]:
        """All slots in a state. Reads the whole table: for tests, checks and operators."""
        return [slot for slot, is_state in enumerate(self._state) if is_state == state]

    def pinned(self) -> dict[int, int]:
        """By slot: its pins, where there are any. Reads the whole table."""
        return self._pins.all()

    # -- the way in -----------------------------------------------------------------------------------------

    def recovered(self, slot: int, key: bytes) -> None:
        """FREE → READY: the slot was found with this block at the start."""
        self._expect(slot, FREE)
        if key in self._index:
            raise IntegrityError(f"slot {slot} was recovered with the block of slot {self._index[key]}")
        self._keys.check(key)
        self.touch(key)
        self._hold(slot, key, READY)
        self._policy.added(slot, key)
        self.ages.came(slot)

    def recovered_quarantined(self, slot: int) -> None:
        """FREE → QUARANTINED: the slot was found out of use at the start."""
        self._expect(slot, FREE)
        self._to(slot, QUARANTINED)

    def reserve(self, keys: Sequence[bytes]) -> list[int] | None:
        """FREE → WRITING for each key, slots ascending and in runs where there are; None if there are too few."""
        if len(set(keys)) != len(keys) or any(key in self._index for key in keys):
            raise IntegrityError("a block to be written has a slot already")
        for key in keys:
            self._keys.check(key)
        if len(keys) > self.free:
            return None
        slots = self._find_free(len(keys))
        for slot, key in zip(slots, keys, strict=True):
            self._hold(slot, key, WRITING)
        return slots

    def _find_free(self, count: int) -> list[int]:
        """Whole runs first, behind the last one taken; then ever shorter ones."""
        found: list[int] = []
        taken = self._state  # marked as they are found, set right by the caller
        run = count
        while len(found) < count:
            run = min(run, count - len(found))
            at = taken.find(bytes(run), self._next, self._limit)
            if at < 0:
                at = taken.find(bytes(run), 0, self._limit)
            if at < 0:
                run = (run + 1) // 2
                continue
            taken[at : at + run] = bytes((WRITING,)) * run
            found.extend(range(at, at + run))
            self._next = at + run
        for slot in found:
            taken[slot] = FREE
        return sorted(found)

    def publish(self, slot: int) -> None:
        """WRITING → READY: from now on the block is found."""
        self._expect(slot, WRITING)
        key = self._keys.get(slot)
        self.touch(key)
        self._to(slot, READY)
        self._policy.added(slot, key)
        self.ages.came(slot)

    def discard(self, slot: int) -> None:
        """WRITING → FREE: what was written is not to be seen."""
        self._expect(slot, WRITING)
        self._drop(slot, FREE)

    # -- use ------------------------------------------------------------------------------------------------

    def use(self, slot: int, count: int = 1) -> None:
        """The blocks of a run of slots were asked for, in its order: they are kept longer, the first one longest."""
        self._expect_ready(slot, count)
        self._policy.used(slot, count)

    def read(self, slot: int, count: int) -> None:
        """`use` and `pin` at once."""
        self._expect_ready(slot, count)
        self._policy.used(slot, count)
        self._pinned_ready += self._pins.add(slot, count)
        if count == 1:
            self._was_read[slot] = 1
        else:
            self._was_read[slot : slot + count] = b"\1" * count

    def pin(self, slot: int, count: int = 1) -> None:
        """One more reads a run of slots: it stays where it is."""
        self._expect_ready(slot, count)
        self._pinned_ready += self._pins.add(slot, count)

    def unpin(self, slot: int, count: int = 1) -> None:
        """That one no longer reads them."""
        if slot < 0 or slot + count > self.slots:
            raise IntegrityError(f"slots {slot} to {slot + count - 1} are not of {self.slots}: no pin to give back")
        free = self._pins.take(slot, count)
        if self._state[slot] == READY and (count == 1 or self._state.count(READY, slot, slot + count) == count):
            self._pinned_ready -= free
            return
        for one in range(slot, slot + count):  # some are quarantined or retired
            if self._state[one] == READY:
                self._pinned_ready -= self._pins.none(one)
            else:
                self._free_entry(one)

    # -- the way out ----------------------------------------------------------------------------------------

    def evictable(self, n: int) -> list[int]:
        """Up to `n` READY slots without a pin, coldest first. They stay until `evict`."""
        n = min(n, self.num_evictable)
        may = self._pins.none if self._limit == self.slots else self._may_go
        return self._policy.victims(n, may) if n else []

    def _may_go(self, slot: int) -> bool:
        """To evict what is shut makes no room."""
        return slot < self._limit and self._pins.none(slot)

    def evict(self, slots: Iterable[int]) -> None:
        """READY without a pin → FREE, for want of room."""
        slots = list(slots)
        for slot in slots:
            self._expect(slot, READY)
            if not self._pins.none(slot):
                raise IntegrityError(f"slot {slot} has {self.pins(slot)} pins and can't be evicted")
        if len(set(slots)) != len(slots):
            raise IntegrityError("a slot can't be evicted twice")
        for slot in slots:
            self.touch(self.key(slot))
            self._policy.removed(slot, True)
            self._drop(slot, FREE)
        self.ages.went(slots)
        self.evicted += len(slots)

    def quarantine(self, slot: int) -> None:
        """READY → QUARANTINED: its bytes are wrong. Who holds a pin keeps it."""
        self._expect(slot, READY)
        self.touch(self.key(slot))
        self._policy.removed(slot, False)
        self._pinned_ready -= not self._pins.none(slot)
        self._drop(slot, QUARANTINED)
        self._free_entry(slot)

    def retire(self, slot: int) -> None:
        """READY → RETIRED: the block is found here no more. Who holds a pin keeps it; without one the slot is FREE."""
        self._expect(slot, READY)
        self.touch(self.key(slot))
        self._policy.removed(slot, False)
        self._pinned_ready -= not self._pins.none(slot)
        self._drop(slot, RETIRED)
        self._free_entry(slot)

    # -- its size -------------------------------------------------------------------------------------------

    def shut(self, limit: int) -> None:
        """Nothing new comes to the slots from `limit` on; `slots` opens all."""
        if not 0 <= limit <= self.slots:
            raise IntegrityError(f"a table of {self.slots} slots can't be shut from {limit} on")
        self._limit = limit
        self._shut_free = self._state.count(FREE, limit)

    def occupied_from(self, slot: int) -> bool:
        """Whether any slot from this one on is WRITING, READY or RETIRED, or has a pin."""
        return any(self._state.find(state, slot) >= 0 for state in (WRITING, READY, RETIRED)) or self._pins.any(slot)

    def free_slots(self, first: int) -> list[int]:
        """The FREE ones from this one on. Reads all of those."""
        return [slot for slot in range(first, self.slots) if self._state[slot] == FREE]

    def resize(self, slots: int) -> None:
        """So many slots from now on, all of them open. Those that go hold nothing (or are out of use for good)."""
        if slots < 1:
            raise ValueError(f"a tier needs a slot, not {slots}")
        if slots < self.slots and self.occupied_from(slots):
            raise IntegrityError(f"slots from {slots} on are in use: the table can't shrink to that")
        gone = self._state[slots:]
        self._counts[FREE] += max(0, slots - self.slots) - gone.count(FREE)
        self._counts[QUARANTINED] -= gone.count(QUARANTINED)
        del self._state[slots:]
        self._state.extend(bytes(slots - len(self._state)))
        self._keys.resize(slots)
        self._pins.resize(slots)
        self._policy.resize(slots)
        self.ages.resize(slots)
        self.slots = slots
        self._next = min(self._next, slots)
        self.shut(slots)

    # -- the parts ------------------------------------------------------------------------------------------

    def _expect(self, slot: int, state: int) -> None:
        if not 0 <= slot < self.slots:
            raise IntegrityError(f"slot {slot} is not one of {self.slots}")
        if self._state[slot] != state:
            raise IntegrityError(f"slot {slot} is {self.state(slot).name}, not {SlotState(state).name}")

    def _expect_ready(self, slot: int, count: int) -> None:
        if count == 1 and 0 <= slot < self.slots and self._state[slot] == READY:
            return
        if slot < 0 or self._state.count(READY, slot, slot + count) != count:
            for one in range(slot, slot + count):
                self._expect(one, READY)

    def _to(self, slot: int, state: int) -> None:
        before = self._state[slot]
        self._counts[before] -= 1
        self._counts[state] += 1
        self._state[slot] = state
        if slot >= self._limit:
            self._shut_free += (state == FREE) - (before == FREE)

    def _hold(self, slot: int, key: bytes, state: int) -> None:
        self._keys.put(slot, key)
        self._index[key] = slot
        self._to(slot, state)

    def _free_entry(self, slot: int) -> None:
        state = self._state[slot]
        if (state == RETIRED or (state == QUARANTINED and self.entries_only)) and self._pins.none(slot):
            self._to(slot, FREE)

    def _drop(self, slot: int, state: int) -> None:
        del self._index[self._keys.get(slot)]
        self._to(slot, state)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless states, keys, pins, counts and policy agree."""
        states = [self.in_state(state) for state in SlotState]
        ready = set(states[READY])
        if self._counts != [len(slots) for slots in states]:
            raise IntegrityError(f"counts {self._counts} differ from the states {[len(s) for s in states]}")
        if self._index != {self._keys.get(slot): slot for slot in (*states[READY], *states[WRITING])}:
            raise IntegrityError("slots with a block, states and index disagree")
        self._pins.check_integrity()
        pinned = self.pinned().keys()
        held = ready.union(states[QUARANTINED], states[RETIRED])
        if pinned - held or len(pinned & ready) != self._pinned_ready:
            raise IntegrityError("a slot is pinned that holds no block, or the count of pinned slots is wrong")
        if self.entries_only and set(states[QUARANTINED]) - pinned:
            raise IntegrityError("an entry that was lost has no pin, and did not come free")
        if set(states[RETIRED]) - pinned:
            raise IntegrityError("a retired slot has no pin, and did not come free")
        if len(self._state) != self.slots or self._shut_free != len([s for s in states[FREE] if s >= self._limit]):
            raise IntegrityError("the count of free slots that are shut, or of all slots, is wrong")
        self._policy.check_integrity(ready)
