"""Which engine, store, tier, node or model is meant by a name. What is not there is one sentence with what is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from raykv.admin_messages import NO_TENANT, TENANT_NBYTES, tenant_tag
from raykv.api.errors import NotFoundError, OperationError
from raykv.api.objects import Child, Engine, Node, Store, Tier
from raykv.api.words import unknown
from raykv.config.reader import show
from raykv.errors import ConfigError
from raykv.store_messages import Medium

TAG = "tag:"
T = TypeVar("T", Engine, Node)


def engine(engines: Sequence[Engine], name: str | None, model: str | None = None) -> Engine:
    """The engine of this name or id, the first letters of one, its host or a model's name; None: the only one.

    Engines that share all their blocks count as one where none is named. With `model` it must serve that one.
    """
    if model is not None:
        _check_model(engines, name, model)
    pool = [one for one in engines if model is None or model in (one.model, *one.served)]
    if name is None:
        if not pool:
            raise NotFoundError("No engine has told anything of itself yet. Start one with the RayKV connector.")
        if len({(one.model, one.fingerprints, one.block_size) for one in pool}) > 1:
            raise OperationError(f"There are {len(pool)} engines. Say which one is meant: {_ids(pool)}.")
        return next((one for one in pool if not one.problem), pool[0])
    return _matching(
        "engine", name, pool, lambda one: (one.label, one.id), lambda one: (one.host, one.model, *one.served)
    )


def _check_model(engines: Sequence[Engine], name: str | None, model: str) -> None:
    """Its own sentence for a prompt that is meant for another model than the engine's."""
    served = {known for one in engines for known in (one.model, *one.served)}
    if model not in served:
        raise unknown("engine of the model", model, served)
    if name is not None:
        named = engine(engines, name)
        if model not in (named.model, *named.served):
            names = ", ".join(dict.fromkeys((*named.served, named.model)))
            raise OperationError(
                f"Engine {named.id} serves {names}, not {show(model)}: a prompt's blocks are those of one model. "
                f"Name an engine of that model: {_ids(one for one in engines if model in (one.model, *one.served))}."
            )


def _ids(engines: Iterable[Engine]) -> str:
    return ", ".join(one.label for one in engines) or "none"


def node(nodes: Sequence[Node], name: str) -> Node:
    """The node of this id, the first letters of it, its host or its address."""
    return _matching("node", name, nodes, lambda one: (one.id,), lambda one: (one.host, one.address))


def stores(known: Sequence[Store], name: str | None, *, one_name: bool = False) -> list[Store]:
    """The stores of this NAME (on all nodes), at NAME@NODE, at @NODE, or of this actor; None: all.

    `one_name`: None only if all have one name. Raises if one of them does not answer: nothing is done by halves.
    """
    if not known:
        raise NotFoundError("No store runs in this cluster. An engine with a TierConnector starts its node's.")
    found = list(known)
    if name is None:
        names = sorted({store.name for store in known})
        if one_name and len(names) > 1:
            raise OperationError(f"There are {len(names)} stores. Say which one is meant: {', '.join(names)}.")
    else:
        wanted, at, place = name.partition("@")
        found = [store for store in known if name == store.actor]
        if not found:
            found = [store for store in known if (not wanted and at) or store.name == wanted]
            if at:
                found = [store for store in found if place and (store.node.startswith(place) or store.host == place)]
        if not found:
            raise unknown("store", name, {store.name for store in known} | {store.at for store in known})
    for store in found:
        if store.problem:
            raise OperationError(
                f"The store {store.at} does not answer ({store.problem}); nothing was done anywhere. Ray restarts a "
                "store that has died: try again, or name the other stores one by one."
            )
    return found


def tier(store: Store, medium: Medium) -> Tier:
    """Its tier of that medium."""
    found = store.tier(medium)
    if found is None:
        media = ", ".join(one.medium for one in store.tiers) or "none yet: no engine has opened its tiers"
        raise NotFoundError(f"The store {store.at} has no tier {show(medium)}. It has: {media}.")
    return found


def medium(name: str) -> Medium:
    """A medium's name."""
    if name not in list(Medium):
        raise unknown("medium", name, list(Medium))
    return Medium(name)


def child(of: Engine, name: str) -> Child:
    """A child of the engine."""
    found = of.child(name)
    if found is None:
        raise unknown(f"child of engine {of.id} called", name, [one.name for one in of.children])
    return found


def fingerprints(known: Sequence[Store], engines: Sequence[Engine], model: str) -> tuple[str, ...]:
    """All fingerprints under which blocks of that model lie in some store; a fingerprint itself is a name too."""
    found: dict[str, None] = {}
    names: set[str] = set()
    for store in known:
        for view in store.models:
            names.add(view.model)
            if model in (view.model, view.fingerprint):
                found[view.fingerprint] = None
    for one in engines:
        if one.fingerprints:
            names.update((one.model, *one.served))
            if model in (one.model, *one.served):
                found.update(dict.fromkeys(one.fingerprints))
    if not found:
        raise unknown("model with blocks in a store", model, names - {""})
    return tuple(found)


def tenant(name: str) -> str:
    """A tenant's tag in hexadecimal, from its cache salt, or from "tag:HEX" as `quotas` lists it. "": no salt."""
    if not name.startswith(TAG):
        return tenant_tag(name).hex()
    tag = name.removeprefix(TAG).lower()
    if len(tag) != 2 * TENANT_NBYTES or any(letter not in "0123456789abcdef" for letter in tag):
        raise ConfigError(
            f"tenant is {show(name)}. Behind {TAG!r} stand {2 * TENANT_NBYTES} hexadecimal digits, such as "
            f"{TAG}{NO_TENANT.hex()}."
        )
    return tag


def _matching(
    kind: str,
    name: str,
    pool: Sequence[T],
    ids: Callable[[T], tuple[str, ...]],
    others: Callable[[T], tuple[str, ...]],
) -> T:
    """The one with that id, else the one whose id begins so, else the one with such another name."""
    exact = [one for one in pool if name in ids(one)]
    begins = [one for one in pool if name and any(known.startswith(name) for known in ids(one))]
    called = [one for one in pool if name in others(one)]
    for found in (exact, begins, called):
        if len(found) == 1:
            return found[0]
        if found:
            meant = ", ".join(ids(one)[0] for one in found)
            raise OperationError(f"{show(name)} is the beginning or a name of {len(found)} {kind}s: {meant}. Say more.")
    raise unknown(kind, name, {text for item in pool for text in ids(item) + others(item)} - {""})
