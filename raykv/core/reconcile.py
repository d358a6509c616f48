"""From what is wanted and what is seen to what is to be done next. Decides only; the Controller does it.

Theory. An engine's actor is an *instance*: a replica on a node. At each step, for each instance that is seen:

    | it is                                              | then                                                     |
    |----------------------------------------------------|----------------------------------------------------------|
    | failed or stopped                                  | stop it (its actor only holds the log)                   |
    | as wanted: replica, node and digest                | nothing, ever                                            |
    | of no wanted replica                               | empty it, then stop it                                   |
    | of another digest: the spec has changed            | the same, when it is its turn: of a group (the engines   |
    |                                                    | of one role) one at a time, see `core.rolling`           |
    | on another node than wanted (its own is drained)   | empty and stop it, once its successor is ready or there  |
    |                                                    | is no place for one                                      |

and a wanted replica without an instance on its node is started there, when the store of that node is up and its pause
is over. A store that is wanted is started; one that is not is drained, when no instance that may use it is left there.
What the Controller is busy with is left alone until that has ended. So a step on a state that is as wanted gives
nothing, and each action moves the state towards it: nothing is done twice, and nothing that is right is touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raykv.cluster_messages import EngineState
from raykv.core.backoff import Backoff
from raykv.core.rolling import Replica, Rolling

MOVING = (EngineState.STARTING, EngineState.UNHEALTHY)
StoreAt = tuple[str, str]
"""A store's name and its node."""


@dataclass(frozen=True, order=True)
class Instance:
    """One engine's actor: a replica on a node."""

    replica: str
    node: str


@dataclass(frozen=True)
class Target:
    """What is wanted of a replica. `node` None: no node can take it now. `group`: of those that share it one at a time
    is changed; empty: it is changed whenever it has to be."""

    node: str | None
    digest: str
    store: str | None = None
    group: str = ""


@dataclass(frozen=True)
class Wanted:
    """The whole. `stores` are to be up."""

    engines: Mapping[str, Target] = field(default_factory=dict)
    stores: frozenset[StoreAt] = frozenset()


@dataclass(frozen=True)
class SeenEngine:
    """An instance as it was found. `state` None: its actor lives and has not answered (yet)."""

    state: EngineState | None
    digest: str


@dataclass(frozen=True)
class Seen:
    """What was found, on living nodes only. `stores`: those of the Controller's."""

    engines: Mapping[Instance, SeenEngine] = field(default_factory=dict)
    stores: frozenset[StoreAt] = frozenset()
    nodes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StartEngine:
    """Start an instance."""

    instance: Instance


@dataclass(frozen=True)
class StopEngine:
    """End an instance and its actor. `empty`: let it finish its requests first, and give it no new ones."""

    instance: Instance
    empty: bool
    why: str


@dataclass(frozen=True)
class StartStore:
    """Start a store on a node."""

    at: StoreAt


@dataclass(frozen=True)
class DrainStore:
    """Move a store's blocks to where they are still found, then end it."""

    at: StoreAt


@dataclass(frozen=True)
class ForgetNode:
    """The node is gone: nobody shall ask it for anything."""

    node: str


Action = StartEngine | StopEngine | StartStore | DrainStore | ForgetNode
Busy = Instance | StoreAt


def subject(action: Action) -> Busy | None:
    """What an action is about; None for a node."""
    match action:
        case StartEngine(instance) | StopEngine(instance):
            return instance
        case StartStore(at) | DrainStore(at):
            return at
    return None


