"""Where blocks lie in a store, and why others do not: block by block, for operators and for `explain`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from raykv.actors.store_stock import Stock
from raykv.admin_messages import Absence, BlockPlace
from raykv.core.known_models import KnownModels, best_difference
from raykv.core.selections import checked_fingerprints, checked_hashes
from raykv.engine_messages import Why
from raykv.store_messages import FINGERPRINT_NBYTES

STEP = 64
"""Hashes in one hold of the lock."""
LEFT = frozenset({Why.EVICTED, Why.EXPIRED, Why.CLEARED})
"""Reasons of a block that was here before."""
MOST_OTHERS = 4096
"""Of other models so many heads are looked for, those of which the store holds something."""


class Places:
    """Answers for one moment. Any thread; the lock is held a part at a time. `stock` None: nothing is held."""

    def __init__(self, stock: Stock | None, models: KnownModels) -> None:
        self._stock, self._models = stock, models

    def where(self, fingerprints: Sequence[str], hashes: bytes) -> tuple[BlockPlace, ...]:
        """For each hash. Raises StoreError for bad input."""
        mine, digests, stock = checked_fingerprints(fingerprints), checked_hashes(hashes), self._stock
        heads = self._heads(mine)
        if stock is None:
            return (BlockPlace((), 0, max(1, len(heads))),) * len(digests)
        found: list[BlockPlace] = []
        for at in range(0, len(digests), STEP):
            with stock.lock:
                found += [self._place(stock, heads, digest) for digest in digests[at : at + STEP]]
        return tuple(found)

    def _place(self, stock: Stock, heads: Sequence[bytes], digest: bytes) -> BlockPlace:
        book, keys = stock.book, [head + digest for head in heads]
        tiers = [book.in_tiers(key) for key in keys]
        media = book.media
        everywhere = [media[tier] for tier in tiers[0] if all(tier in one for one in tiers)] if tiers else []
        expires = max((book.contents.pins.expires(key) for key in keys), default=0.0)
        own = set(book.own_tiers)
        slots = sum(tier in own for one in tiers for tier in one)
        parts = sum(map(bool, tiers))
        return BlockPlace(tuple(everywhere), parts, max(1, len(keys)), slots * stock.tiers.slot_nbytes, expires)

    def why(self, fingerprints: Sequence[str], hashes: bytes, then: float = 0.0) -> tuple[Absence | None, ...]:
        """For each hash; None: all its parts are held. Raises StoreError for bad input.

        `then`: why it was not here at that time (seconds since the epoch), as far as is remembered; 0: now. A block
        that is held, and of which nothing older is remembered, is None then too, if no other model's was held then.
        """
        mine, digests, stock = checked_fingerprints(fingerprints), checked_hashes(hashes), self._stock
        if stock is None:
            never = Absence(Why.NEVER_STORED, detail="the store has no open tier: no engine has joined it yet")
            return (never,) * len(digests)
        heads = self._heads(mine)
        chosen = set(heads)
        others = [head for head in known_heads(stock, KnownModels()) if head not in chosen][:MOST_OTHERS]
        found: list[Absence | None] = []
        for at in range(0, len(digests), STEP):
            with stock.lock:
                found += [self._absence(stock, heads, others, digest, then) for digest in digests[at : at + STEP]]
        return tuple(found)

    def _absence(
        self, stock: Stock, heads: Sequence[bytes], others: Sequence[bytes], digest: bytes, then: float
    ) -> Absence | None:
        book = stock.book
        keys = [head + digest for head in heads]
        lacking = [key for key in keys if book.find(key) is None]
        parts = ""
        if 0 < len(lacking) < len(heads):
            parts = f"{len(heads) - len(lacking)} of {len(heads)} parts are held"
        # What is held now may have been away then: who missed it has most often stored it himself since.
        noted = [
            found for key in (keys if then else lacking) if (found := book.contents.absences.find(key)) is not None
        ]
        gone_since = [found for found in noted if found[1] > then > 0 and found[0] in LEFT]
        noted = [found for found in noted if found not in gone_since]
        if heads and not lacking and not noted:
            elsewhere = [head for head in others if _was_held(stock, head + digest, then)] if then else []
            return self._other_model(heads, elsewhere) if elsewhere else None
        if noted:
            why, at = max(noted, key=lambda one: one[1])
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
            return Absence(why, at, f"{when}; {parts}" if parts else when)
        elsewhere = [head for head in others if book.find(head + digest) is not None]
        if elsewhere and not parts:
            return self._other_model(heads, elsewhere)
        if gone_since and not parts:
            why, at = max(gone_since, key=lambda one: one[1])
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
            return Absence(
                Why.NOT_FOUND, 0.0, f"it has left since, at {when} ({why}); what was before is not known any more"
            )
        return Absence(Why.NEVER_STORED, 0.0, parts)

    def _other_model(self, heads: Sequence[bytes], elsewhere: Sequence[bytes]) -> Absence:
        models = list(dict.fromkeys(head[:FINGERPRINT_NBYTES] for head in elsewhere))
        return Absence(Why.OTHER_FINGERPRINT, 0.0, self._differ(heads, models))

    def _differ(self, heads: Sequence[bytes], others: Sequence[bytes]) -> str:
        """Which fact differs, and both its values, as far as the facts of both are known."""
        mine = dict.fromkeys(head[:FINGERPRINT_NBYTES] for head in heads)
        ours = [model.facts for one in mine if (model := self._models.get(one)) is not None and model.facts]
        theirs = [model.facts for one in others if (model := self._models.get(one)) is not None and model.facts]
        names = ", ".join(one.hex() for one in others[:2])
        difference = best_difference(ours[:16], theirs[:16])
        return f"held for {names}: {difference or 'what differs is not known'}"

    def _heads(self, fingerprints: Sequence[bytes]) -> list[bytes]:
        """What the keys of these fingerprints' blocks begin with: one for each rank and KV group."""
        known = known_heads(self._stock, self._models) if self._stock is not None else []
        found: list[bytes] = []
        for one in dict.fromkeys(fingerprints):
            found += [head for head in known if head.startswith(one)] or [one + bytes(1)]
        return found


def _was_held(stock: Stock, key: bytes, then: float) -> bool:
    """Whether the block is where it is since before `then`, to a second. The lock is held."""
    place = stock.book.find(key)
    return place is not None and time.time() - stock.book.ages()[place.tier].age(place.slot) <= then + 1


def known_heads(stock: Stock, models: KnownModels) -> list[bytes]:
    """Of all models that the store holds something of, or whose engines came: what the keys of their blocks begin
    with. In no lock."""
    with stock.lock:
        found = dict.fromkeys(stock.book.contents.census.heads())
    for model in models.all():
        found.update(dict.fromkeys(model.fingerprint + bytes((group,)) for group in range(model.groups)))
    return list(found)
