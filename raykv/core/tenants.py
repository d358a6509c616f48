"""Whose blocks lie in which slots, and what each tenant may have: four bytes a slot, a few objects a tenant.

The theory. A tenant is a tag (of a request's cache salt). vLLM's hash of a salted block is another for each salt, so a
block has one tenant, that of who saves it first. A slot is a tenant's from the moment it is reserved for a save until
it is free again; a copy in another tier is one more slot. Entries of a shared tier are no room of this store's: they
have a tenant and count for nothing.

A tenant with a quota has a queue of his slots, and a bit a slot says whether it was asked for since the queue came by
(CLOCK, which keeps about what LRU would). So to make room among his own takes a few steps a slot, however large the
tier is. The queue may name slots that are his no more; it is cleaned up when half of it is of that kind.

Tags come and go: a number whose tenant has no slot and no quota is given to another.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from raykv.admin_messages import NO_TENANT
from raykv.core.store_plans import Place, Run
from raykv.errors import IntegrityError

NOBODY = 0
"""The number of those without a salt. They are not counted: most stores have nobody else."""
LOOKS = 4
"""So many slots of a tenant are looked at for each that is wanted, at most, before asked-for ones go too."""
STEP = 16_384
"""Slots that one step of a scan reads."""


@dataclass(slots=True, eq=False)
class Tenant:
    """`slots` of this store's own tiers, `entries` of a shared one; `refused` blocks were not saved for the quota."""

    tag: bytes
    slots: int = 0
    entries: int = 0
    quota: int | None = None
    refused: int = 0
    queue: deque[Place] = field(default_factory=deque)