class Reconciler:
    """Remembers what was seen before, so that it notices what is gone, and how often it failed."""

    def __init__(self) -> None:
        self.backoff = Backoff()
        self._rolling = Rolling()
        self._known: set[Instance] = set()
        self._nodes: set[str] = set()

    def step(self, wanted: Wanted, seen: Seen, busy: frozenset[Busy], now: float) -> list[Action]:
        """What is to be done next. Not what concerns one of `busy`."""
        forget = [ForgetNode(node) for node in sorted(self._nodes - seen.nodes)]
        self._nodes = set(seen.nodes)
        self._note(seen, busy, now)
        actions: list[Action] = [*forget]
        actions += self._stops(wanted, seen, busy, now)
        actions += [
            StartStore(at)
            for at in sorted(wanted.stores - seen.stores)
            if at not in busy and at[1] in seen.nodes and self.backoff.may(at, now)
        ]
        actions += self._starts(wanted, seen, busy, now)
        occupied = {one.node for one in busy if isinstance(one, Instance)}
        occupied |= {one.node for one, engine in seen.engines.items() if not _right(wanted, one, engine)}
        actions += [
            DrainStore(at)
            for at in sorted(seen.stores - wanted.stores)
            if at not in busy and at[1] not in occupied and self.backoff.may(at, now)
        ]
        return actions

    def failed(self, what: Busy, now: float) -> None:
        """An action about it has failed."""
        self.backoff.failed(what.replica if isinstance(what, Instance) else what, now)

    def adopt(self, instance: Instance) -> None:
        """It was started: from now on its absence is a failure."""
        self._known.add(instance)

    def dismiss(self, instance: Instance) -> None:
        """It was stopped: its absence is right."""
        self._known.discard(instance)

    def _note(self, seen: Seen, busy: frozenset[Busy], now: float) -> None:
        """Count failures: once for each instance that has failed or is gone."""
        gone = {one for one in self._known if one not in seen.engines and one not in busy}
        for instance in gone:
            self._known.discard(instance)
            if instance.node in seen.nodes:  # a lost node is no fault of the engine's
                self.backoff.failed(instance.replica, now)
        for instance, engine in seen.engines.items():
            if instance in busy:
                continue
            if engine.state is EngineState.FAILED:
                if instance in self._known or not self.backoff.failures(instance.replica):
                    self.backoff.failed(instance.replica, now)
                self._known.discard(instance)
                continue
            if engine.state is EngineState.STOPPED:
                self._known.discard(instance)
                continue
            self._known.add(instance)
            if engine.state is EngineState.READY:
                self.backoff.well(instance.replica, now)

    def _stops(self, wanted: Wanted, seen: Seen, busy: frozenset[Busy], now: float) -> list[Action]:
        self._look_at_turns(wanted, seen, busy, now)
        stops: list[Action] = []
        for instance, engine in sorted(seen.engines.items(), key=lambda item: item[0]):
            if instance in busy:
                continue
            target = wanted.engines.get(instance.replica)
            if engine.state in (EngineState.FAILED, EngineState.STOPPED):
                stops.append(StopEngine(instance, False, f"it has {engine.state}"))
            elif target is None:
                stops.append(StopEngine(instance, True, "it is not wanted any more"))
            elif target.digest != engine.digest:
                if not target.group or self._rolling.take(target.group, instance.replica, now):
                    stops.append(StopEngine(instance, True, "its spec has changed"))
            elif target.node is None:
                stops.append(StopEngine(instance, True, "its node is drained and no other can take it"))
            elif target.node != instance.node and _ready(target, instance.replica, seen):
                stops.append(StopEngine(instance, True, "its successor is ready"))
        return stops

    def _look_at_turns(self, wanted: Wanted, seen: Seen, busy: frozenset[Busy], now: float) -> None:
        at_work = {one.replica for one in busy if isinstance(one, Instance)}
        states = {one.replica: engine.state for one, engine in seen.engines.items() if _new(wanted, one, engine)}
        replicas = [
            Replica(
                target.group,
                name,
                ready=states.get(name) is EngineState.READY,
                moving=name in at_work or states.get(name) in MOVING,
                failures=self.backoff.failures(name),
            )
            for name, target in sorted(wanted.engines.items())
            if target.group
        ]
        self._rolling.look(replicas, now)

    def _starts(self, wanted: Wanted, seen: Seen, busy: frozenset[Busy], now: float) -> list[Action]:
        starts: list[Action] = []
        outdated = {
            one.replica
            for one, engine in seen.engines.items()
            if (target := wanted.engines.get(one.replica)) and target.group and target.digest != engine.digest
        }
        for replica, target in sorted(wanted.engines.items()):
            if target.node is None or target.node not in seen.nodes or not self.backoff.may(replica, now):
                continue
            instance = Instance(replica, target.node)
            if instance in seen.engines or instance in busy:
                continue
            if target.store is not None and (target.store, target.node) not in seen.stores:
                continue
            if replica in outdated and not self._rolling.take(target.group, replica, now):
                continue  # it is to go elsewhere, when it is its turn
            starts.append(StartEngine(instance))
        return starts


def _right(wanted: Wanted, instance: Instance, engine: SeenEngine) -> bool:
    """Whether it is what is wanted, and so uses no store that is not."""
    target = wanted.engines.get(instance.replica)
    return target is not None and (target.node, target.digest) == (instance.node, engine.digest)


def _new(wanted: Wanted, instance: Instance, engine: SeenEngine) -> bool:
    """Whether it runs what is wanted, wherever."""
    target = wanted.engines.get(instance.replica)
    return target is not None and target.digest == engine.digest


def _ready(target: Target, replica: str, seen: Seen) -> bool:
    """Whether the instance that is wanted of a replica takes requests."""
    successor = seen.engines.get(Instance(replica, target.node or ""))
    return successor is not None and successor.state is EngineState.READY and successor.digest == target.digest
