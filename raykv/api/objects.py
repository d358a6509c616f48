"""What runs, as an operator sees it: nodes, engines with their children, and all of it at one moment. Plain records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raykv.api.reach import NodeFact
from raykv.api.shown import Listing, Shown
from raykv.api.store_objects import ID_CHARS, Store, Tier, split_actor
from raykv.api.words import count
from raykv.engine_messages import ChildView, EngineView

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["ID_CHARS", "Child", "Engine", "Listing", "Node", "Snapshot", "Store", "Tier", "shares", "split_actor"]


@dataclass(frozen=True, repr=False)
class Node(Shown):
    """A node of the Ray cluster. `state`: alive, draining, drained, dead. `engines` by id, `stores` by actor."""

    id: str
    host: str
    address: str
    state: str
    cpus: float = 0.0
    gpus: float = 0.0
    engines: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()

    COLUMNS = ("node", "host", "address", "state", "CPUs#", "GPUs#", "engines", "stores")

    @property
    def short(self) -> str:
        """The first letters of its id, which name it in commands."""
        return self.id[:ID_CHARS]

    def row(self) -> tuple[object, ...]:
        """Its line of a table."""
        held = (", ".join(self.engines) or "-", ", ".join(self.stores) or "-")
        return (self.short, self.host, self.address, self.state, f"{self.cpus:g}", f"{self.gpus:g}", *held)

    def __repr__(self) -> str:
        return f"<Node {self.short} {self.host} {self.state}: {len(self.engines)} engines, {len(self.stores)} stores>"

    def __rich__(self) -> RenderableType:
        return Listing((self,)).__rich__()

    @classmethod
    def of(cls, fact: NodeFact, engines: tuple[str, ...], stores: tuple[str, ...]) -> Node:
        """From what Ray knows."""
        return cls(fact.id, fact.host, fact.address, fact.state, fact.cpus, fact.gpus, engines=engines, stores=stores)


@dataclass(frozen=True, repr=False)
class Child(Shown):
    """A child connector of an engine. `state`: up, down, paused, off, starting, leaving. `counters` since the start."""

    name: str
    engine: str
    connector: str
    run: str
    state: str
    loads: bool
    saves: bool
    incarnation: int
    host_pids: tuple[int, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    config: str = ""

    COLUMNS = ("engine", "child", "connector", "runs", "state", "loads", "saves", "incarnation#", "pids", "loaded#")

    def row(self) -> tuple[object, ...]:
        """Its line of a table."""
        flags = ("yes" if self.loads else "no", "yes" if self.saves else "no")
        pids = ", ".join(map(str, self.host_pids)) or "-"
        loaded = f"{self.counters.get('tokens_loaded', 0):,}"
        return (self.engine, self.name, self.connector, self.run, self.state, *flags, self.incarnation, pids, loaded)

    def __repr__(self) -> str:
        return f"<Child {self.name} of {self.engine}: {self.connector}, {self.run}, {self.state}>"

    def __rich__(self) -> RenderableType:
        return Listing((self,)).__rich__()

    @classmethod
    def of(cls, engine: str, view: ChildView) -> Child:
        """From what the engine says."""
        return cls(engine=engine, **{name: getattr(view, name) for name in ChildView.__dataclass_fields__})


@dataclass(frozen=True, repr=False)
class Engine(Shown):
    """An engine, its children in the order in which they are asked.

    `id` is vLLM's engine id, `name` its replica's where `raykv up` started it, `served` the names clients use, `store`
    the actor of the store that its TierConnector uses. `tokens`: prompt tokens by source since its start ("gpu", a
    medium, a child, "computed"). `prefill_rate` and `load_rates` in tokens/s, 0 or absent where not known yet.
    `problem`: why nothing newer is known of it.
    """

    id: str
    model: str
    served: tuple[str, ...]
    role: str
    node: str
    host: str
    pid: int
    started: float
    block_size: int
    max_tokens: int
    ranks: int
    load_policy: str
    children: Listing[Child]
    desk: str = ""
    store: str = ""
    fingerprints: tuple[str, ...] = ()
    groups: int = 1
    prefill_rate: float = 0.0
    load_rates: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    running: int = 0
    seen: float = 0.0
    name: str = ""
    problem: str = ""

    COLUMNS = ("engine", "model", "role", "node", "pid#", "running#", "children", "tokens by source")

    def child(self, name: str) -> Child | None:
        """Its child of that name, if there is one."""
        return next((child for child in self.children if child.name == name), None)

    @property
    def label(self) -> str:
        """What people call it."""
        return self.name or self.id

    def row(self) -> tuple[object, ...]:
        """Its line of a table."""
        place = f"{self.node[:ID_CHARS]} {self.host}".strip() or "-"
        children = ", ".join(f"{child.name} {child.state}" for child in self.children) or "-"
        last = self.problem or shares(self.tokens) or "-"
        model = self.served[0] if self.served else self.model
        return (self.label, model, self.role, place, self.pid, self.running, children, last)

    def __repr__(self) -> str:
        children = ", ".join(f"{child.name} {child.state}" for child in self.children)
        name = self.served[0] if self.served else self.model
        return f"<Engine {self.label} {name} on {self.host or self.node[:ID_CHARS]}: {children or 'no children'}>"

    def __rich__(self) -> RenderableType:
        from rich.console import Group

        return Group(Listing((self,)).__rich__(), self.children.__rich__())

    @classmethod
    def of(cls, desk: str, view: EngineView, problem: str = "") -> Engine:
        """From what the engine says."""
        same = {name: getattr(view, name) for name in EngineView.__dataclass_fields__ if name != "engine"}
        same["children"] = Listing(Child.of(str(view.engine), child) for child in view.children)
        return cls(id=str(view.engine), desk=desk, problem=problem, **same)


def shares(tokens: Mapping[str, int]) -> str:
    """Such as "computed 62 %, host 30 %, gpu 8 %"."""
    whole = sum(tokens.values())
    ordered = sorted(tokens.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {number / whole:.0%}" for name, number in ordered if number) if whole else ""


@dataclass(frozen=True, repr=False)
class Snapshot(Shown):
    """All of it at one moment (`at`, seconds since the epoch)."""

    at: float
    address: str
    namespace: str
    nodes: Listing[Node]
    engines: Listing[Engine]
    stores: Listing[Store]

    def __repr__(self) -> str:
        return f"<Snapshot {count(len(self.nodes), 'node')}, {count(len(self.engines), 'engine')}, " + (
            f"{count(len(self.stores), 'store')}>"
        )

    def __rich__(self) -> RenderableType:
        from rich.console import Group

        return Group(self.nodes.__rich__(), self.engines.__rich__(), self.stores.__rich__())
