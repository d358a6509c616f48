"""A child's place in the chain: what may happen where, and that every way leads out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.core.chain import TABLE, Move, Place, after, may
from raykv.errors import IntegrityError

BY_ORDER = [Move.PAUSE, Move.RESUME, Move.RESTART, Move.REMOVE]


@pytest.mark.parametrize("place", Place)
@pytest.mark.parametrize("move", Move)
def test_what_is_not_in_the_table_is_refused(place: Place, move: Move) -> None:
    if (place, move) in TABLE:
        assert may(place, move) and after(place, move) is TABLE[(place, move)]
    else:
        assert not may(place, move)
        with pytest.raises(IntegrityError, match=f"{place.value} was to {move.value}"):
            after(place, move)


def test_nobody_leaves_without_settling_and_ending() -> None:
    into = {to: {at for (at, _), found in TABLE.items() if found is to} for to in Place}
    assert into[Place.GONE] == {Place.ENDING}
    assert into[Place.ENDING] == {Place.STARTING, Place.LEAVING}
    assert into[Place.LEAVING] == {Place.UP, Place.OFF, Place.RESTARTING}
    assert not [move for move in Move if may(Place.GONE, move)]


@pytest.mark.parametrize("place", [place for place in Place if place.stays])
def test_whoever_stays_can_be_removed_and_goes(place: Place) -> None:
    moves = {Place.LEAVING: Move.SETTLED, Place.ENDING: Move.ENDED}
    place = after(place, Move.REMOVE)
    for _ in range(2):
        place = after(place, moves[place]) if place is not Place.GONE else place
    assert place is Place.GONE


@given(st.lists(st.sampled_from(Move)))
def test_only_a_child_that_is_up_is_asked(moves: list[Move]) -> None:
    place = Place.STARTING
    for move in moves:
        if may(place, move):
            place = after(place, move)
        assert place.asked == (place is Place.UP)
        assert place.asked <= place.planned and place.stays <= (place not in (Place.LEAVING, Place.ENDING, Place.GONE))
        if place in (Place.LEAVING, Place.ENDING, Place.GONE):
            assert not any(may(place, order) for order in BY_ORDER)
