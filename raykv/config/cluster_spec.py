"""What a cluster's spec (SPEC.yaml of `raykv up`) means, as frozen objects. `cluster_parse` makes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from raykv.cluster_messages import EngineRole
from raykv.config.model import LoadPolicy
from raykv.event_messages import EventsOptions
from raykv.store_messages import Medium, StoreSpec

LOOPBACK = "127.0.0.1"


class Placement(StrEnum):
    """Where an engine's replicas go: each on a node of its own as far as possible, or together."""

    SPREAD = "spread"
    PACK = "pack"


class Transport(StrEnum):
    """How a prefill engine's blocks reach a decode engine."""

    NIXL = "nixl"
    """Directly between the engines' KV caches, by vLLM's NixlConnector."""
    TIERS = "tiers"
    """By the stores: the decode node's store reads from the prefill node's."""
    FS = "fs"
    """By a folder that all nodes share."""


class Listen(StrEnum):
    """Where engines and their side channels listen: for this machine only, or on the node's address as Ray knows it."""

    LOOPBACK = "loopback"
    NODE = "node"


@dataclass(frozen=True)
class Selector:
    """Which nodes: those with all of these labels and at least these resources. Empty: every node."""

    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)

    def why_not(self, labels: Mapping[str, str], resources: Mapping[str, float]) -> str:
        """What a node with these lacks; empty if it fits."""
        for key, value in self.labels.items():
            if labels.get(key) != value:
                has = f"{key}={labels[key]}" if key in labels else f"no label {key}"
                return f"label {key}={value} is not on it (it has {has})"
        for name, amount in self.resources.items():
            if resources.get(name, 0) < amount:
                return f"it has {resources.get(name, 0):g} of {name} and {amount:g} is wanted"
        return ""


@dataclass(frozen=True)
class EngineSpec:
    """Engines that are alike. `selector.resources` is what one replica takes, as Ray names it (CPU, GPU)."""

    name: str
    role: EngineRole
    replicas: int
    selector: Selector
    placement: Placement
    transport: Transport
    store: str | None
    port: int | None
    """Replica i listens on `port` + i; None: on any free port."""
    load_policy: LoadPolicy
    options: Mapping[str, Any]
    """All of its vLLM options, those of the top included; names with underscores."""
    environment: Mapping[str, str]

    def replica(self, index: int) -> str:
        """The name of a replica, unique in the cluster."""
        return f"{self.name}-{index}"

    @property
    def ranks(self) -> int:
        """Its workers, as far as the options say: each needs a side channel of its own."""
        sizes = (self.options.get(f"{kind}_parallel_size") for kind in ("tensor", "pipeline"))
        product = 1
        for size in sizes:
            product *= size if isinstance(size, int) and size > 0 else 1
        return product


@dataclass(frozen=True)
class StoreWanted:
    """A store and where it runs: on the nodes of the engines that name it, and on all nodes of `selector`, if any."""

    spec: StoreSpec
    selector: Selector | None
    extra: Mapping[str, Any]
    """What a TierConnector is told, word for word."""

    @property
    def name(self) -> str:
        return self.spec.name

    def nbytes(self, medium: Medium) -> int:
        """What it takes of a medium."""
        return sum(tier.capacity for tier in self.spec.tiers if tier.medium is medium)


@dataclass(frozen=True)
class RouterWanted:
    """The front door. `extra`: all of its keys, for `config.router.parse_router`, which knows them."""

    port: int = 8000
    host: str = LOOPBACK
    replicas: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ClusterSpec:
    """All that is wanted. `raw` is the JSON that it came from: `parse_spec(json.loads(raw))` gives it again."""

    model: str
    engines: tuple[EngineSpec, ...]
    stores: tuple[StoreWanted, ...]
    router: RouterWanted | None
    events: EventsOptions | None
    """The stream of KV events; None: it is off."""
    listen: Listen
    command: tuple[str, ...] | None
    """What starts vLLM instead of this environment's `vllm serve`; model and options are appended."""
    startup_timeout_s: float
    unhealthy_timeout_s: float
    raw: str

    def store(self, name: str | None) -> StoreWanted | None:
        """The store of that name."""
        return next((store for store in self.stores if store.name == name), None)

    @property
    def replicas(self) -> tuple[tuple[EngineSpec, int], ...]:
        """Every engine to run, as its entry and its index there."""
        return tuple((engine, index) for engine in self.engines for index in range(engine.replicas))

    @property
    def transport(self) -> Transport:
        """How blocks go from prefill to decode engines."""
        return next((e.transport for e in self.engines if e.role is not EngineRole.BOTH), Transport.TIERS)

    @property
    def model_path(self) -> str | None:
        """The folder or file that must be there on an engine's node; None for a name on a model hub."""
        return self.model if re.match(r"[~/]|\.{1,2}/", self.model) else None
