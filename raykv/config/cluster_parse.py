"""The SPEC.yaml of `raykv up`, translated once into frozen objects. Takes the mapping: YAML is read by who has a file.

    model: Qwen/Qwen3-8B
    vllm: {max_model_len: 8192}
    engines:
      - {name: prefill, role: prefill, replicas: 2, resources: {num_gpus: 1}, transport: nixl}
      - {name: decode, role: decode, replicas: 2, resources: {num_gpus: 1, labels: {pool: decode}}, transport: nixl}
    tiers: [{medium: host, capacity: 64GiB}]
    router: {port: 8000}

Whatever is wrong with it is a ConfigError that names the key, its value and the fix. What only the cluster knows
(nodes, memory, folders) is checked by `core.placement`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from raykv.cluster_messages import EngineRole
from raykv.config.cluster_parts import (
    Named,
    environment_of,
    listed,
    mapping_of,
    number_of,
    texts_of,
    vllm_options,
)
from raykv.config.cluster_spec import (
    ClusterSpec,
    EngineSpec,
    Listen,
    Placement,
    RouterWanted,
    Selector,
    StoreWanted,
    Transport,
)
from raykv.config.events import parse_events
from raykv.config.model import LoadPolicy
from raykv.config.reader import Reader, copy_json, did_you_mean, show
from raykv.config.tiers import KEYS as STORE_KEYS
from raykv.config.tiers import parse_tiers
from raykv.errors import ConfigError
from raykv.event_messages import EventsOptions
from raykv.store_messages import Cascade, Medium

TOP_KEYS = frozenset(
    {"model", "vllm", "engines", "tiers", "stores", "router", "events", "listen", "command", "environment"}
    | {"startup_timeout_s", "unhealthy_timeout_s"}
)
ENGINE_KEYS = frozenset(
    {"name", "role", "replicas", "resources", "placement", "transport", "store", "port", "load_policy"}
    | {"options", "environment"}
)
RESOURCE_KEYS = frozenset({"num_gpus", "num_cpus", "labels", "custom"})
OF_RESOURCES = dict.fromkeys(RESOURCE_KEYS, "resources of the engine")
OF_ENGINE = dict.fromkeys(ENGINE_KEYS - {"environment"}, "an entry of engines")


def parse_spec(raw: object) -> ClusterSpec:
    """Translate the mapping that SPEC.yaml holds. Raises ConfigError, and nothing else, for what can't be used."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"The spec is {show(raw)}. It must be a mapping with the keys {', '.join(sorted(TOP_KEYS))}.")
    content: Mapping[str, Any] = copy_json(raw)
    top = Named(content, "", "the spec")
    top.only(TOP_KEYS, {**OF_ENGINE, **OF_RESOURCES})
    model = top.text("model")
    if model is None:
        raise ConfigError("model is missing. Name a model's folder, or its name on a model hub, as for `vllm serve`.")
    if re.match(r"\.{1,2}/", model) or (model.count("/") > 1 and model[0] not in "/~" and "://" not in model):
        raise ConfigError(
            f"model is {show(model)}, a folder seen from where one stands, and engines stand elsewhere. Write the "
            "folder's whole path, or the model's name on a hub, which has one / at most."
        )
    stores = _stores(top)
    common = vllm_options(top, "vllm")
    everywhere = environment_of(top)
    engines = tuple(
        _engine(entry, stores, common, everywhere) for entry in listed(top, "engines", "{name: main, role: both}")
    )
    _check_names(engines)
    router = _router(top)
    events = parse_events(mapping_of(top, "events"), "events") if top.raw.get("events") is not None else None
    _check_ports(engines, router, events)
    _check_pairs(engines, router)
    command = texts_of(top, "command")
    return ClusterSpec(
        model=model,
        engines=engines,
        stores=stores,
        router=router,
        events=events,
        listen=top.choice("listen", Listen, Listen.LOOPBACK),
        command=tuple(command) if command else None,
        startup_timeout_s=top.seconds("startup_timeout_s", 600.0),
        unhealthy_timeout_s=top.seconds("unhealthy_timeout_s", 120.0),
        raw=_as_json(content),
    )


def _as_json(raw: Mapping[str, Any]) -> str:
    try:
        return json.dumps(raw, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"The spec holds a value that is no JSON ({error}). Write dates and the like as texts, in quotes."
        ) from error


