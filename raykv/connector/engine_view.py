"""What an operator sees of an engine: what is fixed when it starts, and what changes, put together for its desk."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from raykv.actors.own_node import NAME_VARIABLE
from raykv.core.load_cost import LoadCost
from raykv.core.stories import Stories
from raykv.engine_messages import ChainOrder, ChildView, EngineView, OrderState, Progress
from raykv.types import EngineId

KEPT_ORDERS = 256


class Chain(Protocol):
    """What carries orders out (`chain_changes.ChainChanges`). Any thread; nothing waits for long."""

    def order(self, order: ChainOrder) -> object:
        """Have it carried out; a number that is known is not taken again."""

    def states(self) -> Iterable[OrderState]:
        """All orders that have not ended, and the last ones that have."""


@dataclass(frozen=True, slots=True)
class TierFacts:
    """Of an engine's TierConnector: its store's actor, and the fingerprints of its writing ranks, by rank."""

    store: str = ""
    fingerprints: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineSight:
    """What is looked at. All of it may be asked from any thread."""

    vllm_config: Any
    groups: int
    load_policy: str
    views: Callable[[], Iterable[ChildView]]
    tier: Callable[[], TierFacts]
    stories: Stories
    rates: LoadCost
    child_names: Callable[[], dict[int, str]]
    started: float = 0.0

    @property
    def engine(self) -> EngineId:
        """vLLM's id of it."""
        return EngineId(self.vllm_config.kv_transfer_config.engine_id or "")

    def view(self, node: str) -> EngineView:
        """As it is now. `node`: Ray's id of the node that this process is on."""
        config, model = self.vllm_config, self.vllm_config.model_config
        served = model.served_model_name
        tier, rates, names = self.tier(), dict(self.rates.load_rates), self.child_names()
        return EngineView(
            engine=self.engine,
            model=str(model.model),
            served=(served,) if isinstance(served, str) else tuple(served or (str(model.model),)),
            role=config.kv_transfer_config.kv_role or "",
            pid=os.getpid(),
            node=node,
            host=socket.gethostname(),
            started=self.started,
            name=os.environ.get(NAME_VARIABLE, ""),
            block_size=config.cache_config.block_size,
            max_tokens=model.max_model_len,
            ranks=config.parallel_config.world_size,
            load_policy=self.load_policy,
            children=tuple(self.views()),
            store=tier.store,
            fingerprints=tier.fingerprints,
            groups=self.groups,
            prefill_rate=self.rates.prefill_rate or 0.0,
            load_rates={names[index]: rate for index, rate in rates.items() if index in names},
            tokens=dict(self.stories.tokens),
            running=self.stories.running,
            seen=time.time(),
        )


class NoChain:
    """In place of a chain where a TierConnector works alone: every order is refused, and nothing is changed."""

    def __init__(self) -> None:
        self._states: deque[OrderState] = deque(maxlen=KEPT_ORDERS)

    def order(self, order: ChainOrder) -> None:
        """Refused."""
        detail = (
            f"{order.op} is not possible: this engine runs a TierConnector alone, so it has no chain of children. "
            "Start it with RayKV's MultiConnector around the TierConnector to change it while it runs."
        )
        self._states.append(OrderState(order.number, Progress.REFUSED, detail, time.time()))

    def states(self) -> Sequence[OrderState]:
        """The last ones."""
        return tuple(self._states)


def lone_view(name: str, transfer: Any, up: bool, counters: dict[str, int]) -> ChildView:
    """A TierConnector that works alone, as if it were a child."""
    config = {
        "kv_connector": transfer.kv_connector,
        "kv_connector_module_path": transfer.kv_connector_module_path,
        "kv_role": transfer.kv_role,
        "kv_connector_extra_config": transfer.kv_connector_extra_config,
    }
    return ChildView(
        name=name,
        connector=transfer.kv_connector,
        run="inline",
        state="up" if up else "down",
        loads=transfer.kv_role != "kv_producer",
        saves=transfer.kv_role != "kv_consumer",
        incarnation=0,
        counters=counters,
        config=json.dumps(config),
    )
