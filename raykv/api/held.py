"""What stores keep for operators and tenants, as records that show themselves: pins, quotas, long operations."""

from __future__ import annotations

from dataclasses import dataclass

from raykv.admin_messages import OperationState
from raykv.api.shown import Shown
from raykv.api.words import show_at, show_nbytes


@dataclass(frozen=True)
class Pin(Shown):
    """Blocks that an operator keeps in a store until `expires` (seconds since the epoch)."""

    store: str
    number: str
    blocks: int
    nbytes: int
    expires: float
    note: str = ""

    COLUMNS = ("pin", "store", "blocks#", "bytes#", "ends", "note")

    def row(self) -> tuple[object, ...]:
        """Its line of a table."""
        figures = (f"{self.blocks:,}", show_nbytes(self.nbytes), show_at(self.expires))
        return (self.number, self.store, *figures, self.note or "-")


@dataclass(frozen=True)
class Quota(Shown):
    """A tenant's share of a store, and its limit in bytes (None: no limit). `tenant`: "tag:" and its tag."""

    store: str
    tenant: str
    blocks: int
    nbytes: int
    quota: int | None = None
    refused_blocks: int = 0

    COLUMNS = ("tenant", "store", "blocks#", "bytes#", "quota#", "refused#")

    def row(self) -> tuple[object, ...]:
        """Its line of a table."""
        limit = "none" if self.quota is None else show_nbytes(self.quota)
        return (
            self.tenant,
            self.store,
            f"{self.blocks:,}",
            show_nbytes(self.nbytes),
            limit,
            f"{self.refused_blocks:,}",
        )


@dataclass(frozen=True)
class RunningOperation(Shown):
    """A long operation at a store, as `OperationState` has it."""

    store: str
    state: OperationState

    COLUMNS = ("operation", "store", "kind", "blocks#", "state")

    def row(self) -> tuple[object, ...]:
        """Its line of a table."""
        it = self.state
        state = "runs" if it.running else it.error or it.result
        return (it.number, self.store, str(it.kind), f"{it.done:,} of {it.total:,}", state)
