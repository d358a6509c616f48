"""What the Controller saw last, and its status made of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raykv.actors.controller_world import FoundEngine, NodeRecord, Record
from raykv.cluster_messages import ClusterStatus, EngineRole, EngineRow, EngineState, NodeRow, StoreRow
from raykv.config.cluster_spec import ClusterSpec
from raykv.core.backoff import Backoff
from raykv.core.reconcile import Action, Busy, DrainStore, Instance, StopEngine, StoreAt, Wanted


@dataclass(frozen=True)
class View:
    """One look at the cluster. `spec`: the JSON of what was wanted then; `waiting`: why a replica has no node.
    `errors`: the last failure, with the last lines, by replica or store."""

    spec: str = ""
    nodes: tuple[NodeRecord, ...] = ()
    engines: Mapping[Instance, FoundEngine] = field(default_factory=dict)
    stores: frozenset[StoreAt] = frozenset()
    wanted: Wanted = field(default_factory=Wanted)
    waiting: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[Any, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    problem: str = ""


def rows_of(
    view: View, spec: ClusterSpec | None, record: Record, busy: Mapping[Busy, Action], backoff: Backoff
) -> ClusterStatus:
    """The status for people and for `raykv up`."""
    roles = {engine.replica(index): engine.role for engine, index in spec.replicas} if spec is not None else {}
    engines = [_engine_row(view, instance, busy, backoff) for instance in sorted(view.engines)]
    there = {instance.replica for instance in view.engines}
    absent = [(replica, role) for replica, role in roles.items() if replica not in there]
    engines += [_absent_row(view, replica, role, backoff) for replica, role in absent]
    engines.sort(key=lambda row: row.name)
    stores = [_store_row(view, at, busy) for at in sorted(view.stores | view.wanted.stores)]
    return ClusterStatus(
        spec=view.spec,
        nodes=tuple(_node_row(view, node, record, busy) for node in view.nodes),
        engines=tuple(engines),
        stores=tuple(stores),
        problem=view.problem,
    )


def _engine_row(view: View, instance: Instance, busy: Mapping[Busy, Action], backoff: Backoff) -> EngineRow:
    found = view.engines[instance]
    target = view.wanted.engines.get(instance.replica)
    right = target is not None and target.node == instance.node and target.digest == found.digest
    report = found.report
    state = "no answer" if report is None else str(report.state)
    over = state in (EngineState.FAILED, EngineState.STOPPED)
    if isinstance(busy.get(instance), StopEngine):
        state = state if over else "leaving"
    elif not right:
        changed = target is not None and target.digest != found.digest
        state = state if over else "outdated" if changed else "leaving"
    error, tail = view.errors.get(instance.replica, ("", ()))
    if report is not None and report.error:
        error, tail = report.error, report.log_tail
    return EngineRow(
        name=instance.replica,
        role=report.role if report is not None else EngineRole.BOTH,
        state=state,
        node=instance.node,
        url=report.url if report is not None else "",
        pid=report.pid if report is not None else 0,
        restarts=backoff.failures(instance.replica),
        error="" if state == EngineState.READY else error,
        log_tail=() if state == EngineState.READY else tail,
    )


def _absent_row(view: View, replica: str, role: EngineRole, backoff: Backoff) -> EngineRow:
    target = view.wanted.engines.get(replica)
    error, tail = view.errors.get(replica, ("", ()))
    waiting = view.waiting.get(replica, "")
    return EngineRow(
        name=replica,
        role=role,
        state="waiting" if waiting or target is None else "launching",
        node=target.node or "" if target is not None else "",
        restarts=backoff.failures(replica),
        error=waiting or error,
        log_tail=tail,
    )


def _store_row(view: View, at: StoreAt, busy: Mapping[Busy, Action]) -> StoreRow:
    error, _ = view.errors.get(at, ("", ()))
    if isinstance(busy.get(at), DrainStore) or at not in view.wanted.stores:
        return StoreRow(at[0], at[1], "draining", error)
    if at in view.stores:
        return StoreRow(at[0], at[1], "up")
    return StoreRow(at[0], at[1], "failed" if error else "launching", error)


def _node_row(view: View, node: NodeRecord, record: Record, busy: Mapping[Busy, Action]) -> NodeRow:
    state = "alive"
    if node.id in record.draining:
        engines = [one for one in (*view.engines, *(b for b in busy if isinstance(b, Instance))) if one.node == node.id]
        stores = [at for at in view.stores if at[1] == node.id]
        state = "draining" if engines or stores else "drained"
    return NodeRow(node.id, node.host, node.address, state)
