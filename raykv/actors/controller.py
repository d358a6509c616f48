"""The Controller: keeps what is wanted, looks at what there is, and does what is missing. `controller_handle` makes it
an actor.

Restartable: what is wanted lies in the GCS, what runs is found by name. It is never on a request's path: without it
engines and stores go on. One thread looks and decides, about once a second and whenever it is woken; what it decides
is done in other threads, one thing for each engine or store at a time.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from raykv.actors.controller_reports import Reports, failures
from raykv.actors.controller_targets import Targets
from raykv.actors.controller_view import View, rows_of
from raykv.actors.controller_world import Record, StoreBusy, World, node_named
from raykv.actors.host_base import own_info
from raykv.actors.node_facts import NodeFacts
from raykv.cluster_messages import ClusterStatus, EngineInfo
from raykv.config.cluster_parse import parse_spec
from raykv.config.cluster_spec import ClusterSpec
from raykv.core.reconcile import (
    Action,
    Busy,
    DrainStore,
    ForgetNode,
    Instance,
    Reconciler,
    Seen,
    StartEngine,
    StartStore,
    StopEngine,
    subject,
)
from raykv.errors import ClusterError, RayKVError
from raykv.store_messages import Medium

logger = logging.getLogger("raykv")

TICK_S = 1.0
FIRST_LOOK_S = 8.0
"""How long who asks for the status waits for the first look of a new life. Less than they give it."""
WORKERS = 32


class Controller:
    """One per cluster and namespace. Every method may be called from any thread."""

    def __init__(self, world: World, *, clock: Callable[[], float] = time.monotonic, start: bool = True) -> None:
        """`start` False: nothing runs by itself, `tick` is called."""
        self._world = world
        self._clock = clock
        self._lock = threading.RLock()
        self._wakeup = threading.Event()
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="raykv-do")
        self._reconciler = Reconciler()
        self._busy: dict[Busy, Action] = {}
        self._probing: set[str] = set()
        self._facts: dict[str, NodeFacts] = {}
        self._record: Record | None = None
        self._targets = Targets()
        self._view = View()
        self._reports = Reports()
        self._looked = threading.Event()
        if not start:
            self._looked.set()
        if start:
            threading.Thread(target=self._run, name="raykv-controller", daemon=True).start()

    def __repr__(self) -> str:
        return "Controller"

    # -- what people and other actors call ----------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """HostInfo, as every actor of RayKV's."""
        return own_info()

    def apply(self, raw: str) -> None:
        """From now on the spec in this JSON is wanted. Raises ConfigError, and changes nothing, if it can't be.

        What runs as the new spec wants it is not touched. Blocks for seconds: every node is asked.
        """
        spec = parse_spec(json.loads(raw))
        nodes = self._world.nodes()
        facts = self._world.probe([node.id for node in nodes], _folders(spec), spec.model_path)
        found = self._world.engines([node.id for node in nodes])
        with self._lock:
            record = self._loaded()
            self._targets.check(spec, nodes, facts, found, record.draining)
            stores = record.stores | {store.name for store in spec.stores}
            self._save(replace(record, spec=spec.raw, stores=stores))
            self._use(spec)
            self._facts = dict(facts)
        self.wake()

    def down(self) -> None:
        """From now on nothing is wanted: engines and stores end. `status` says when none is left."""
        with self._lock:
            self._save(replace(self._loaded(), spec="", draining=frozenset()))
            self._use(None)
        self.wake()

    def drain(self, node: str) -> str:
        """Empty a node, by its id or the first letters of it, or its host; returns the id. Raises ClusterError."""
        return self._mark(node, True)

    def undrain(self, node: str) -> str:
        """The node takes engines and stores again."""
        return self._mark(node, False)

    def status(self) -> ClusterStatus:
        """As it was seen last, at most about a second ago. In the first moments of a life it blocks for the first look:
        who ends a cluster must not take it for an empty one. Raises ClusterError if there was none in time."""
        if not self._looked.wait(FIRST_LOOK_S):
            raise ClusterError("The Controller has just been started and has not seen the cluster yet. Ask again.")
        with self._lock:
            record = self._record or Record()
            return rows_of(self._view, self._targets.spec, record, self._busy, self._reconciler.backoff)

    def engines(self) -> list[EngineInfo]:
        """What the router may use. One that does not answer for the moment stays in it as it was: the router sees by
        itself whether it serves. Raises ClusterError until a new life has heard of all: the list before stands."""
        with self._lock:
            if not self._reports.heard_all:
                raise ClusterError("The Controller has just been started and has not heard of all engines yet.")
            return self._reports.serving(self._view, self._busy)

    def wake(self) -> None:
        """Look again now."""
        self._wakeup.set()

    def close(self) -> None:
        """End the threads; nothing else ends by that."""
        self._closed.set()
        self._wakeup.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- one look ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wakeup.wait(TICK_S)
            self._wakeup.clear()
            if self._closed.is_set():
                return
            try:
                self.tick()
            except Exception as error:  # whatever it is, the next look may go well
                logger.exception("the Controller's look at the cluster failed")
                with self._lock:
                    self._view = replace(self._view, problem=f"{type(error).__name__}: {error}")
                self._looked.set()

    def tick(self) -> None:
        """Look, decide, and begin what is to be done."""
        problem = self._world.problem()
        if problem:
            with self._lock:
                self._view = replace(self._view, problem=problem)
            self._looked.set()
            return
        with self._lock:
            busy = set(self._busy)
        nodes = self._world.nodes()
        ids = [node.id for node in nodes]
        found, stores = self._world.engines(ids), self._world.stores(ids)
        now = self._clock()
        with self._lock:
            record = self._loaded()
            gone = record.draining - set(ids)
            if gone:  # it was emptied and removed, or it died
                record = self._save(replace(record, draining=record.draining - gone))
            self._probe_new(ids)
            starting = [a.instance for a in self._busy.values() if isinstance(a, StartEngine)]
            draining = record.draining
            wanted, waiting = self._targets.wanted(nodes, self._facts, found, draining, starting, now)
            states = {instance: self._reports.state(instance, engine, now) for instance, engine in found.items()}
            own = frozenset(at for at in stores if at[0] in record.stores)
            wanted = replace(wanted, stores=wanted.stores | self._targets.lingering(own - wanted.stores, draining, now))
            seen = Seen(states, own, frozenset(ids))
            # What ended while it was looked at may have been seen as it was before.
            actions = self._reconciler.step(wanted, seen, frozenset(busy | self._busy.keys()), now)
            self._reports.note(found, now)
            errors = {**self._view.errors, **failures(found)}
            self._view = View(record.spec, tuple(nodes), found, own, wanted, waiting, errors)
            if self._targets.spec is None and record.stores and not own and not found and not self._busy:
                self._save(replace(record, stores=frozenset()))  # a store of that name is somebody else's from now on
            for action in actions:
                self._begin(action)
        self._looked.set()

    def _probe_new(self, ids: list[str]) -> None:
        """Ask nodes that are not known yet, in another thread: one that is not known takes nothing."""
        for lost in set(self._facts) - set(ids):
            del self._facts[lost]
        spec = self._targets.spec
        new = [node for node in ids if node not in self._facts and node not in self._probing]
        if spec is None or not new:
            return
        self._probing.update(new)

        def ask() -> None:
            facts: Mapping[str, NodeFacts] = {}
            try:
                facts = self._world.probe(new, _folders(spec), spec.model_path)
            finally:
                with self._lock:
                    self._probing.difference_update(new)
                    if self._targets.spec is spec:
                        self._facts.update(facts)
            self.wake()

        self._pool.submit(ask)

    # -- doing ------------------------------------------------------------------------------------------------

    def _begin(self, action: Action) -> None:
        what = subject(action)
        if what is None:
            if isinstance(action, ForgetNode):
                logger.warning("node %s is gone", action.node[:8])
            return
        logger.info("%s", action)
        self._busy[what] = action
        self._pool.submit(self._do, what, action, self._targets.spec)

    def _do(self, what: Busy, action: Action, spec: ClusterSpec | None) -> None:
        error: Exception | None = None
        try:
            self._perform(action, spec)
        except Exception as raised:
            error = raised
        with self._lock:
            del self._busy[what]
            if error is not None and not isinstance(error, StoreBusy):
                logger.warning("%s failed: %s", action, error)
            if error is not None:
                self._reconciler.failed(what, self._clock())
                key = what.replica if isinstance(what, Instance) else what
                text = str(error) if isinstance(error, RayKVError) else f"{type(error).__name__}: {error}"
                self._view = replace(self._view, errors={**self._view.errors, key: (text, ())})
            elif isinstance(action, StopEngine):
                self._reconciler.dismiss(action.instance)
                self._reports.ended(action.instance)
            elif isinstance(action, StartEngine):
                self._reconciler.adopt(action.instance)
        self.wake()

    def _perform(self, action: Action, spec: ClusterSpec | None) -> None:
        match action:
            case StartEngine(instance):
                with self._lock:
                    order = self._targets.orders.get(instance.replica)
                    engine = self._targets.engines.get(instance.replica)
                if order is not None and engine is not None:
                    self._world.start_engine(instance, order, engine.selector.resources)
            case StopEngine(instance, empty):
                self._world.stop_engine(instance, empty and spec is not None)
            case StartStore((name, node)):
                store = spec.store(name) if spec is not None else None
                if store is not None:
                    self._world.start_store(store.spec, node)
            case DrainStore(at):
                if spec is None:
                    self._world.end_store(at)
                else:
                    self._world.drain_store(at, at[1] in self._loaded().draining)

    # -- parts ------------------------------------------------------------------------------------------------

    def _mark(self, node: str, drained: bool) -> str:
        found = node_named(self._world.nodes(), node).id
        with self._lock:
            record = self._loaded()
            self._save(replace(record, draining=record.draining | {found} if drained else record.draining - {found}))
        self.wake()
        return found

    def _loaded(self) -> Record:
        """The record; read once, in the first life and in every later one."""
        if self._record is None:
            self._record = self._world.load()
            self._use(parse_spec(json.loads(self._record.spec)) if self._record.spec else None)
        return self._record

    def _save(self, record: Record) -> Record:
        self._world.save(record)
        self._record = record
        return record

    def _use(self, spec: ClusterSpec | None) -> None:
        self._targets.use(spec)
        for key in self._view.errors:  # what failed may go well now
            self._reconciler.backoff.forget(key)
        self._view = replace(self._view, errors={})


def _folders(spec: ClusterSpec) -> list[str]:
    tiers = [tier for store in spec.stores for tier in store.spec.tiers]
    return sorted({tier.path for tier in tiers if tier.medium is Medium.DISK and tier.path is not None})
