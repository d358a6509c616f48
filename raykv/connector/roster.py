"""The children of one engine as its scheduler half sees them.

A child's index is its identity on the wire and is never used again, so what comes late for one that is gone finds
what is left of it. The order in which children are asked is apart from that, and changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from raykv.connector.scheduler_child import SchedulerChild
from raykv.messages import ChildIndex


class Roster:
    """`roster[index]`: any child there ever was. Iterating: those of the chain, first asked first.

    Changed by EngineCore's thread only; any thread may iterate, and sees the chain of one moment.
    """

    def __init__(self, children: Iterable[SchedulerChild]) -> None:
        self._all = list(children)
        self._chain = tuple(self._all)

    def __getitem__(self, index: ChildIndex) -> SchedulerChild:
        return self._all[index]

    def __iter__(self) -> Iterator[SchedulerChild]:
        return iter(self._chain)

    def __len__(self) -> int:
        return len(self._chain)

    @property
    def next_index(self) -> ChildIndex:
        """The index of the next child to be added."""
        return len(self._all)

    def ever(self) -> Sequence[SchedulerChild]:
        """All there ever were, by index."""
        return self._all

    def find(self, name: str) -> SchedulerChild | None:
        """The child of the chain with this name."""
        return next((child for child in self._chain if child.name == name), None)

    def add(self, child: SchedulerChild, before: SchedulerChild | None = None) -> None:
        """A child with the next index, in front of `before` or at the end."""
        assert child.index == self.next_index
        self._all.append(child)
        chain = list(self._chain)
        chain.insert(chain.index(before) if before is not None else len(chain), child)
        self._chain = tuple(chain)

    def remove(self, child: SchedulerChild) -> None:
        """It is gone; `roster[child.index]` still finds it."""
        self._chain = tuple(one for one in self._chain if one is not child)

    def reorder(self, names: Sequence[str]) -> None:
        """First the named ones in this order, then those that are not named as they are."""
        place = {name: number for number, name in enumerate(names)}
        self._chain = tuple(sorted(self._chain, key=lambda child: place.get(child.name, len(place))))
