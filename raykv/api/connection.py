"""What all operations share: the cluster, its time limits, a look at what there is, and a prompt's hashes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from raykv.api import finding, looking, prompts
from raykv.api.desks import Desk
from raykv.api.errors import NotFoundError
from raykv.api.objects import Engine, Listing, Store
from raykv.api.prompts import Hashed, Prompt
from raykv.api.reach import Caller, NodeFact, World
from raykv.api.store_ops import StoreOps
from raykv.api.words import seconds
from raykv.errors import ConfigError

TIMEOUT_S = 10.0
WAIT_S = 600.0
HASH_S = 30.0
"""An engine fetches a question between two steps, and a step of a long prefill takes seconds."""
NUMBER_LEN = 100


class Connection:
    """Any thread; it keeps nothing of what it saw."""

    def __init__(self, world: World, timeout_s: float = TIMEOUT_S) -> None:
        self._world = world
        self._timeout = seconds(timeout_s, "timeout_s", 3600.0)

    @property
    def address(self) -> str:
        """Of Ray's head."""
        return self._world.address

    @property
    def namespace(self) -> str:
        """Ray's namespace of RayKV's actors."""
        return self._world.namespace

    # -- for the operations -----------------------------------------------------------------------------------------

    def _engines(self, facts: list[NodeFact] | None = None) -> Listing[Engine]:
        return looking.look_at_engines(self._world, self._timeout, self._world.nodes() if facts is None else facts)

    def _stores(self, facts: list[NodeFact] | None = None) -> Listing[Store]:
        return looking.look_at_stores(self._world, self._timeout, self._world.nodes() if facts is None else facts)

    def _engine(self, name: str | None, model: str | None = None) -> Engine:
        return finding.engine(self._engines(), name, model)

    def _desk(self, engine: Engine) -> Desk:
        caller: Caller | None = self._world.desks().get(engine.desk)
        if caller is None:
            raise NotFoundError(f"The desk of engine {engine.id} is gone: the engine has ended.")
        return Desk(caller)

    def _ops(self) -> StoreOps:
        return StoreOps(self._world.stores(), self._timeout)

    def _hashed(self, prompt: Prompt, engine: Engine, stores: Sequence[Store], cache_salt: str, lora: str) -> Hashed:
        limit = max(self._timeout, HASH_S)
        return prompts.hashed(self._desk(engine), engine, stores, prompt, cache_salt, lora, limit)


def new_number(what: str, given: str | None = None) -> str:
    """The number of one operation: `given`, checked, or a new one that nobody else has."""
    if given is None:
        return f"{what}-{secrets.token_hex(8)}"
    if not isinstance(given, str) or not 0 < len(given) <= NUMBER_LEN or not given.isprintable():
        raise ConfigError(f"number is {given!r:.120}. It must be a text of 1 to {NUMBER_LEN} characters.")
    return given
