"""A child's place in the chain of a running engine, as a table.

The theory. An operator may change the chain at any moment; a child's work ends at its own. So a child never jumps out
of the chain: it is first asked for nothing new, then what it owes is settled, then what could still touch a block is
ended, confirmed on every rank, and only then is it gone. The place is the operators' word; whether the child is well
is another matter (`connector.scheduler_child.ChildState`).

    STARTING --ready on all ranks--> UP          STARTING --failed, removed--> ENDING
    UP --pause--> OFF --resume--> UP             OFF: asked for nothing, saves nothing, keeps its word
    UP --restart--> RESTARTING --back--> UP      as OFF until its hosts are new ones; an OFF child restarts as it is
    UP, OFF, RESTARTING --remove--> LEAVING      its loads, its sends and its steps are waited for
    LEAVING --settled--> ENDING                  its worker halves are being shut down; nothing is planned for it
    ENDING --ended on all ranks--> GONE          nothing of it is left; its index is never used again
"""

from __future__ import annotations

import enum

from raykv.errors import IntegrityError


class Place(enum.Enum):
    """Where a child stands."""

    STARTING = "starting"
    UP = "up"
    OFF = "off"
    RESTARTING = "restarting"
    LEAVING = "leaving"
    ENDING = "ending"
    GONE = "gone"

    @property
    def asked(self) -> bool:
        """Whether it is asked for hits and hears of new requests."""
        return self is Place.UP

    @property
    def planned(self) -> bool:
        """Whether steps are planned for it."""
        return self in (Place.UP, Place.OFF, Place.RESTARTING, Place.LEAVING)

    @property
    def stays(self) -> bool:
        """Whether it is, or comes to be, a child that orders can be given for, and that is rebuilt when lost."""
        return self in (Place.STARTING, Place.UP, Place.OFF, Place.RESTARTING)


class Move(enum.Enum):
    """What may happen to it."""

    READY = "ready"
    FAIL = "fail"
    PAUSE = "pause"
    RESUME = "resume"
    RESTART = "restart"
    BACK = "back"
    REMOVE = "remove"
    SETTLED = "settled"
    ENDED = "ended"


TABLE: dict[tuple[Place, Move], Place] = {
    (Place.STARTING, Move.READY): Place.UP,
    (Place.STARTING, Move.FAIL): Place.ENDING,
    (Place.STARTING, Move.REMOVE): Place.ENDING,  # it has nothing yet that could be owed
    (Place.UP, Move.PAUSE): Place.OFF,
    (Place.UP, Move.RESTART): Place.RESTARTING,
    (Place.UP, Move.REMOVE): Place.LEAVING,
    (Place.OFF, Move.RESUME): Place.UP,
    (Place.OFF, Move.RESTART): Place.OFF,
    (Place.OFF, Move.BACK): Place.OFF,
    (Place.OFF, Move.REMOVE): Place.LEAVING,
    (Place.RESTARTING, Move.PAUSE): Place.OFF,
    (Place.RESTARTING, Move.BACK): Place.UP,
    (Place.RESTARTING, Move.REMOVE): Place.LEAVING,
    (Place.LEAVING, Move.SETTLED): Place.ENDING,
    (Place.ENDING, Move.ENDED): Place.GONE,
}


def may(place: Place, move: Move) -> bool:
    """Whether that may happen there."""
    return (place, move) in TABLE


def after(place: Place, move: Move) -> Place:
    """The place that follows. Raises IntegrityError for what can't happen there."""
    if not may(place, move):
        raise IntegrityError(f"a child that is {place.value} was to {move.value}")
    return TABLE[(place, move)]
