"""What may be asked of a running store's tiers, checked before anything is changed."""

from __future__ import annotations

import os
from pathlib import Path

from raykv.actors.store_stock import Stock
from raykv.admin_messages import Operation, OperationKind
from raykv.core.store_plans import TierFigures
from raykv.core.tier_changes import position_of
from raykv.core.tier_stages import Stage
from raykv.errors import StoreError
from raykv.storage.host_pool import HostPool
from raykv.store_messages import Medium, TierSpec

ORDER = ", ".join(medium for medium in Medium if medium is not Medium.PEER)


def slots_for(capacity: int, slot_nbytes: int) -> int:
    """How many slots that many bytes are."""
    return capacity // slot_nbytes


def check(stock: Stock, host: Path, operation: Operation) -> None:
    """Raise StoreError, in one sentence with the fix, for what can't be done now. `host`: where the host pool is."""
    spec = operation.tier
    if spec is None or not isinstance(spec, TierSpec):
        raise StoreError(f"To {operation.kind}, say which: a TierSpec with its medium is missing.")
    if not isinstance(spec.medium, Medium):
        raise StoreError(f"{spec.medium!r} is no medium: it is one of {ORDER}.")
    if spec.medium is Medium.PEER:
        raise StoreError(
            "A peer tier is no tier of a store's own and can't change while it runs: change `tiers` in the config and "
            "start the store anew."
        )
    with stock.lock:
        figures = stock.book.figures().tiers
        stages = {one.medium: stock.book.changes.stage(one.tier) for one in figures}
    there = {one.medium: one for one in figures}
    if operation.kind is OperationKind.ADD_TIER:
        _check_add(stock, host, operation, spec, there, stages)
        return
    if spec.medium not in there:
        raise StoreError(f"The store has no {spec.medium} tier: it has {_listed(there)}.")
    tier, stage = there[spec.medium].tier, stages[spec.medium]
    mine = stock.tiers.spec_of(tier)
    if spec.path is not None and spec.path != mine.path:
        raise StoreError(f"The {spec.medium} tier lies in {mine.path}, not in {spec.path}: leave the path out.")
    if operation.kind is OperationKind.RESIZE_TIER:
        _check_resize(stock, spec, tier, stage, there[spec.medium])
        return
    others = [one for one in figures if one.medium is not spec.medium and not one.off and one.medium is not Medium.FS]
    takers = [one for one in others if not one.shut]
    what = "removed" if operation.kind is OperationKind.REMOVE_TIER else "drained"
    if spec.medium is not Medium.FS and not takers:
        raise StoreError(
            f"The {spec.medium} tier is the last one of this node's own that takes blocks and can't be {what}: add "
            "another one first, or end the store with `raykv stop`."
        )
    if stage is Stage.LEAVING:
        raise StoreError(f"The {spec.medium} tier is just being removed: nothing else can be done with it.")


def _check_add(
    stock: Stock,
    host: Path,
    operation: Operation,
    spec: TierSpec,
    there: dict[Medium, TierFigures],
    stages: dict[Medium, Stage],
) -> None:
    if spec.medium in there:
        mine = stock.tiers.spec_of(there[spec.medium].tier)
        slot = stock.tiers.slot_nbytes  # what is shown of a tier is its slots, and a resize may have been to any bytes
        as_it_is = mine.path == spec.path and slots_for(mine.capacity, slot) == slots_for(spec.capacity, slot)
        if stages[spec.medium] is Stage.DRAINED and as_it_is:
            return
        raise StoreError(
            f"The store has a {spec.medium} tier already ({_where(mine)}, {mine.capacity} bytes, "
            f"{stages[spec.medium].value}): resize it, or remove it first; one that is drained takes blocks again if "
            "it is added as it is."
        )
    media = [one.medium for one in stock.tiers.specs]
    if operation.after is not None:
        position = position_of(spec.medium, media)
        before = media[position - 1] if position else None
        if operation.after is not before:
            place = f"behind {before}" if before is not None else "in front of all others"
            raise StoreError(f"Tiers go from the fastest to the slowest ({ORDER}): {spec.medium} goes {place} here.")
    if spec.medium is Medium.HOST and spec.path is not None:
        raise StoreError(f"Host memory has no folder: leave the path {spec.path} out.")
    if spec.medium is not Medium.HOST and (not spec.path or not os.path.isabs(spec.path) or "\0" in spec.path):
        raise StoreError(f"A {spec.medium} tier needs an absolute path, not {spec.path!r}.")
    _check_capacity(spec, stock.tiers.slot_nbytes)
    if spec.medium is not Medium.FS:
        nbytes = slots_for(spec.capacity, stock.tiers.slot_nbytes) * stock.tiers.slot_nbytes
        slots_file = Path(spec.path, "raykv.slots") if spec.path else host
        _check_free(spec, nbytes, slots_file)


def _check_resize(stock: Stock, spec: TierSpec, tier: int, stage: Stage, figures: TierFigures) -> None:
    if stage is not Stage.SERVING:
        raise StoreError(
            f"The {spec.medium} tier is {stage.value} and can't be resized: wait until that has ended, and add it "
            "again as it is if it is drained."
        )
    if figures.off:
        raise StoreError(f"The {spec.medium} tier is off ({figures.off}) and can't be resized: remove it.")
    _check_capacity(spec, stock.tiers.slot_nbytes)
    pool, slot = stock.tiers.pool(tier), stock.tiers.slot_nbytes
    slots = slots_for(spec.capacity, slot)
    if isinstance(pool, HostPool):
        why = pool.why_not(slots)
        if why:
            raise StoreError(why)
    if spec.medium is not Medium.FS:
        folder = stock.tiers.spec_of(tier).path
        slots_file = Path(folder, "raykv.slots") if folder else Path(pool.path if isinstance(pool, HostPool) else "")
        _check_free(spec, slots * slot, slots_file)


def _check_capacity(spec: TierSpec, slot_nbytes: int) -> None:
    if not isinstance(spec.capacity, int) or isinstance(spec.capacity, bool) or spec.capacity < slot_nbytes:
        raise StoreError(
            f"A {spec.medium} tier of {spec.capacity} bytes has no room for one block: it needs {slot_nbytes} bytes at "
            "least."
        )


def _check_free(spec: TierSpec, nbytes: int, slots_file: Path) -> None:
    """Whether the medium has room. The pool finds out for certain."""
    folder = slots_file.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        status = os.statvfs(folder)
        have = slots_file.stat().st_blocks * 512 if slots_file.exists() else 0
    except OSError as error:
        raise StoreError(f"{folder} can't be looked at: {error.strerror}.") from error
    free = status.f_bavail * status.f_frsize
    if nbytes - have > free:
        raise StoreError(
            f"A {spec.medium} tier of {spec.capacity} bytes needs {nbytes - have} bytes more in {folder}, and {free} "
            "are free there: give it a smaller capacity, or make room."
        )


def _where(spec: TierSpec) -> str:
    return spec.path or "memory"


def _listed(media: dict[Medium, TierFigures]) -> str:
    return ", ".join(media)