def _engine(
    entry: Reader, stores: Sequence[StoreWanted], common: Mapping[str, Any], everywhere: Mapping[str, str]
) -> EngineSpec:
    entry.only(ENGINE_KEYS, {**OF_RESOURCES, **dict.fromkeys(TOP_KEYS - ENGINE_KEYS, "the spec, at its top")})
    name = entry.text("name")
    if name is None or not re.fullmatch(r"[a-z0-9]([a-z0-9_-]{0,30}[a-z0-9])?", name):
        if "name" not in entry.raw:
            raise ConfigError(f"{entry.path('name')} is missing. Give the engine a name, such as prefill.")
        raise entry.wrong("name", "at most 32 of the letters a-z, digits, '_' and '-', first and last not '_' or '-'")
    role = entry.choice("role", EngineRole, EngineRole.BOTH)
    transport = entry.choice("transport", Transport, Transport.NIXL if role is not EngineRole.BOTH else Transport.TIERS)
    store = entry.text("store") or (stores[0].name if stores else None)
    found = next((one for one in stores if one.name == store), None)
    if store is not None and found is None:
        raise ConfigError(f"{entry.path('store')} is {show(store)}. {did_you_mean(store, [s.name for s in stores])}")
    if role is not EngineRole.BOTH:
        _check_transport(entry, role, transport, found)
    return EngineSpec(
        name=name,
        role=role,
        replicas=entry.count("replicas", 1, 1, 10_000),
        selector=_resources(entry),
        placement=entry.choice("placement", Placement, Placement.SPREAD),
        transport=transport,
        store=store,
        port=None if entry.raw.get("port") is None else entry.count("port", 0, 1, 65_535),
        load_policy=entry.choice("load_policy", LoadPolicy, LoadPolicy.COMPOSE),
        options={**common, **vllm_options(entry, "options")},
        environment={**everywhere, **environment_of(entry)},
    )


def _check_transport(entry: Reader, role: EngineRole, transport: Transport, store: StoreWanted | None) -> None:
    """The store must have what carries the blocks over."""
    if transport is Transport.TIERS and not (store is not None and store.spec.peer):
        raise ConfigError(
            f'{entry.path("transport")} is "tiers", so blocks go from store to store, but its store reads from no '
            "peer. Add {medium: peer} to its tiers."
        )
    if transport is Transport.FS and not (store and any(tier.medium is Medium.FS for tier in store.spec.tiers)):
        raise ConfigError(
            f'{entry.path("transport")} is "fs", but its store has no tier in a shared folder. Add '
            "{medium: fs, path: /mnt/shared/raykv, capacity: 1TiB} to its tiers."
        )
    if transport is Transport.FS and role is EngineRole.PREFILL and store and store.spec.cascade is not Cascade.WRITE:
        raise ConfigError(
            f'{entry.path("transport")} is "fs", so a decode engine reads what this engine has just written, but its '
            f'store has cascade "{store.spec.cascade}": blocks get to the shared folder when their room is needed, not '
            "before. Set `cascade: write` in its entry of `stores` (tiers at the top can't say it)."
        )


def _resources(entry: Reader) -> Selector:
    resources = Named(mapping_of(entry, "resources"), entry.path("resources"), entry.path("resources"))
    resources.only(RESOURCE_KEYS, OF_ENGINE)
    amounts = {"GPU": number_of(resources, "num_gpus", 0.0), "CPU": number_of(resources, "num_cpus", 1.0)}
    custom = mapping_of(resources, "custom")
    inner = Reader(custom, resources.path("custom"))
    amounts |= {str(name): number_of(inner, name, 0.0) for name in custom}
    return Selector(_labels(resources), {name: amount for name, amount in amounts.items() if amount})


def _labels(reader: Reader) -> dict[str, str]:
    labels = mapping_of(reader, "labels")
    for key, value in labels.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ConfigError(
                f"{reader.path('labels')}.{key} is {show(value)}. Labels of Ray's nodes are texts: put it in quotes."
            )
    return dict(labels)


