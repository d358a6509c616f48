"""Who goes first when a tier is full: policies over the slots of one tier, a few bytes a slot and no object.

The theory. A queue is a ring of links in two arrays, through a sentinel behind the last slot; all steps but the scan
for victims take constant time. The scan goes from the cold end and passes over slots that may not go (pinned). The
first few that it meets stay where they are: they are mostly the sources of demotions, cold and soon free. Behind
those it moves what is in the way to the hot end (pinned is in use, after all), so that the next scan does not meet it
again: over time a scan for n victims takes n steps and as many more as the share of pinned slots asks for.

S3-FIFO is by Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023: new
blocks wait in a small queue; those that are used there go to the main queue, the rest out, and are remembered for a
while (ghosts), so that a second coming goes to the main queue at once. A scan of one-time prompts passes through the
small queue only.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Protocol
from zlib import crc32

from raykv.errors import IntegrityError
from raykv.store_messages import Eviction

STAY = 64
"""How many slots in the way a scan leaves in place."""
FEW = 8
"""Slots that are moved one by one rather than looked through for linked ones."""
SMALL_SHARE = 0.1
"""The small queue's share of the slots; 10 % as in the paper."""
MAX_USES = 3
"""Uses are counted up to here (two bits), as in the paper."""
USES_TO_STAY = 1
"""Uses in the small queue that bring a block to the main one. The paper's algorithm asks for two; one finds more here
(benchmarks/eviction_trace.py: up to 6 points of prompt blocks in small tiers, nowhere less)."""


class Policy(Protocol):
    """The order in which the slots of one tier go. Slots are added once, until they are removed; not thread-safe."""

    def added(self, slot: int, key: bytes) -> None:
        """The slot now holds this block."""

    def used(self, slot: int, count: int = 1) -> None:
        """The blocks of `count` slots from `slot` on were asked for; the last goes first, as if each was used alone."""

    def removed(self, slot: int, evicted: bool) -> None:
        """The slot is empty; `evicted`: for want of room, so the block may come again."""

    def victims(self, n: int, may: Callable[[int], bool]) -> list[int]:
        """Up to `n` slots that may go, coldest first. They stay until `removed`."""

    def resize(self, slots: int) -> None:
        """The tier has so many slots now; those that are gone were removed before."""

    def check_integrity(self, slots: set[int]) -> None:
        """Raise IntegrityError unless exactly these slots are held, each once."""


def make_policy(eviction: Eviction, slots: int) -> Policy:
    """The policy of that name for a tier of so many slots."""
    return S3FIFO(slots) if eviction is Eviction.S3FIFO else LRU(slots)