class Tenants:
    """The tenants of one store. Not thread-safe; the owner of the book has the lock."""

    def __init__(self, shared: Collection[int]) -> None:
        """`shared`: tiers whose slots are entries."""
        self._shared = shared
        self._all: list[Tenant | None] = [Tenant(NO_TENANT)]
        self._numbers = {NO_TENANT: NOBODY}
        self._unused: list[int] = []
        self._of: dict[int, array[int]] = {}  # by tier, as long as there is something to say
        self._asked: dict[int, bytearray] = {}
        self.limited = False
        """Whether anybody has a quota."""
        self.refused_blocks = 0
        """Of all tenants, since the start."""

    @property
    def any(self) -> bool:
        """Whether there is a tenant at all."""
        return len(self._numbers) > 1

    # -- slots ----------------------------------------------------------------------------------------------

    def number(self, tag: bytes) -> int:
        """The tenant's number, while he has a slot or a quota. Give him one before the next call."""
        found = self._numbers.get(tag)
        if found is None:
            if self._unused:
                found = self._unused.pop()
            else:
                found = len(self._all)
                self._all.append(None)
            self._all[found] = Tenant(tag)
            self._numbers[tag] = found
        return found

    def put(self, place: Place, number: int) -> None:
        """A slot that is nobody's becomes the tenant's."""
        if number == NOBODY:
            return
        tenant = self._tenant(number)
        of = self._of.setdefault(place.tier, array("I"))
        if len(of) <= place.slot:
            of.frombytes(bytes(of.itemsize * (max(place.slot + 1, 2 * len(of), 1024) - len(of))))
        if of[place.slot]:
            raise IntegrityError(f"{place} is a tenant's already")
        of[place.slot] = number
        if place.tier in self._shared:
            tenant.entries += 1
            return
        tenant.slots += 1
        if tenant.quota is not None:
            tenant.queue.append(place)

    def take(self, place: Place) -> None:
        """The slot is free again; it may have been nobody's."""
        number = self.of(place)
        if number == NOBODY:
            return
        tenant = self._tenant(number)
        self._of[place.tier][place.slot] = NOBODY
        if place.tier in self._shared:
            tenant.entries -= 1
        else:
            tenant.slots -= 1
            if len(tenant.queue) > 2 * tenant.slots + LOOKS:
                self._clean(number, tenant)
        self._drop_unused(number)

    def of(self, place: Place) -> int:
        """The number of whose slot it is."""
        of = self._of.get(place.tier)
        return of[place.slot] if of is not None and place.slot < len(of) else NOBODY

    def tag(self, place: Place) -> bytes:
        """The tag of whose slot it is."""
        return self._tenant(self.of(place)).tag

    def asked(self, runs: Iterable[Run]) -> None:
        """The blocks of these slots were asked for. Of use while somebody has a quota."""
        for tier, slot, count in runs:
            bits = self._asked.setdefault(tier, bytearray())
            if len(bits) < slot + count:
                bits.extend(bytes(max(slot + count, 2 * len(bits)) - len(bits)))
            bits[slot : slot + count] = b"\1" * count

    # -- quotas ---------------------------------------------------------------------------------------------

    def set_quota(self, tag: bytes, slots: int | None) -> int:
        """What the tenant may have, None: no limit. Returns his number; while that is limited `scan` fills his queue.

        What he has beyond goes with his next save, or by `over` and `victims` at once.
        """
        number = self.number(tag)
        tenant = self._tenant(number)
        if slots is None or tenant.quota is None:
            tenant.queue.clear()
        tenant.quota = slots
        self.limited = any(one is not None and one.quota is not None for one in self._all)
        if not self.limited:
            self._asked.clear()
        self._drop_unused(number)
        return number

    def scan(self, number: int, tier: int, first: int) -> int | None:
        """Queue the tenant's slots of a tier from `first` on; where to go on, None at its end. Some get in twice."""
        of, tenant = self._of.get(tier), self._all[number]
        if of is None or tenant is None or tenant.quota is None or tier in self._shared or first >= len(of):
            return None
        part = of[first : first + STEP]
        tenant.queue.extend(Place(tier, slot) for slot, one in enumerate(part, first) if one == number)
        return first + STEP

    def quota(self, number: int) -> int | None:
        """In slots."""
        return self._tenant(number).quota

    def over(self, number: int, more: int = 0) -> int:
        """By how many slots the tenant would be over his quota with so many more; 0: by none."""
        tenant = self._tenant(number)
        return max(0, tenant.slots + more - tenant.quota) if tenant.quota is not None else 0

    def room(self, tag: bytes) -> int | None:
        """How many slots more the tenant may have; None: no limit."""
        number = self.known(tag)
        tenant = self._tenant(number) if number is not None else None
        return None if tenant is None or tenant.quota is None else max(0, tenant.quota - tenant.slots)

    def refused(self, number: int, blocks: int) -> None:
        """So many were not saved for his quota."""
        self._tenant(number).refused += blocks
        self.refused_blocks += blocks

    def victims(self, number: int, n: int, may: Callable[[Place], bool]) -> list[Place]:
        """Up to `n` slots of a tenant with a quota that may go, about the coldest. The caller frees them now."""
        queue = self._tenant(number).queue
        found: dict[Place, None] = {}
        looks = min(len(queue), LOOKS * n + LOOKS)
        for sparing in (True, False):  # where all were asked for, the first ones go all the same
            for _ in range(looks):
                if len(found) >= n or not queue:
                    break
                place = queue.popleft()
                if self.of(place) != number or place in found:
                    continue
                if not may(place) or (sparing and self._was_asked(place)):
                    queue.append(place)
                else:
                    found[place] = None
        return list(found)

    def _was_asked(self, place: Place) -> bool:
        """The bit is taken back: it is cold if nobody asks until the next time."""
        bits = self._asked.get(place.tier)
        if bits is None or place.slot >= len(bits) or not bits[place.slot]:
            return False
        bits[place.slot] = 0
        return True

    # -- parts ----------------------------------------------------------------------------------------------

    def all(self) -> list[Tenant]:
        """Those that have a slot, an entry or a quota, but for NOBODY."""
        return [tenant for tenant in self._all[1:] if tenant is not None]

    def known(self, tag: bytes) -> int | None:
        """His number, if he has a slot, an entry or a quota."""
        return self._numbers.get(tag)

    def _tenant(self, number: int) -> Tenant:
        tenant = self._all[number]
        if tenant is None:
            raise IntegrityError(f"there is no tenant number {number}")
        return tenant

    def _clean(self, number: int, tenant: Tenant) -> None:
        tenant.queue = deque(place for place in dict.fromkeys(tenant.queue) if self.of(place) == number)

    def _drop_unused(self, number: int) -> None:
        tenant = self._tenant(number)
        if number and not tenant.slots and not tenant.entries and tenant.quota is None:
            del self._numbers[tenant.tag]
            self._all[number] = None
            self._unused.append(number)

    def check_integrity(self, held: Sequence[Collection[int]]) -> None:
        """Raise IntegrityError unless all counts are right, and only held slots (by tier) are a tenant's."""
        slots: Counter[int] = Counter()
        entries: Counter[int] = Counter()
        for tier, of in self._of.items():
            into, mine = entries if tier in self._shared else slots, held[tier] if tier < len(held) else ()
            for slot, number in enumerate(of):
                if number:
                    into[number] += 1
                    if slot not in mine:
                        raise IntegrityError(f"slot {slot} of tier {tier} is free, and tenant {number}'s")
        for number, tenant in enumerate(self._all[1:], 1):
            found = (slots[number], entries[number])
            if found != ((tenant.slots, tenant.entries) if tenant is not None else (0, 0)):
                raise IntegrityError(f"tenant {number} has {found} slots and entries, and is counted as {tenant}")
            if tenant is None:
                continue
            if self._numbers.get(tenant.tag) != number or not (any(found) or tenant.quota is not None):
                raise IntegrityError(f"tenant {number} has neither slot nor quota, or another number")
            if tenant.quota is not None and len(set(tenant.queue)) < tenant.slots:
                raise IntegrityError(f"tenant {number} has slots that are not in his queue")
