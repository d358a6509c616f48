"""Where a prompt's blocks lie, over several stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from raykv.admin_messages import BlockPlace
from raykv.api.asking import ask, at_all
from raykv.api.objects import Engine, Store
from raykv.api.prompts import Hashed
from raykv.api.reach import Caller
from raykv.api.results import Block, Found, Place
from raykv.store_messages import HASH_NBYTES


def look_up(
    engine: Engine, hashed: Hashed, stores: Sequence[Store], callers: Mapping[str, Caller], timeout: float
) -> Found:
    """Ask all stores at once; one that does not answer is named in the result."""
    by_actor = {store.actor: store for store in stores if not store.problem and store.actor in callers}
    silent = [store.at for store in stores if store.actor not in by_actor]
    places: dict[str, tuple[BlockPlace, ...]] = {}
    if engine.fingerprints and hashed.blocks:

        def one(actor: str) -> tuple[BlockPlace, ...]:
            answer = ask(callers[actor], "where", engine.fingerprints, hashed.hashes, timeout=timeout)
            return cast("tuple[BlockPlace, ...]", answer)

        places, errors = at_all(one, by_actor)
        silent += [by_actor[actor].at for actor in errors]
    size = hashed.block_size
    blocks = []
    for index in range(hashed.blocks):
        found = [
            Place.made(by_actor[actor].at, by_actor[actor].node, of_store[index])
            for actor, of_store in places.items()
            if of_store[index].parts
        ]
        own = hashed.hashes[index * HASH_NBYTES : (index + 1) * HASH_NBYTES].hex()
        blocks.append(Block(index, index * size, (index + 1) * size, own, tuple(found)))
    return Found(engine.id, engine.model, hashed.tokens, size, tuple(blocks), tuple(silent))