def _stores(top: Reader) -> tuple[StoreWanted, ...]:
    if top.raw.get("tiers") is not None:
        if top.raw.get("stores") is not None:
            raise ConfigError(
                "The spec has both tiers and stores. tiers is short for one store on the nodes of the engines: move it "
                "into an entry of stores."
            )
        return (_store({"tiers": top.raw["tiers"]}, None, ""),)
    if top.raw.get("stores") is None:
        return ()
    stores: list[StoreWanted] = []
    for entry in listed(top, "stores", "{tiers: [{medium: host, capacity: 64GiB}]}"):
        entry.only(
            STORE_KEYS - {"store"} | {"name", "nodes"},
            {"store": "the name key of this entry", **dict.fromkeys(("medium", "capacity", "path"), "tiers")},
        )
        extra = {key: value for key, value in entry.raw.items() if key not in ("name", "nodes")}
        if entry.text("name") is not None:
            extra["store"] = entry.text("name")
        store = _store(extra, _nodes(entry), entry.where)
        if store.name in [one.name for one in stores]:
            raise ConfigError(f"{entry.path('name')} is {show(store.name)}, as is another's. Give each its own name.")
        stores.append(store)
    return tuple(stores)


def _store(extra: Mapping[str, Any], selector: Selector | None, where: str) -> StoreWanted:
    try:
        return StoreWanted(parse_tiers(extra).store, selector, extra)
    except ConfigError as error:  # it speaks of the JSON of a TierConnector
        text = str(error).replace("kv_connector_extra_config.", f"{where}." if where else "")
        raise ConfigError(text.replace("kv_connector_extra_config", where or "the spec")) from error


def _nodes(entry: Reader) -> Selector | None:
    """`engines` (None), or {labels: ..., resources: ...}."""
    if entry.raw.get("nodes") in (None, "engines"):
        return None
    if not isinstance(entry.raw["nodes"], Mapping):
        raise entry.wrong("nodes", "engines, or a mapping such as {labels: {pool: store}}; {} is every node")
    nodes = Named(entry.raw["nodes"], entry.path("nodes"), entry.path("nodes"))
    nodes.only({"labels", "resources"}, {})
    amounts = mapping_of(nodes, "resources")
    inner = Reader(amounts, nodes.path("resources"))
    return Selector(_labels(nodes), {str(name): number_of(inner, name, 0.0) for name in amounts})


def _router(top: Reader) -> RouterWanted | None:
    if top.raw.get("router") is None:
        return None
    router = Reader(mapping_of(top, "router"), "router")
    default = RouterWanted()
    return RouterWanted(
        port=router.count("port", default.port, 1, 65_535),
        host=router.text("host") or default.host,
        replicas=router.count("replicas", default.replicas, 1, 1000),
        extra=router.raw,
    )


def _check_names(engines: Sequence[EngineSpec]) -> None:
    owner: dict[str, int] = {}
    for number, engine in enumerate(engines):
        for index in range(engine.replicas):
            replica = engine.replica(index)
            if owner.setdefault(replica, number) != number:
                raise ConfigError(
                    f"engines[{owner[replica]}] and engines[{number}] would both have an engine called "
                    f"{show(replica)}: replicas are numbered. Give each entry a name of its own."
                )


def _check_ports(engines: Sequence[EngineSpec], router: RouterWanted | None, events: EventsOptions | None) -> None:
    """No port twice: which engines share a node is not known yet, and may change."""
    owner = {events.port: "events", events.port + 1: "events (their replay)"} if events is not None else {}
    if router is not None:
        if router.port in owner:
            raise ConfigError(
                f"Port {router.port} is wanted by the router and by {owner[router.port]}. Give one another port."
            )
        owner[router.port] = "the router"
    for engine in engines:
        if engine.port is None:
            continue
        for index in range(engine.replicas):
            port, name = engine.port + index, f"engine {engine.replica(index)}"
            if port > 65_535:
                raise ConfigError(f"Port {port} of {name} is above 65535: replica i listens on port + i.")
            if port in owner:
                raise ConfigError(
                    f"Port {port} is wanted by {owner[port]} and by {name} (replica i listens on port + i). Give one "
                    "of them another port, or leave the engines' ports out: then free ones are taken."
                )
            owner[port] = name


def _check_pairs(engines: Sequence[EngineSpec], router: RouterWanted | None) -> None:
    """P/D needs both sides, with one transport."""
    prefill = [engine for engine in engines if engine.role is EngineRole.PREFILL]
    decode = [engine for engine in engines if engine.role is EngineRole.DECODE]
    if prefill and not decode:
        raise ConfigError(
            f"Engine {prefill[0].name} only prefills and no engine decodes. Add one with role: decode, or make it "
            "role: both."
        )
    ways = {engine.transport: engine.name for engine in (*prefill, *decode)}
    if prefill and len(ways) > 1:
        listing = ", ".join(f"{name}: {way}" for way, name in ways.items())
        raise ConfigError(f"Prefill and decode engines have different transports ({listing}). Give all the same.")
