"""Whose slots: counts, quotas and who goes first, against a plain model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.admin_messages import NO_TENANT, tenant_tag
from raykv.core.store_plans import Place, Run
from raykv.core.tenants import NOBODY, Tenants
from raykv.errors import IntegrityError
from tests.support.examples import examples

A, B = tenant_tag("a"), tenant_tag("b")
SHARED = 2


def made(**slots: int) -> Tenants:
    """Tenants a and b with so many slots of tier 0, from slot 0 on."""
    tenants, slot = Tenants({SHARED}), 0
    for name, count in slots.items():
        for _ in range(count):
            tenants.put(Place(0, slot), tenants.number(tenant_tag(name)))
            slot += 1
    return tenants


def test_a_tag_keeps_no_salt_and_nobody_has_none() -> None:
    assert tenant_tag("") == NO_TENANT and len(A) == 8 and A != B and A != b"a"
    tenants = Tenants({SHARED})
    tenants.put(Place(0, 5), NOBODY)
    assert not tenants.any and tenants.tag(Place(0, 5)) == NO_TENANT and tenants.all() == []
    tenants.take(Place(0, 5))


def test_a_tenant_without_slot_and_quota_is_forgotten() -> None:
    tenants = made(a=1)
    first = tenants.known(A)
    tenants.take(Place(0, 0))
    assert tenants.known(A) is None and not tenants.any
    tenants.put(Place(0, 3), tenants.number(B))
    assert tenants.known(B) == first, "its number is given to another"
    tenants.set_quota(A, 5)
    assert tenants.any and tenants.limited
    tenants.set_quota(A, None)
    assert tenants.known(A) is None and not tenants.limited
    tenants.check_integrity([{3}])


def test_entries_of_a_shared_tier_count_for_nothing_and_keep_the_name() -> None:
    tenants = Tenants({SHARED})
    tenants.put(Place(SHARED, 0), tenants.number(A))
    (one,) = tenants.all()
    assert (one.slots, one.entries) == (0, 1) and tenants.tag(Place(SHARED, 0)) == A
    tenants.take(Place(SHARED, 0))
    assert tenants.all() == []


def test_the_coldest_goes_and_what_is_held_stays() -> None:
    tenants = made(a=6, b=2)
    number = tenants.set_quota(A, 3)
    assert tenants.over(number) == 3 and tenants.over(number, 2) == 5
    assert tenants.scan(number, 0, 0) is not None and tenants.scan(number, 1, 0) is None
    tenants.asked([Run(0, 0, 2)])
    held = {Place(0, 2)}
    assert tenants.victims(number, 2, lambda place: place not in held) == [Place(0, 3), Place(0, 4)]


def test_where_all_were_asked_for_the_first_ones_go() -> None:
    tenants = made(a=4)
    number = tenants.set_quota(A, 0)
    tenants.scan(number, 0, 0)
    tenants.asked([Run(0, 0, 4)])
    assert sorted(tenants.victims(number, 2, lambda place: True)) == [Place(0, 0), Place(0, 1)]


def test_a_slot_has_one_tenant() -> None:
    tenants = made(a=1)
    with pytest.raises(IntegrityError):
        tenants.put(Place(0, 0), tenants.number(A))
    with pytest.raises(IntegrityError, match="is free"):
        tenants.check_integrity([set()])


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "take", "quota", "asked", "victims"]), st.integers(0, 3), st.integers(0, 30)),
    max_size=60,
)


@settings(max_examples=examples(30), deadline=None)
@given(STEPS)
def test_counts_are_those_of_a_plain_model(steps: list[tuple[str, int, int]]) -> None:
    tenants, tags = Tenants({SHARED}), [NO_TENANT, A, B, tenant_tag("c")]
    whose: dict[Place, bytes] = {}
    quotas: dict[bytes, int] = {}
    for what, who, slot in steps:
        place, tag = Place(slot % 3, slot), tags[who]
        if what == "put" and place not in whose:
            tenants.put(place, tenants.number(tag))
            if tag != NO_TENANT:
                whose[place] = tag
        elif what == "take":
            whose.pop(place, None)
            tenants.take(place)
        elif what == "quota" and tag != NO_TENANT:
            quota: Any = None if slot > 20 else slot
            quotas = {one: q for one, q in quotas.items() if one != tag} | ({} if quota is None else {tag: quota})
            number = tenants.set_quota(tag, quota)
            for tier in range(3):
                first: int | None = 0
                while first is not None and quota is not None:
                    first = tenants.scan(number, tier, first)
        elif what == "asked":
            tenants.asked([Run(slot % 3, slot, who + 1)])
        elif what == "victims" and tag in quotas:
            known = tenants.known(tag)
            assert known is not None
            mine = {one for one, owner in whose.items() if owner == tag and one.tier != SHARED}
            found = tenants.victims(known, slot, lambda place: True)
            assert set(found) <= mine and len(found) == len(set(found)) <= slot
            if slot:
                assert found or not mine, "there is always somebody to go"
            for one in found:
                del whose[one]
                tenants.take(one)
        tenants.check_integrity([{one.slot for one in whose if one.tier == tier} for tier in range(3)])
        counted = {one.tag: (one.slots, one.entries) for one in tenants.all() if one.slots or one.entries}
        assert counted == {
            tag: (
                sum(owner == tag and one.tier != SHARED for one, owner in whose.items()),
                sum(owner == tag and one.tier == SHARED for one, owner in whose.items()),
            )
            for tag in set(whose.values())
        }
        assert tenants.limited == bool(quotas)
