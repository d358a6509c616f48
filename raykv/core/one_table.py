"""One tier alone, seen as an index: for a peer, which reads memory and nothing else."""

from __future__ import annotations

from raykv.core.slot_table import SlotTable
from raykv.core.store_plans import Place, Run


class OneTable:
    """What lies in one tier alone, as an index for `prefix.longest_prefix`."""

    def __init__(self, tier: int, table: SlotTable) -> None:
        self._tier, self._table = tier, table

    def find(self, key: bytes) -> Place | None:
        """As `Tiers.find`."""
        slot = self._table.find(key)
        return Place(self._tier, slot) if slot is not None else None

    def run(self, head: bytes, hashes: bytes, first: int) -> Run | None:
        """As `Tiers.run`."""
        found = self._table.run(head, hashes, first)
        return Run(self._tier, *found) if found is not None else None
