"""One step of emptying what is shut of a tier: each block by the rules of `tier_changes`, copies begun together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raykv.core.moves import Moves
from raykv.core.operator_pins import OperatorPins
from raykv.core.store_plans import Move, Place
from raykv.core.tier_stages import Stage
from raykv.core.tiers import Tiers
from raykv.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class Emptied:
    """One step of emptying: `moves` to carry out, headers to `clear`, `done` blocks that need no copy (or are lost).

    `lost`, `left`: how many of what was looked at were given up, and stay for want of room. `round_over`: the scan has
    come by all slots; what is left comes again with the next step.
    """

    moves: tuple[Move, ...] = ()
    clear: tuple[Place, ...] = ()
    done: int = 0
    lost: int = 0
    left: int = 0
    round_over: bool = False


class OpenMoves:
    """The copies that empty tiers and have not ended. Not thread-safe."""

    def __init__(self) -> None:
        self._by_target: dict[Place, Move] = {}
        self._sources: set[Place] = set()
        self._keepers: dict[Place, Sequence[str]] = {}  # by target: operators' pins
        self.moved: Callable[[bytes, Place], None] | None = None
        self.pins: OperatorPins | None = None

    def begin(self, move: Move, keepers: Sequence[str]) -> None:
        """Its source is pinned, its target WRITING."""
        self._by_target[move.target] = move
        self._sources.add(move.source)
        if keepers:
            self._keepers[move.target] = keepers

    def end(self, move: Move) -> Sequence[str]:
        """Who kept the block."""
        if not self.runs(move):
            raise IntegrityError(f"{move} does not run")
        del self._by_target[move.target]
        self._sources.discard(move.source)
        return self._keepers.pop(move.target, ())

    def leaves(self, key: bytes, place: Place) -> None:
        """The block is READY elsewhere, and about to leave this place."""
        if self.moved is not None:
            self.moved(key, place)

    def runs(self, move: Move) -> bool:
        return self._by_target.get(move.target) == move

    def moving(self, source: Place) -> bool:
        return source in self._sources

    def any_of(self, tier: int) -> bool:
        """Whether one reads that tier."""
        return any(place.tier == tier for place in self._sources)

    def pinned(self) -> Counter[Place]:
        return Counter(move.source for move in self._by_target.values())

    def targets(self) -> list[Place]:
        return list(self._by_target)

    def check_integrity(self) -> None:
        if self._sources != {move.source for move in self._by_target.values()}:
            raise IntegrityError("the sources of moves that empty tiers are miscounted")


class Step:
    """One call of `next_moves`: slots are taken one by one, copies to another tier are begun together."""

    def __init__(self, tiers: Tiers, cascade: Moves, open_moves: OpenMoves, tier: int, stage: Stage, most: int) -> None:
        """`open_moves`: those of all steps; `cascade`: the store's other moves."""
        self._tiers, self._cascade, self._open, self._tier, self._most = tiers, cascade, open_moves, tier, most
        self._table = tiers.tables[tier]
        self._stays, self._shrinks = stage is Stage.DRAINING, stage is Stage.SHRINKING
        self._targets = self._where()
        self._waiting: dict[int, dict[bytes, Place]] = {}
        self._moves: list[Move] = []
        self._clear: list[Place] = []
        self._done = self._lost = self._left = 0

    def _where(self) -> list[int]:
        """Other tiers that blocks may go to, the best one first."""
        tiers = self._tiers
        below = tiers.below(self._tier)
        faster = [
            other
            for other in reversed(tiers.serving)
            if tiers.slower(self._tier, other) and other not in tiers.shut and other not in tiers.shared
        ]
        return ([below] if below is not None else []) + faster

    def take(self, slot: int) -> bool:
        """Decide on one READY slot that is shut; True: enough for this step."""
        place, table = Place(self._tier, slot), self._table
        key = table.key(slot)
        if self._open.moving(place) or self._cascade.moving(place):
            return False
        if self._tiers.is_off(self._tier):  # it can't be read
            table.retire(slot)
            self._lost += 1
        elif self._shrinks and table.free > 0:
            self._move_inside(key, place)
        elif self._tier in self._tiers.shared or self._elsewhere(key):
            self._open.leaves(key, place)
            table.retire(slot)
            self._done += 1
        elif not any(self._tiers.tables[target].holds(key) for target in self._targets):  # else it is on its way there
            self._waiting.setdefault(self._targets[0] if self._targets else -1, {})[key] = place
        return len(self._moves) + sum(map(len, self._waiting.values())) >= self._most

    def _elsewhere(self, key: bytes) -> bool:
        """Whether the block is READY in a tier that stays."""
        tiers = self._tiers
        return any(
            tiers.tables[other].find(key) is not None
            for other in tiers.serving
            if other != self._tier and other not in tiers.shut
        )

    def _move_inside(self, key: bytes, source: Place) -> None:
        pins = self._open.pins
        keepers = pins.holders(key, source) if pins is not None else []
        self._tiers.pin([source])
        self._table.retire(source.slot)
        slots = self._table.reserve([key])
        assert slots is not None
        self._begin(Move(key, source, Place(self._tier, slots[0])), keepers)

    def _begin(self, move: Move, keepers: Sequence[str] = ()) -> None:
        self._open.begin(move, keepers)
        self._moves.append(move)

    def flush(self) -> None:
        """Begin the copies to other tiers, as far as there is room; decide on what finds none."""
        waiting = self._waiting.pop(-1, {})
        for target, wanted in list(self._waiting.items()):
            waiting.update(self._move_out(wanted, target))
        for target in self._targets[1:]:
            waiting = self._move_out(waiting, target) if waiting else {}
        for place in waiting.values():
            if self._stays:
                self._left += 1
            else:
                self._table.retire(place.slot)
                self._lost += 1

    def _move_out(self, wanted: dict[bytes, Place], target: int) -> dict[bytes, Place]:
        """Begin as many as there is room for; the rest. What is slower makes room as for a cascade, a faster one only
        where nothing is lost."""
        tiers, table = self._tiers, self._tiers.tables[target]
        sources = list(wanted.values())
        tiers.pin(sources)  # making room must not take them
        self._clear += tiers.make_room(target, len(sources), lossless=tiers.slower(self._tier, target))
        taken = list(wanted.items())[: table.free]
        tiers.unpin(sources[len(taken) :])
        slots = table.reserve([key for key, _ in taken]) or []
        for (key, source), slot in zip(taken, slots, strict=True):
            self._begin(Move(key, source, Place(target, slot)))
        return dict(list(wanted.items())[len(taken) :])

    def result(self, round_over: bool) -> Emptied:
        return Emptied(
            tuple(self._moves), tuple(self._clear), self._done, self._lost, self._left, round_over=round_over
        )
