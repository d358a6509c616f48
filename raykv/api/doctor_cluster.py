"""`raykv doctor`: the running cluster, and what engines and stores say of themselves."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from raykv.api.findings import Finding, Level, Wanted
from raykv.api.words import count
from raykv.errors import RayKVError


def cluster(wanted: Wanted) -> Iterator[Finding]:
    """Ray, and what engines and stores say of themselves."""
    from raykv.api.cluster import connect

    try:
        with connect(wanted.address, wanted.namespace, wanted.timeout_s) as kv:
            yield Finding("Ray", Level.OK, f"answers at {kv.address}")
            yield from _head()
            snapshot = kv.snapshot()
    except RayKVError as error:
        yield Finding("Ray", Level.ERROR, str(error), "See above; without a cluster: `raykv start`.")
        return
    yield from of_snapshot(snapshot)


def _head() -> Iterator[Finding]:
    from raykv.actors import cluster as ray_cluster

    missing = ray_cluster.check_head_loss_settings()
    if missing:
        yield Finding("head loss", Level.WARNING, "engines would not survive the loss of Ray's head",
                      f"Set {'; '.join(missing)}.")  # fmt: skip
    else:
        yield Finding("head loss", Level.OK, "engines survive the loss of Ray's head")


def of_snapshot(snapshot: Any) -> Iterator[Finding]:
    """What is wrong with what runs. `snapshot`: an `api.Snapshot`."""
    for node in snapshot.nodes:
        if node.state == "dead":
            yield Finding(
                f"node {node.short}", Level.WARNING, f"{node.host} is dead for Ray", "Restart it, or forget it."
            )
    for engine in snapshot.engines:
        down = [child.name for child in engine.children if child.state not in ("up", "paused")]
        said = engine.problem or (f"children that are not up: {', '.join(down)}" if down else "")
        fix = "See `raykv child list` and the engine's log." if said else ""
        level = Level.WARNING if said else Level.OK
        yield Finding(f"engine {engine.id}", level, said or f"{len(engine.children)} children are up", fix)
    for store in snapshot.stores:
        off = [f"{tier.medium} is off: {tier.off}" for tier in store.tiers if tier.off]
        bad = sum(tier.bad_reads for tier in store.tiers)
        if store.problem:
            yield Finding(f"store {store.at}", Level.ERROR, store.problem, "Ray restarts it; see its log.")
        elif off:
            yield Finding(
                f"store {store.at}", Level.WARNING, "; ".join(off), "Repair the medium, then restart the store."
            )
        elif bad:
            yield Finding(f"store {store.at}", Level.WARNING, f"{count(bad, 'bad block')} were read, each a miss",
                          "Watch it; a disk that goes on so is failing.")  # fmt: skip
        else:
            yield Finding(f"store {store.at}", Level.OK, f"{count(len(store.tiers), 'tier')} serve")
    yield from strangers(snapshot)


def strangers(snapshot: Any) -> Iterator[Finding]:
    """Engines of one model that share nothing, and the fact that keeps them apart (the hash seed, most often)."""
    by_model: dict[str, dict[str, dict[str, Any]]] = {}
    for store in snapshot.stores:
        for view in store.models:
            with contextlib.suppress(ValueError):
                facts = json.loads(view.facts) if view.facts else None
                if isinstance(facts, dict) and view.engines:
                    by_model.setdefault(view.model, {})[view.fingerprint] = facts
    for model, prints in by_model.items():
        ordered = list(prints.values())
        for other in ordered[1:]:
            names = sorted(key for key in {*ordered[0], *other} if ordered[0].get(key) != other.get(key))
            if names and names != ["place"]:
                yield Finding(f"model {model}", Level.WARNING, f"engines of it share no block: {', '.join(names)} "
                              f"differ ({_short(ordered[0].get(names[0]))} and {_short(other.get(names[0]))})",
                              "Start them alike if they are to share.")  # fmt: skip
                break


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
