"""Stores and their tiers as an operator sees them. Plain records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raykv.admin_messages import ModelView, OperationState, PinView, StoreView, TenantView
from raykv.api.shown import Listing, Shown
from raykv.api.words import show_nbytes
from raykv.store_messages import StoreStatus, TierStatus

if TYPE_CHECKING:
    from rich.console import RenderableType

STORE_PREFIX = "raykv-store-"
ID_CHARS = 12


@dataclass(frozen=True, repr=False)
class Tier(Shown):
    """One tier of a store. `capacity` and `used_nbytes` in bytes of slots; counts since the store's start.

    `off`: why it does not serve, empty while it does. `draining`: nothing new goes there.
    """

    store: str
    medium: str
    path: str | None
    capacity: int
    used_nbytes: int
    slot_nbytes: int
    slots: int
    used: int
    writing: int
    quarantined: int
    evicted: int
    hits: int
    bad_reads: int
    off: str = ""
    draining: bool = False

    COLUMNS = ("store", "tier", "capacity#", "used#", "fill#", "blocks#", "hits#", "evicted#", "bad#", "state", "path")

    @property
    def fill(self) -> float:
        """From 0 to 1."""
        return self.used / self.slots if self.slots else 0.0

    def row(self) -> tuple[object, ...]:
        """Its line of a table."""
        sizes = (show_nbytes(self.capacity), show_nbytes(self.used_nbytes), f"{self.fill:.0%}")
        counts = (f"{self.used:,}", f"{self.hits:,}", f"{self.evicted:,}", f"{self.bad_reads:,}")
        state = f"off: {self.off}" if self.off else "draining" if self.draining else "serves"
        return (self.store, self.medium, *sizes, *counts, state, self.path or "-")

    def __repr__(self) -> str:
        state = f", off: {self.off}" if self.off else ", draining" if self.draining else ""
        return f"<Tier {self.medium} of {self.store}: {show_nbytes(self.capacity)}, {self.fill:.0%} full{state}>"

    def __rich__(self) -> RenderableType:
        return Listing((self,)).__rich__()

    @classmethod
    def of(cls, store: str, view: TierStatus) -> Tier:
        """From what the store says."""
        same = {name: getattr(view, name) for name in cls.__dataclass_fields__ if name in view.__dataclass_fields__}
        size = view.slot_nbytes
        same["medium"] = str(view.medium)
        return cls(store=store, capacity=view.slots * size, used_nbytes=view.used * size, **same)


FIGURES = ("leases", "look_ups", "hit_blocks", "missed_blocks", "saved_blocks", "skipped_blocks", "loaded_blocks")


@dataclass(frozen=True, repr=False)
class Store(Shown):
    """The store of one node. `actor` names it in the cluster, `name` is that of its config, `life` its process's life.

    `figures`: counts since its start, in blocks (`leases`: now). `drain`: how far it is drained, empty if it is not.
    `problem`: why nothing is known of it now.
    """

    actor: str
    name: str
    node: str
    host: str = ""
    life: str = ""
    pid: int = 0
    tiers: Listing[Tier] = field(default_factory=lambda: Listing[Tier]())
    engines: tuple[str, ...] = ()
    models: tuple[ModelView, ...] = ()
    tenants: tuple[TenantView, ...] = ()
    pins: tuple[PinView, ...] = ()
    operations: tuple[OperationState, ...] = ()
    figures: Mapping[str, int] = field(default_factory=dict)
    more: Mapping[str, int] = field(default_factory=dict)
    drain: str = ""
    problem: str = ""

    COLUMNS = ("store", "node", "engines#", "tiers", "pins#", "state")

    @property
    def at(self) -> str:
        """NAME@NODE, which names it in commands."""
        return f"{self.name}@{self.node[:ID_CHARS]}"

    def tier(self, medium: str) -> Tier | None:
        """Its tier of that medium, if it has one."""
        return next((tier for tier in self.tiers if tier.medium == medium), None)

    def row(self) -> tuple[object, ...]:
        """Its line of a table."""
        tiers = ", ".join(f"{tier.medium} {tier.fill:.0%} of {show_nbytes(tier.capacity)}" for tier in self.tiers)
        running = [operation for operation in self.operations if operation.running]
        state = self.problem or (f"drained: {self.drain}" if self.drain else "") or ", ".join(
            f"{one.kind}: {one.done:,} of {one.total:,}" for one in running
        )  # fmt: skip
        return (self.at, self.host or "-", len(self.engines), tiers or "-", len(self.pins), state or "serves")

    def __repr__(self) -> str:
        tiers = ", ".join(f"{tier.medium} {tier.fill:.0%}" for tier in self.tiers)
        return f"<Store {self.at}: {self.problem or tiers or 'not opened yet'}>"

    def __rich__(self) -> RenderableType:
        from rich.console import Group

        return Group(Listing((self,)).__rich__(), self.tiers.__rich__())

    @classmethod
    def of(cls, actor: str, node: str, host: str, status: StoreStatus, view: StoreView | None) -> Store:
        """From what the store says; `view` None: it runs an older RayKV."""
        more: dict[str, Any] = {}
        if view is not None:
            more = {name: getattr(view, name) for name in ("models", "tenants", "pins", "operations", "more")}
        return cls(
            actor=actor,
            name=status.name,
            node=node,
            host=host,
            life=str(status.store),
            pid=status.pid,
            tiers=Listing(Tier.of(f"{status.name}@{node[:ID_CHARS]}", tier) for tier in status.tiers),
            engines=tuple(map(str, status.engines)),
            figures={name: getattr(status, name) for name in FIGURES},
            drain=status.drain,
            **more,
        )

    @classmethod
    def silent(cls, actor: str, node: str, host: str, problem: str) -> Store:
        """One that does not answer."""
        name, _ = split_actor(actor)
        return cls(actor=actor, name=name, node=node, host=host, problem=problem)


def split_actor(actor: str) -> tuple[str, str]:
    """A store's own name and the first letters of its node's id, from its actor's name."""
    name, _, node = actor.removeprefix(STORE_PREFIX).rpartition("-")
    return name, node
