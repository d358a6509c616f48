"""What an operator tells a `NodeStore` and hears from it: plain frozen records, no heavy import.

A store is asked through `StoreHandle.call(METHOD, ...)`. Each operation is idempotent and says what it did. What takes
long is an operation with a number: `begin` answers at once, `operation(number)` says how far it is. Bad input raises
StoreError with one sentence that names the thing, the value and the fix, before anything is changed.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field

from raykv.store_messages import Medium, TierSpec
from raykv.types import StoreLife

TENANT_NBYTES = 8
NO_TENANT = bytes(TENANT_NBYTES)


def tenant_tag(cache_salt: str) -> bytes:
    """What a store keeps of a cache salt: TENANT_NBYTES of its digest, so that the salt itself is nowhere kept.

    Without a salt NO_TENANT.
    """
    return hashlib.blake2b(cache_salt.encode(), digest_size=TENANT_NBYTES).digest() if cache_salt else NO_TENANT


# -- what a store holds -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelView:
    """One fingerprint that the store knows. `facts`: the canonical JSON behind it (`connector.fingerprint`), "" for
    blocks of an earlier life whose engine has not come back and whose facts were not kept. `windows`: of its KV groups,
    in blocks (0: the whole prefix), while an engine with it is attached; else empty."""

    fingerprint: str
    model: str
    facts: str
    blocks: int
    nbytes: int
    engines: tuple[str, ...] = ()
    windows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TenantView:
    """A tenant's share. `quota` bytes over all tiers of the store; None: no limit."""

    tag: str
    blocks: int
    nbytes: int
    quota: int | None = None
    refused_blocks: int = 0


@dataclass(frozen=True, slots=True)
class PinView:
    """Blocks that an operator keeps from eviction until `expires` (seconds since the epoch)."""

    number: str
    blocks: int
    nbytes: int
    expires: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which blocks an operation is about: those that meet all that is given; nothing given means all.

    `fingerprints`: hexadecimal, of all ranks of a model. `tenant`: `tenant_tag` in hexadecimal ("00"*8: those
    without). `hashes`: block hashes, concatenated; of a prefix all its blocks. `medium`: of one tier only.
    """

    fingerprints: tuple[str, ...] = ()
    tenant: str = ""
    hashes: bytes = b""
    medium: Medium | None = None


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where the blocks with one hash lie in this store, over all ranks and KV groups asked for: `media` are those in
    which every part is, fastest first; `parts` of `of` are anywhere. `expires`: its operator's pin, 0 without one."""

    media: tuple[Medium, ...]
    parts: int
    of: int
    nbytes: int = 0
    expires: float = 0.0


@dataclass(frozen=True, slots=True)
class Absence:
    """Why the store does not hold a block: `why` is a value of `engine_messages.Why`, `at` when it went (0: not
    known), `detail` for people, such as the fact that differs and both its values."""

    why: str
    at: float = 0.0
    detail: str = ""


# -- operations ---------------------------------------------------------------------------------------------------


class OperationKind(enum.StrEnum):
    """What takes long."""

    PREFETCH = "prefetch"  # copy the selected blocks up into `medium`, from slower tiers and from peers
    VERIFY = "verify"  # read and check every slot now
    ADD_TIER = "add tier"
    RESIZE_TIER = "resize tier"
    DRAIN_TIER = "drain tier"  # what lies only there goes to another tier; nothing new is put there
    REMOVE_TIER = "remove tier"  # drained first; its memory or files are given back


@dataclass(frozen=True, slots=True)
class Operation:
    """An order for one. `number` is chosen by who orders; a repeat is answered by the state of the first.

    `tier`: for ADD_TIER all of it, else its medium and (for RESIZE_TIER) the new capacity in bytes. `after`: for
    ADD_TIER the medium behind which it goes in the cascade; None: behind all. `windows`: for PREFETCH, those of the
    selected model's KV groups (as in ModelView); a store needs them to ask other nodes while no engine of that model is
    attached to it.
    """

    number: str
    kind: OperationKind
    selection: Selection | None = None
    tier: TierSpec | None = None
    after: Medium | None = None
    windows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OperationState:
    """How far one is: `done` of `total` blocks. `result` says in a sentence what was done, `error` what was not."""

    number: str
    kind: OperationKind
    done: int
    total: int
    running: bool
    began: float
    ended: float = 0.0
    result: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """What an operation that ends at once did: how many blocks and bytes it was about, and a sentence."""

    blocks: int
    nbytes: int
    said: str


@dataclass(frozen=True, slots=True)
class StoreView:
    """What an operator sees of a store beside its StoreStatus."""

    store: StoreLife
    name: str
    models: tuple[ModelView, ...] = ()
    tenants: tuple[TenantView, ...] = ()
    pins: tuple[PinView, ...] = ()
    operations: tuple[OperationState, ...] = ()
    absences_kept: int = 0
    more: dict[str, int] = field(default_factory=dict)


# The methods of a NodeStore for operators (concurrency group "admin"):
#   view() -> StoreView
#   where(fingerprints: tuple[str, ...], hashes: bytes) -> tuple[BlockPlace, ...]     one for each hash
#   why(fingerprints: tuple[str, ...], hashes: bytes) -> tuple[Absence | None, ...]   None: it is held
#   pin(number: str, selection: Selection, seconds: float, note: str) -> Done
#   unpin(number: str) -> Done
#   forget(selection: Selection) -> Done                                              nothing pinned or leased
#   set_quota(tenant: str, nbytes: int | None) -> Done
#   begin(operation: Operation) -> OperationState
#   operation(number: str) -> OperationState
#   operations() -> tuple[OperationState, ...]
