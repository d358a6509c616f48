"""Which blocks an operator means: his words checked, and found in the tables part by part.

A selection by hashes is asked of the index. Any other one reads the slots, STEP of them at a time: the caller has the
lock for one part and gives it back between two, so what comes or goes meanwhile may be in or out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from raykv.admin_messages import TENANT_NBYTES, Selection
from raykv.core.store_plans import Place, Published
from raykv.core.tenants import NOBODY, Tenants
from raykv.core.tiers import Tiers
from raykv.errors import StoreError
from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES, Medium

STEP = 2048
MOST_HASHES = 1_000_000
MOST_FINGERPRINTS = 4096


@dataclass(frozen=True, slots=True)
class Chosen:
    """A Selection, checked. `fingerprints` empty: all; `tenant` and `medium` None: any; `hashes` None: no matter."""

    fingerprints: frozenset[bytes]
    tenant: bytes | None
    hashes: tuple[bytes, ...] | None
    medium: Medium | None

    def heads(self, known: Collection[bytes]) -> list[bytes]:
        """Those of the known heads that are meant."""
        return [head for head in known if not self.fingerprints or head[:FINGERPRINT_NBYTES] in self.fingerprints]


def chosen(selection: Selection, media: Sequence[Medium]) -> Chosen:
    """Raises StoreError for what no store could find, or what is not of this one's `media`."""
    if not isinstance(selection, Selection):
        raise StoreError(f"Which blocks is said by a Selection, not by {type(selection).__name__}.")
    medium = selection.medium
    if medium is not None and medium not in media:
        raise StoreError(f"This store has no {medium!s:.40} tier: it has {', '.join(map(str, media)) or 'none yet'}.")
    return Chosen(
        frozenset(checked_fingerprints(selection.fingerprints)),
        checked_tenant(selection.tenant) if selection.tenant != "" else None,
        tuple(checked_hashes(selection.hashes)) if selection.hashes != b"" else None,
        Medium(medium) if medium is not None else None,
    )


def checked_fingerprints(fingerprints: Sequence[str]) -> list[bytes]:
    """Raises StoreError."""
    if not isinstance(fingerprints, tuple | list) or len(fingerprints) > MOST_FINGERPRINTS:
        raise StoreError(f"Fingerprints are up to {MOST_FINGERPRINTS} texts, not {fingerprints!r:.80}.")
    return [_from_hex("A fingerprint", one, FINGERPRINT_NBYTES) for one in fingerprints]


def checked_tenant(tenant: str) -> bytes:
    """Raises StoreError."""
    return _from_hex("A tenant's tag", tenant, TENANT_NBYTES)


def checked_hashes(hashes: bytes) -> list[bytes]:
    """Raises StoreError."""
    if not isinstance(hashes, bytes) or len(hashes) % HASH_NBYTES or len(hashes) > MOST_HASHES * HASH_NBYTES:
        what = f"{len(hashes)} bytes" if isinstance(hashes, bytes) else type(hashes).__name__
        raise StoreError(f"Block hashes are bytes, {HASH_NBYTES} for each of up to {MOST_HASHES:,}, not {what}.")
    return [hashes[at : at + HASH_NBYTES] for at in range(0, len(hashes), HASH_NBYTES)]


def _from_hex(what: str, text: str, nbytes: int) -> bytes:
    try:
        found = bytes.fromhex(text) if isinstance(text, str) and len(text) == 2 * nbytes else b""
    except ValueError:
        found = b""
    if len(found) != nbytes:
        raise StoreError(f"{what} is a text of {2 * nbytes} hexadecimal digits, not {text!r:.80}.")
    return found


Part = Callable[[], list[Published]]
"""Finds what is READY of one part of a selection. In the lock of the book."""


def parts(tiers: Tiers, tenants: Tenants, what: Chosen, heads: Sequence[bytes]) -> Iterator[Part]:
    """The parts of a selection, each to be called once, in order; a block that lies in two tiers is found twice.

    `heads`: all that the store knows, of which those that are meant are asked for.
    """
    if what.hashes is not None:
        mine = what.heads(heads)
        step = max(1, STEP // max(1, len(mine)))
        for at in range(0, len(what.hashes), step):
            keys = [head + digest for digest in what.hashes[at : at + step] for head in mine]
            yield lambda keys=keys: _of_keys(tiers, tenants, what, keys)  # type: ignore[misc]
        return
    for tier in list(tiers.serving):
        if what.medium in (None, tiers.media[tier]):
            for first in range(0, tiers.tables[tier].slots, STEP):
                yield lambda tier=tier, first=first: _of_slots(tiers, tenants, what, tier, first)  # type: ignore[misc]


def _of_keys(tiers: Tiers, tenants: Tenants, what: Chosen, keys: Sequence[bytes]) -> list[Published]:
    found: list[Published] = []
    for tier in tiers.serving:
        if what.medium in (None, tiers.media[tier]):
            table = tiers.tables[tier]
            slots = ((key, table.find(key)) for key in keys)
            found += [(key, Place(tier, slot)) for key, slot in slots if slot is not None]
    return _of_tenant(tenants, what, found)


def _of_slots(tiers: Tiers, tenants: Tenants, what: Chosen, tier: int, first: int) -> list[Published]:
    if tier not in tiers.serving:
        return []
    table, found = tiers.tables[tier], []
    slot = table.ready_from(first)
    while slot is not None and slot < first + STEP:
        key = table.key(slot)
        if not what.fingerprints or key[:FINGERPRINT_NBYTES] in what.fingerprints:
            found.append((key, Place(tier, slot)))
        slot = table.ready_from(slot + 1)
    return _of_tenant(tenants, what, found)


def _of_tenant(tenants: Tenants, what: Chosen, found: list[Published]) -> list[Published]:
    if what.tenant is None:
        return found
    number = tenants.known(what.tenant)
    if number is None or (number == NOBODY and not tenants.any):
        return found if number == NOBODY else []
    return [(key, place) for key, place in found if tenants.of(place) == number]
