"""The requests of one engine as its TierConnector knows them, and the names of their blocks in the store."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raykv.admin_messages import NO_TENANT, tenant_tag
from raykv.engine_messages import Why
from raykv.store_messages import HASH_NBYTES, Medium
from raykv.types import RequestId

if TYPE_CHECKING:
    from vllm.v1.request import Request

SALT_NBYTES = 16


@dataclass(slots=True, eq=False)
class Known:
    """A request, from its arrival to its end. Its first `saved` blocks are in the store or on their way to it.

    `taken`: its look-up has ended with an allocation. If vLLM asks once more, the request has lost its blocks.
    """

    request: Request
    salt: bytes
    computed: int = 0
    saved: int = 0
    may_load: bool = True
    taken: bool = False
    preemptions: int = 0
    media: tuple[Medium, ...] = ()
    why: Why | None = None
    """Why its last look-up was a miss, if not because nothing was found."""
    given: int = 0
    """Blocks of it that were given to the store."""
    tenant: bytes = NO_TENANT
    """Whose blocks these are."""
    peer: str = ""
    """The node from which `media` of peers come."""


class KnownRequests:
    """By request: what is known of it. One thread: the scheduler's."""

    def __init__(self) -> None:
        self.salt = b""
        # An adapter is hashed by its name and path, not by its content, which may change while a store lives on.
        self._adapter_salt = os.urandom(SALT_NBYTES)
        self._known: dict[RequestId, Known] = {}

    def add(self, request: Request) -> Known:
        known = Known(request, self._adapter_salt if request.lora_request else b"")
        known.tenant = tenant_tag(request.cache_salt or "")
        self._known[RequestId(request.request_id)] = known
        return known

    def get(self, request: str) -> Known | None:
        return self._known.get(RequestId(request))

    def forget(self, request: RequestId) -> None:
        self._known.pop(request, None)

    def reset(self) -> None:
        """From here on all has other keys, and the requests of before are unknown."""
        self.salt = os.urandom(SALT_NBYTES)
        self._known.clear()

    def salt_of(self, known: Known | None) -> bytes:
        """What is between vLLM's hashes and the keys of these blocks; of an adapter's request if there is none."""
        return self.salt + (self._adapter_salt if known is None else known.salt)

    def keys(self, known: Known, places: Iterable[int]) -> list[bytes]:
        """What the store knows these blocks of a request by: vLLM's hashes, HASH_NBYTES each."""
        salt = self.salt_of(known)
        return [block_key(known.request.block_hashes[i], salt) for i in places]

    def is_private(self, known: Known) -> bool:
        """Whether no other engine knows its blocks by the same keys."""
        return bool(self.salt or known.salt)

    def __len__(self) -> int:
        return len(self._known)


def block_key(block_hash: bytes, salt: bytes = b"") -> bytes:
    """vLLM's hash of a block in HASH_NBYTES. A salt keeps what must not be shared apart."""
    raw = bytes(block_hash)
    if salt or len(raw) > HASH_NBYTES:
        return hashlib.blake2b(raw, digest_size=HASH_NBYTES, key=salt).digest()
    return raw.ljust(HASH_NBYTES, b"\0")
