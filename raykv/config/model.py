"""The frozen objects of the configuration, and what RayKV knows of vLLM's connector classes by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from raykv.config.reader import copy_json
from raykv.types import ChildName

MAX_RETRY_S = 60.0
"""A switched-off child is tried again at least this often."""

ORDERED_BY_STREAM = "it orders its copies by the stream of vLLM's worker and flushes blocks that get reused there"
INLINE_ONLY = {"OffloadingConnector": ORDERED_BY_STREAM, "SimpleCPUOffloadConnector": ORDERED_BY_STREAM}
"""vLLM's classes that can't leave vLLM's worker process, and why."""

OWN_INLINE = {"TierConnector": "the node's store does its work already, in a process of its own"}
"""RayKV's own classes that stay in vLLM's worker process, and why."""
OWN_MODULE = "raykv.connector"

RENAMED = {"SharedStorageConnector": "ExampleConnector"}
"""Names of older vLLM that 0.32 does not register, and what it calls these classes."""

SYNCHRONOUS = frozenset({"ExampleConnector", "SharedStorageConnector"})
"""vLLM's classes that load inside `start_load_kv`, as far as RayKV knows them."""


class RunMode(StrEnum):
    """Where the worker half of a child lives: in a Ray actor of its own, or in vLLM's worker process."""

    ACTOR = "actor"
    INLINE = "inline"


class SaveMode(StrEnum):
    """What is saved to a child."""

    ALL = "all"
    NONE = "none"


class LoadPolicy(StrEnum):
    """Whose hit is loaded: that of the first child with tokens, in the config's order, or the longest one, or several
    in one load, each block from the first child that has it."""

    FIRST = "first"
    LONGEST = "longest"
    COMPOSE = "compose"


@dataclass(frozen=True)
class ChildOptions:
    """RayKV's options of one child: `kv_connector_extra_config.raykv` of that child. Times are in seconds."""

    name: ChildName
    """Default: the name of its class; of children of one class the later ones get '-2', '-3' and so on."""
    run: RunMode = RunMode.ACTOR
    """INLINE is the default, and the only choice, for the classes in INLINE_ONLY and OWN_INLINE."""
    load: bool = True
    """False: never asked for hits."""
    save: SaveMode = SaveMode.ALL
    timeout_s: float = 10.0
    """A host that does not answer a call, or end a synchronous load, in this time counts as hung."""
    load_timeout_s: float = 30.0
    """An asynchronous load that takes longer has failed: its host is killed and the request recomputed. RayKV's
    limit wins over a longer one of the child itself (LMCache's is 300 s)."""
    promise_timeout_s: float = 900.0
    """A child that says it will save or send a finished request's blocks, and reports nothing for this long, has
    broken its promise: its host is killed, so that the blocks can be used again. Above NIXL's own limit (480 s)."""
    startup_timeout_s: float = 180.0
    """The same for the start of a host, registration and handshake included."""
    lookup_timeout_s: float = 5.0
    """A look-up that is not answered in this time counts as a miss."""
    max_faults: int = 3
    """The child is switched off at this many faults within `fault_window_s`."""
    fault_window_s: float = 60.0
    retry_s: float = 5.0
    """The first pause before a switched-off child is tried again; it doubles up to MAX_RETRY_S."""
    warm_spare: bool = False
    """Keep a second actor started, so that a killed child is back in seconds."""


@dataclass(frozen=True)
class ChildConfig:
    """One child as vLLM needs it, with what it inherits from the top filled in.

    `extra` and `more_fields` are private copies, to be read only.
    A None of `engine_id`, `buffer_device` or `kv_port` stands for vLLM's default.
    """

    index: int
    """Its place in `connectors`."""
    connector: str
    """The class to load, by the name that vLLM 0.32 has for it."""
    module_path: str | None
    """The Python module of the class; None: vLLM's registry knows it."""
    role: str
    """'kv_producer', 'kv_consumer' or 'kv_both'; inherited."""
    engine_id: str | None
    """Inherited."""
    load_failure_policy: str
    """'recompute' or 'fail'; inherited."""
    buffer_device: str | None
    """Inherited."""
    kv_port: int | None
    """As in vLLM a child's own, not inherited."""
    extra: Mapping[str, Any]
    """The child's `kv_connector_extra_config` without RayKV's own part."""
    options: ChildOptions
    more_fields: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of vLLM's KVTransferConfig that the child sets, as they are."""

    @property
    def name(self) -> ChildName:
        """Short for `options.name`."""
        return self.options.name

    @property
    def saves(self) -> bool:
        """Whether the hooks that save are run. Where they are not, no block needs a pin for this child."""
        return self.options.save is SaveMode.ALL and self.role != "kv_consumer"

    @property
    def is_tier(self) -> bool:
        """Whether it is RayKV's own TierConnector."""
        return is_own(self.connector, self.module_path)

    @property
    def _role(self) -> str:
        """RayKV's own connector does by its role what the options say, so that it asks and plans nothing in vain."""
        if not self.is_tier or (self.options.load and self.options.save is SaveMode.ALL):
            return self.role
        return "kv_consumer" if self.options.load else "kv_producer"

    def kv_transfer_kwargs(self) -> dict[str, Any]:
        """The arguments of vLLM's `KVTransferConfig(**kwargs)`: a new copy each time, nothing of RayKV's."""
        kwargs = {
            "kv_connector": self.connector,
            "kv_connector_module_path": self.module_path,
            "kv_role": self._role,
            "engine_id": self.engine_id,
            "kv_load_failure_policy": self.load_failure_policy,
            "kv_buffer_device": self.buffer_device,
            "kv_port": self.kv_port,
            "kv_connector_extra_config": copy_json(self.extra),
            **copy_json(self.more_fields),
        }
        return {key: value for key, value in kwargs.items() if value is not None}


@dataclass(frozen=True)
class MultiConfig:
    """The whole. Its options are `kv_connector_extra_config.raykv` at the top. Times are in seconds."""

    children: tuple[ChildConfig, ...]
    """At least one, in the order of `connectors`; their names are unique."""
    load_policy: LoadPolicy = LoadPolicy.FIRST
    load_cost: bool = False
    """Leave hits alone that take longer to load than to compute, by measured rates. Off unless asked for: where the
    model is so small that both take about the same, hits would be used and left in turns."""
    lookup_timeout_s: float | None = None
    """How long a request waits for all its look-ups together; None: only the children's own limits."""
    ray_address: str | None = None
    """None: RAY_ADDRESS, then a running local cluster."""
    namespace: str = "raykv"
    """The Ray namespace of RayKV's actors."""
    stories: int = 1000
    """Of how many requests it is kept where their tokens came from; 0: of none."""


def is_vllms(module_path: str | None) -> bool:
    """Whether a class found this way is vLLM's own, so that what RayKV knows by its name holds."""
    return module_path is None or module_path.startswith("vllm.")


def is_own(connector: str, module_path: str | None) -> bool:
    """Whether a class found this way is RayKV's own; None: RayKV's plugin has registered it."""
    return connector in OWN_INLINE and (module_path is None or module_path.startswith(OWN_MODULE))


def why_inline(connector: str, module_path: str | None) -> str | None:
    """Why a class found this way must stay in vLLM's worker process, if so."""
    if is_own(connector, module_path):
        return OWN_INLINE[connector]
    return INLINE_ONLY.get(connector) if is_vllms(module_path) else None


def known_synchronous(child: ChildConfig) -> bool:
    """Whether the child's class is known to load inside `start_load_kv`. False: it may still."""
    return is_vllms(child.module_path) and child.connector in SYNCHRONOUS
