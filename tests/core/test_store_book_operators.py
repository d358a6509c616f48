"""The book while operators pin, forget, limit, check and copy up, in between all that engines and media do.

The model of `test_store_book_safety`, and: each block has a tenant, by its number, that its header says in whatever
tier it lies; what a pin keeps goes only when its bytes rot or its tier does; a store's next life finds all of it again.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from raykv.admin_messages import NO_TENANT, Selection, tenant_tag
from raykv.core.eviction import make_policy
from raykv.core.selections import chosen
from raykv.core.slot_table import SlotTable
from raykv.core.store_book import Move, Place, StoreBook
from raykv.core.store_plans import Published
from raykv.errors import StoreError
from raykv.store_messages import Cascade, Eviction, Medium
from raykv.types import EngineId, JobId, Rank
from tests.core.test_store_book_safety import (
    BAD,
    FAMILIES,
    FAMILY,
    GARBAGE,
    HASHES,
    INDEX,
    MOSTLY,
    PRINTS,
    RARELY,
    BookMachine,
)
from tests.support.examples import histories

TAGS = [NO_TENANT, tenant_tag("a"), tenant_tag("b")]
HEADS = [one + bytes((group,)) for one in PRINTS for group in range(2)]
SELECTIONS = st.one_of(
    st.builds(lambda tag: Selection(tenant=tag.hex()), st.sampled_from(TAGS)),
    st.builds(lambda one: Selection(fingerprints=(one.hex(),)), st.sampled_from(PRINTS)),
    st.builds(lambda at: Selection(hashes=b"".join(HASHES[at * FAMILY : at * FAMILY + 3])), FAMILIES),
    st.builds(lambda at, medium: Selection(medium=medium, hashes=HASHES[at]), INDEX, st.just(Medium.HOST)),
    st.just(Selection()),
)


def tag_of(key: bytes) -> bytes:
    """Blocks of families 0 and 3 are nobody's."""
    return TAGS[HASHES.index(key[-len(HASHES[0]) :]) // FAMILY % 3]


class OperatedMachine(BookMachine):
    @initialize(
        slots=st.lists(st.integers(3, 12), min_size=1, max_size=3),
        cascade=st.sampled_from(Cascade),
        eviction=st.sampled_from(Eviction),
        windows=st.sampled_from([[0], [2], [0, 1], [0, 2]]),
        recovered=st.sets(st.integers(0, 23)),
    )
    def start(
        self, slots: list[int], cascade: Cascade, eviction: Eviction, windows: list[int], recovered: set[int]
    ) -> None:
        super().start(slots, cascade, eviction, windows, set())
        self.made_with = (slots, cascade, eviction)
        self.owners: dict[Place, bytes] = {}
        self.kept: dict[str, dict[bytes, Place]] = {}
        self.quotas: dict[bytes, int] = {}
        self.reads: list[Published] = []
        self.lifts: list[Move] = []
        for number in sorted(recovered):
            place, key = Place(number % 3, number // 3), self.key(number % 2, 0, number)
            if place.tier < len(slots) and place.slot < slots[place.tier]:
                self.headers[place] = self.bytes[place] = key
                self.owners[place] = tag_of(key)
        self.live_on()

    def live_on(self) -> None:
        """A new life of the store, from its headers and notes."""
        slots, cascade, eviction = self.made_with
        self.tables = [SlotTable(count, make_policy(eviction, count)) for count in slots]
        media = [Medium.HOST, *[Medium.DISK] * 2][: len(slots)]
        self.book = StoreBook(self.tables, media, cascade, 10.0, low=0.3)
        for many in (self.plans, self.jobs, self.settled, self.loads, self.moves, self.checks, self.reads, self.lifts):
            many.clear()
        self.leases, self.first, self.off, self.begun = {}, {}, set(), set()
        for tier in range(len(slots)):
            found = [(place.slot, key) for place, key in self.headers.items() if place.tier == tier]
            tenants = {place.slot: tag for place, tag in self.owners.items() if place.tier == tier and tag != NO_TENANT}
            self.book.recovered(tier, found, (), tenants)
        for tag, quota in self.quotas.items():
            self.limit(tag, quota)
        for number, places in list(self.kept.items()):
            self.book.contents.pins.begin(number, self.now + 5, "")
            self.book.contents.pins.add(number, self.book.lying([k for k, p in places.items() if p in self.headers]))
            self.kept[number] = dict(self.pin_of(number))

    def pin_of(self, number: str) -> dict[bytes, Place]:
        pin = self.book.contents.pins.get(number)
        assert pin is not None
        return pin.places

    def publish(self, published: Any) -> None:
        super().publish(published)
        for _, place in published:
            self.owners[place] = self.book.contents.tenants.tag(place)

    def clear(self, places: Any) -> None:
        super().clear(places)
        for place in places:
            del self.owners[place]

    def save(self, engine: EngineId, rank: int, job: JobId, blocks: list[int]) -> None:
        groups, tenants = len(self.windows), self.book.contents.tenants
        keys = [self.key(rank, n % groups, n // groups) for n in blocks]
        before = {tag: self.slots_of(tag) for tag in self.quotas}
        plan = self.book.begin_save(engine, Rank(rank), job, keys, [tag_of(key) for key in keys])
        numbers = [i for i, _ in plan.write] + list(plan.known) + list(plan.skipped)
        assert sorted(numbers) == list(range(len(keys)))
        for tag, quota in self.quotas.items():
            assert self.slots_of(tag) <= max(quota, before[tag]), "a save went beyond the quota"
        self.clear(plan.clear)
        self.overwrite(place for _, place in plan.write)
        assert not plan.write or (engine, job) in self.jobs
        self.plans.append((plan, keys))
        assert tenants.limited == bool(self.quotas)

    def slots_of(self, tag: bytes) -> int:
        return next((one.slots for one in self.book.contents.tenants.all() if one.tag == tag), 0)

    # -- operators ------------------------------------------------------------------------------------------

    def selected(self, selection: Selection) -> list[Published]:
        what = chosen(selection, self.book.media)
        return [one for part in self.book.select(what, HEADS) for one in part()]

    @rule(number=st.sampled_from(["1", "2"]), selection=SELECTIONS, seconds=st.integers(1, 20))
    def keep(self, number: str, selection: Selection, seconds: int) -> None:
        pins = self.book.contents.pins
        if pins.get(number) is not None:
            assert pins.end(number) is not None
            del self.kept[number]
            return
        pins.begin(number, self.now + seconds, "")
        found = self.selected(selection)
        try:
            pins.add(number, found)
        except StoreError:
            assert pins.end(number) is not None
            return
        self.kept[number] = dict(self.pin_of(number))
        assert set(self.kept[number]) == {key for key, _ in found}

    @rule(seconds=st.integers(1, 4))
    def end_pins(self, seconds: int) -> None:
        self.now += seconds
        for pin in self.book.contents.pins.expire(self.now):
            assert pin.expires <= self.now
            del self.kept[pin.number]

    @rule(selection=SELECTIONS, really=RARELY)
    def forget(self, selection: Selection, really: bool) -> None:
        if not really:
            return
        found = [place for _, place in self.selected(selection)]
        held = {place for place in found if self.tables[place.tier].pins(place.slot)}
        cleared = self.book.forget_all(found)
        assert set(cleared) == set(found) - held
        self.clear(cleared)

    @rule(tag=st.sampled_from(TAGS[1:]), slots=st.sampled_from([None, 0, 1, 2, 5]))
    def limit(self, tag: bytes, slots: int | None) -> None:
        tenants = self.book.contents.tenants
        if slots is None:
            self.quotas.pop(tag, None)
        else:
            self.quotas[tag] = slots
        number = tenants.set_quota(tag, slots)
        for tier in self.book.own_tiers if slots is not None else ():
            first: int | None = 0
            while first is not None:
                first = tenants.scan(number, tier, first)
        while slots is not None and (cut := self.book.quota_cut(tag)):
            assert all(self.owners[place] == tag for place in cut)
            self.clear(cut)

    @rule(tier=INDEX, first=INDEX)
    def begin_read(self, tier: int, first: int) -> None:
        found, _ = self.book.reads.begin(tier % len(self.tables), first, 2)
        assert all(self.headers[place] == key for key, place in found)
        self.reads += found

    @precondition(lambda self: self.reads)
    @rule(index=INDEX, rot=RARELY)
    def end_read(self, index: int, rot: bool) -> None:
        key, place = self.reads.pop(index % len(self.reads))
        if rot:
            self.bytes[place] = BAD
        if self.book.end_read(place, self.bytes[place] != BAD):
            assert self.headers[place] == key
            self.clear([place])

    @rule(selection=SELECTIONS)
    def begin_lifts(self, selection: Selection) -> None:
        before = {key for place, key in self.headers.items() if place.tier not in self.off}
        plan = self.book.reads.begin_lifts([place for _, place in self.selected(selection)][:3])
        self.clear(plan.clear)
        after = {key for place, key in self.headers.items() if place.tier not in self.off}
        assert before == after, "something was lost for a copy up"
        self.overwrite(move.target for move in plan.moves)
        self.lifts.extend(plan.moves)

    @precondition(lambda self: self.lifts)
    @rule(index=INDEX, ok=MOSTLY)
    def end_lift(self, index: int, ok: bool) -> None:
        move = self.lifts.pop(index % len(self.lifts))
        source, found_bad = self.bytes[move.source], move.source not in self.headers
        assert source in (move.key, BAD) and self.bytes[move.target] == GARBAGE
        self.bytes[move.target] = source if ok else GARBAGE
        bad = source == BAD and not found_bad
        published = self.book.end_lift(move, ok and not bad, bad)
        assert not (found_bad and published)
        if bad:
            self.clear([move.source])
        self.publish(published)

    @rule(really=RARELY)
    def restart(self, really: bool) -> None:
        if really:
            self.live_on()

    # -- what always holds ----------------------------------------------------------------------------------

    @invariant()
    def each_block_has_its_tenant(self) -> None:
        for place, key in self.headers.items():
            assert self.owners[place] == tag_of(key) == self.book.contents.tenants.tag(place)
        counted = Counter(self.owners.values()) + Counter(
            tag_of(self.tables[place.tier].key(place.slot)) for place in self.book._saves.jobs.places()
        )
        for tag in TAGS[1:]:
            assert self.slots_of(tag) == counted[tag]

    @invariant()
    def what_is_kept_stays(self) -> None:
        for number, places in self.kept.items():
            now = self.pin_of(number)
            for key, place in places.items():
                if key in now:
                    assert self.headers[now[key]] == key
                else:
                    assert self.bytes[place] == BAD, "a block that was kept has gone"
        held = {key for place, key in self.headers.items() if place.tier not in self.off}
        for key in held:
            assert self.book.find(key) is not None

    def teardown(self) -> None:
        if not hasattr(self, "book"):
            return
        for number in list(self.kept):
            self.book.contents.pins.end(number)
        self.kept.clear()
        while self.reads:
            self.end_read(0, False)
        while self.lifts:
            self.end_lift(0, True)
        super().teardown()


LIGHT = histories(12)


class TestOperatedBook(OperatedMachine.TestCase):
    settings = LIGHT


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestOperatedBookAtLength(OperatedMachine.TestCase):
    settings = settings(LIGHT, max_examples=3_000, derandomize=False)
