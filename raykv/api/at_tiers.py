"""Operations on the tiers of stores: add, resize, drain, remove. A part of `Cluster`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from raykv.admin_messages import Operation, OperationKind
from raykv.api import finding
from raykv.api.checked import operation
from raykv.api.connection import WAIT_S, Connection, new_number
from raykv.api.errors import OperationError
from raykv.api.objects import Store
from raykv.api.results import Outcome, Tell
from raykv.api.words import nbytes, seconds
from raykv.config.reader import show
from raykv.errors import ConfigError
from raykv.store_messages import Medium, TierSpec


class AtTiers(Connection):
    """`store` names which: NAME (on all nodes), NAME@NODE, @NODE or an actor; None: all, if they have one name."""

    # -- tiers ------------------------------------------------------------------------------------------------------

    @operation
    def add_tier(
        self,
        tier: str,
        capacity: int | str,
        *,
        path: str | None = None,
        after: str | None = None,
        store: str | None = None,
        wait_s: float = WAIT_S,
        tell: Tell | None = None,
        number: str | None = None,
    ) -> Outcome:
        """Give stores another tier while engines use them; one that is drained takes blocks again.

        `path`: its folder (disk, fs). `after`: the medium behind which it is asked and filled; None: where it belongs.
        """
        medium = finding.medium(tier)
        spec = TierSpec(medium, nbytes(capacity, "capacity"), _folder(medium, path))
        behind = None if after is None else finding.medium(after)
        chosen = new_number("add", number)
        stores = self._tier_stores(store)
        for one in stores if number is None else ():
            known = one.tier(medium)
            if known is not None and not known.draining:
                raise OperationError(f"The store {one.at} has a tier {show(tier)} already: resize it.")
            if behind is not None:
                finding.tier(one, behind)
        operation = Operation(chosen, OperationKind.ADD_TIER, tier=spec, after=behind)
        return self._follow(f"add tier {medium}", lambda _: operation, stores, wait_s, tell)

    @operation
    def resize_tier(
        self,
        tier: str,
        capacity: int | str,
        *,
        store: str | None = None,
        wait_s: float = WAIT_S,
        tell: Tell | None = None,
        number: str | None = None,
    ) -> Outcome:
        """Change a tier's room to so many bytes ("64GiB"). Where it shrinks, what does not fit is evicted."""
        room = nbytes(capacity, "capacity")
        return self._tier_operation("resize", OperationKind.RESIZE_TIER, tier, room, store, wait_s, tell, number)

    @operation
    def drain_tier(
        self,
        tier: str,
        *,
        store: str | None = None,
        wait_s: float = WAIT_S,
        tell: Tell | None = None,
        number: str | None = None,
    ) -> Outcome:
        """Put nothing new into a tier, and move what lies only there to another one."""
        return self._tier_operation("drain", OperationKind.DRAIN_TIER, tier, 0, store, wait_s, tell, number)

    @operation
    def remove_tier(
        self,
        tier: str,
        *,
        store: str | None = None,
        wait_s: float = WAIT_S,
        tell: Tell | None = None,
        number: str | None = None,
    ) -> Outcome:
        """Drain a tier, then take it out: its memory or its files are given back."""
        return self._tier_operation("remove", OperationKind.REMOVE_TIER, tier, 0, store, wait_s, tell, number)

    # -- parts ---------------------------------------------------------------------------------------------------

    def _tier_stores(self, store: str | None) -> list[Store]:
        return finding.stores(self._stores(), store, one_name=True)

    def _tier_operation(
        self,
        verb: str,
        kind: OperationKind,
        tier: str,
        capacity: int,
        store: str | None,
        wait_s: float,
        tell: Tell | None,
        number: str | None,
    ) -> Outcome:
        medium = finding.medium(tier)
        chosen = new_number(verb, number)
        stores = self._tier_stores(store)
        for one in stores if number is None else ():
            finding.tier(one, medium)
        operation = Operation(chosen, kind, tier=TierSpec(medium, capacity))
        return self._follow(f"{verb} tier {medium}", lambda _: operation, stores, wait_s, tell)

    def _follow(
        self, what: str, make: Callable[[Store], Operation], stores: Sequence[Store], wait_s: float, tell: Tell | None
    ) -> Outcome:
        limit = seconds(wait_s, "wait_s") if wait_s != 0 else 0.0
        return self._ops().follow(what, {one.actor: make(one) for one in stores}, stores, limit, tell)


def _folder(medium: Medium, path: str | None) -> str | None:
    if medium is Medium.PEER:
        raise ConfigError(
            "tier is \"peer\": that is the room of other nodes' stores, switched on by an engine's config."
        )
    if medium is Medium.HOST:
        if path is not None:
            raise ConfigError(f"path is {show(path)}, but host memory has no folder. Leave it out.")
        return None
    if path is None:
        raise ConfigError(f"path is missing: a tier {show(medium)} needs a folder, such as /nvme/raykv.")
    full = os.path.expanduser(path)
    if not os.path.isabs(full) or "\0" in full:
        raise ConfigError(f"path is {show(path)}. It must be absolute: the store runs elsewhere.")
    return full