class Ghosts:
    """Remembers about the last `capacity` keys, by 32 bits of each: a wrong yes is rare and costs little.

    One table of (when, fingerprint), twice as large as it should hold and overwritten in place: some keys are lost to
    collisions, and none costs an object.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._table = array("Q", bytes(8 * (2 * self._capacity + 1)))
        self._clock = 0

    def add(self, mark: int) -> None:
        """Remember the key with this mark (its 32 bits)."""
        self._clock += 1
        self._table[mark % len(self._table)] = self._clock << 32 | mark

    def take(self, mark: int) -> bool:
        """Whether the key is remembered; it is forgotten now."""
        at = mark % len(self._table)
        entry = self._table[at]
        if not entry or entry & 0xFFFFFFFF != mark:
            return False
        self._table[at] = 0
        return self._clock - (entry >> 32) < self._capacity


class _Rings:
    """Queues of slots. Queue q is the ring through the sentinel `slots + q`; a slot is in one queue at most."""

    def __init__(self, slots: int, queues: int) -> None:
        self.slots = slots
        self.sizes = [0] * queues
        self.colder = array("i", range(slots + queues))  # linked to itself: in no queue
        self.hotter = array("i", range(slots + queues))

    def push(self, queue: int, slot: int) -> None:
        """To the hot end."""
        end = self.slots + queue
        hottest = self.colder[end]
        self.colder[slot], self.hotter[slot] = hottest, end
        self.hotter[hottest] = self.colder[end] = slot
        self.sizes[queue] += 1

    def pull(self, queue: int, slot: int) -> None:
        """Out of its queue."""
        colder, hotter = self.colder[slot], self.hotter[slot]
        self.hotter[colder], self.colder[hotter] = hotter, colder
        self.colder[slot] = self.hotter[slot] = slot
        self.sizes[queue] -= 1

    def linked(self, slot: int, count: int, numbers: array[int]) -> bool:
        """Whether each of these slots is the next hotter one of the slot behind it. `numbers`: 0, 1, ... all slots."""
        return self.hotter[slot + 1 : slot + count] == numbers[slot : slot + count - 1]

    def reheat(self, queue: int, slot: int, count: int) -> None:
        """Linked slots of a queue go to its hot end in one step, `slot` to the very end."""
        last, end = slot + count - 1, self.slots + queue
        colder, hotter = self.colder[last], self.hotter[slot]
        self.hotter[colder], self.colder[hotter] = hotter, colder
        hottest = self.colder[end]
        self.colder[last], self.hotter[slot] = hottest, end
        self.hotter[hottest], self.colder[end] = last, slot

    def coldest(self, queue: int) -> int:
        """The first slot of a queue, or its sentinel."""
        return self.hotter[self.slots + queue]

    def resize(self, slots: int) -> None:
        """The sentinels move behind the new last slot; slots that go are in no queue."""
        queues = range(len(self.sizes))
        ends = [(self.hotter[self.slots + queue], self.colder[self.slots + queue]) for queue in queues]
        for links in (self.colder, self.hotter):
            del links[min(slots, self.slots) :]
            links.extend(range(len(links), slots + len(queues)))
        for queue, (coldest, hottest) in enumerate(ends):
            if self.sizes[queue]:
                end = slots + queue
                self.hotter[end], self.colder[end] = coldest, hottest
                self.colder[coldest] = self.hotter[hottest] = end
        self.slots = slots

    def check(self, queue: int) -> list[int]:
        """The slots of a queue from cold to hot; raises IntegrityError where links and size disagree."""
        end = self.slots + queue
        found: list[int] = []
        slot = self.hotter[end]
        while slot != end and len(found) <= self.sizes[queue]:
            if self.hotter[self.colder[slot]] != slot:
                raise IntegrityError(f"slot {slot} is linked one way only")
            found.append(slot)
            slot = self.hotter[slot]
        if len(found) != self.sizes[queue]:
            raise IntegrityError(f"queue {queue} holds {len(found)} or more, not {self.sizes[queue]}")
        return found


def _check_held(held: list[int], slots: set[int]) -> None:
    if len(set(held)) != len(held) or set(held) != slots:
        raise IntegrityError(f"the policy differs from the table in slots {sorted(set(held) ^ slots)}")


class LRU:
    """The longest unused goes first.

    Blocks that were used together lie in the ring as they were used, so most of a run is moved in one step.
    """

    def __init__(self, slots: int) -> None:
        self._rings = _Rings(slots, 1)
        self._numbers = array("i", range(slots))

    def added(self, slot: int, key: bytes) -> None:
        self._rings.push(0, slot)

    def used(self, slot: int, count: int = 1) -> None:
        rings = self._rings
        if count == 1 or rings.linked(slot, count, self._numbers):
            rings.reheat(0, slot, count)
        elif count <= FEW:
            for one in range(slot + count - 1, slot - 1, -1):
                rings.reheat(0, one, 1)
        else:  # it is broken somewhere: look for the parts that are not
            half = count // 2
            self.used(slot + half, count - half)
            self.used(slot, half)

    def removed(self, slot: int, evicted: bool) -> None:
        self._rings.pull(0, slot)

    def victims(self, n: int, may: Callable[[int], bool]) -> list[int]:
        rings = self._rings
        found: list[int] = []
        in_way: list[int] = []
        slot, end = rings.coldest(0), rings.slots
        while len(found) < n and slot != end:
            (found if may(slot) else in_way).append(slot)
            slot = rings.hotter[slot]
        for slot in in_way[STAY:]:
            self.used(slot)
        return found

    def resize(self, slots: int) -> None:
        self._rings.resize(slots)
        self._numbers = array("i", range(slots))

    def check_integrity(self, slots: set[int]) -> None:
        _check_held(self._rings.check(0), slots)


SMALL, MAIN, NOWHERE = 0, 1, 2
_ONE_MORE = bytes(min(uses + 1, MAX_USES) for uses in range(256))


class S3FIFO:
    """New blocks prove themselves in a small queue first; see the head of this file."""

    def __init__(self, slots: int) -> None:
        self._rings = _Rings(slots, 2)
        self._small_target = max(1, int(slots * SMALL_SHARE))
        self._queue = bytearray([NOWHERE]) * slots
        self._uses = bytearray(slots)
        self._mark = array("I", bytes(4 * slots))
        self._ghosts = Ghosts(slots - self._small_target)

    def added(self, slot: int, key: bytes) -> None:
        self._mark[slot] = crc32(key)
        self._enter(MAIN if self._ghosts.take(self._mark[slot]) else SMALL, slot)
        self._uses[slot] = 0

    def used(self, slot: int, count: int = 1) -> None:
        self._uses[slot : slot + count] = self._uses[slot : slot + count].translate(_ONE_MORE)

    def removed(self, slot: int, evicted: bool) -> None:
        queue = self._queue[slot]
        self._rings.pull(queue, slot)
        self._queue[slot] = NOWHERE
        if evicted and queue == SMALL:
            self._ghosts.add(self._mark[slot])

    def victims(self, n: int, may: Callable[[int], bool]) -> list[int]:
        """As if each victim were gone at once: a block that stays goes to the hot end of the main queue on the way."""
        rings = self._rings
        found: list[int] = []
        in_way: list[int] = []
        small_left, end = rings.sizes[SMALL], rings.slots + MAIN
        at = [rings.coldest(SMALL), rings.coldest(MAIN)]
        while len(found) < n and (small_left or at[MAIN] != end):
            jammed = at[MAIN] == end or len(in_way) > STAY  # a main queue full of pins is not read through each time
            queue = SMALL if small_left and (jammed or small_left > self._small_target) else MAIN
            slot = at[queue]
            at[queue] = rings.hotter[slot]
            small_left -= queue == SMALL
            if not may(slot):
                in_way.append(slot)
            elif self._uses[slot] < (USES_TO_STAY if queue == SMALL else 1):
                found.append(slot)
            else:  # each round through the main queue takes a use off, so this ends
                self._uses[slot] = 0 if queue == SMALL else self._uses[slot] - 1
                self._move_on(slot)
                if at[MAIN] == end:
                    at[MAIN] = slot
        for slot in in_way[STAY:]:
            self._move_on(slot)
        return found

    def _move_on(self, slot: int) -> None:
        """To the hot end of the main queue."""
        self._rings.pull(self._queue[slot], slot)
        self._enter(MAIN, slot)

    def _enter(self, queue: int, slot: int) -> None:
        self._rings.push(queue, slot)
        self._queue[slot] = queue

    def resize(self, slots: int) -> None:
        """What was remembered of blocks that are gone is forgotten."""
        self._rings.resize(slots)
        self._small_target = max(1, int(slots * SMALL_SHARE))
        for column, empty in ((self._queue, NOWHERE), (self._uses, 0)):
            del column[slots:]
            column.extend(bytes((empty,)) * (slots - len(column)))
        del self._mark[slots:]
        self._mark.extend(array("I", bytes(4 * (slots - len(self._mark)))))
        self._ghosts = Ghosts(slots - self._small_target)

    def check_integrity(self, slots: set[int]) -> None:
        members = self._rings.check(SMALL), self._rings.check(MAIN)
        _check_held([*members[SMALL], *members[MAIN]], slots)
        for queue, held in enumerate(members):
            if any(self._queue[slot] != queue for slot in held):
                raise IntegrityError(f"a slot of queue {queue} says that it is in another one")
