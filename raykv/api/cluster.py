"""RayKV as an operator sees and changes it: `kv = raykv.connect()`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import TracebackType

from raykv.api import finding, looking, watching
from raykv.api.aio import AsyncCluster
from raykv.api.asking import at_all
from raykv.api.at_engines import AtEngines
from raykv.api.at_stores import AtStores
from raykv.api.checked import operation
from raykv.api.connection import TIMEOUT_S
from raykv.api.desks import Desk
from raykv.api.errors import NotFoundError
from raykv.api.explain import explained
from raykv.api.explanation import Explanation
from raykv.api.lookups import look_up
from raykv.api.objects import Engine, Listing, Node, Snapshot, Store
from raykv.api.prompts import Prompt
from raykv.api.results import Found, Outcome, Part, Progress, Tell
from raykv.api.watching import Event
from raykv.api.words import count, seconds, unknown
from raykv.engine_messages import Story
from raykv.errors import RayKVError

DRAIN_S = 900.0


class Cluster(AtStores, AtEngines):
    """Everything of RayKV in one namespace of one Ray cluster.

    Made by `raykv.connect()`; a context manager; any thread. It keeps nothing of what it saw: each property and each
    operation looks anew, which takes about as long as the slowest actor, `timeout_s` at most. `aio` has the same for
    asyncio. What can't be done is a RayKVError with one sentence, raised before anything is changed.
    """

    @property
    def aio(self) -> AsyncCluster:
        """The same operations, to be awaited."""
        return AsyncCluster(self)

    def close(self) -> None:
        """Leave the Ray cluster, if `connect` joined it."""
        self._world.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RayKV cluster at {self.address}, namespace {self.namespace}>"

    # -- what there is ----------------------------------------------------------------------------------------------

    @operation
    def snapshot(self) -> Snapshot:
        """Nodes, engines and stores at one moment."""
        return looking.look(self._world, self._timeout)

    @property
    def nodes(self) -> Listing[Node]:
        """The nodes of the Ray cluster, dead ones too."""
        return self.snapshot().nodes

    @property
    def engines(self) -> Listing[Engine]:
        """The engines that have told something of themselves, with their children."""
        return self._engines()

    @property
    def stores(self) -> Listing[Store]:
        """The stores of all nodes, with their tiers; those that do not answer too."""
        return self._stores()

    @operation
    def engine(self, name: str | None = None) -> Engine:
        """One engine, by its name or id, the first letters of one, its host or its model; None: the only one."""
        return self._engine(name)

    @operation
    def node(self, name: str) -> Node:
        """One node, by its id, the first letters of it, its host or its address."""
        return finding.node(self.nodes, name)

    @operation
    def store(self, name: str) -> Store:
        """One store, by NAME@NODE, its actor, or its name if there is one of it."""
        found = finding.stores(self._stores(), name)
        if len(found) > 1:
            raise NotFoundError(f"{len(found)} stores have this name: say {', '.join(one.at for one in found)}.")
        return found[0]

    # -- questions --------------------------------------------------------------------------------------------------

    @operation
    def lookup(
        self,
        prompt: Prompt,
        *,
        engine: str | None = None,
        model: str | None = None,
        store: str | None = None,
        cache_salt: str = "",
        lora: str = "",
    ) -> Found:
        """Where the blocks of a prompt lie: in which tiers of which nodes' stores. Changes nothing and leases nothing.

        `prompt`: a text, token ids or chat messages, as the engine would get it; it is hashed by that engine, so with
        its block size, seed and adapters. `model` says which model it is meant for, and is checked.
        """
        of = self._engine(engine, model)
        known = self._stores()
        stores = finding.stores(known, store) if store is not None else list(known)
        hashed = self._hashed(prompt, of, stores, cache_salt, lora)
        return look_up(of, hashed, stores, self._world.stores(), self._timeout)

    @operation
    def explain(self, request: str, *, engine: str | None = None) -> Explanation:
        """Where each token of a request's prompt came from, and why no tier had those that were computed.

        `request`: its id as vLLM or the client knows it, or the beginning of it. Engines keep the last ones only.
        Raises NotFoundError for an unknown one.
        """
        engines = self._engines()
        asked = [finding.engine(engines, engine)] if engine is not None else list(engines)
        if not asked:
            raise NotFoundError("No engine has told anything of itself yet. Start one with the RayKV connector.")
        found = self._stories(request, asked)
        stores, callers = list(self._stores()), self._world.stores()
        made = [explained(story, of, stores, callers, self._timeout) for of, story in found]
        first, *rest = sorted(made, key=lambda one: -one.arrived)
        return _with_others(first, tuple(rest))

    @operation
    def requests(self, *, engine: str | None = None) -> Listing[str]:
        """The ids of the requests that `explain` knows, oldest first."""
        engines = self._engines()
        asked = [finding.engine(engines, engine)] if engine is not None else list(engines)
        known, _ = at_all(lambda one: self._desks_by_id(asked)[one].requests(self._timeout), [of.id for of in asked])
        return Listing(request for requests in known.values() for request in requests)

    # -- nodes ------------------------------------------------------------------------------------------------------

    @operation
    def drain_node(self, node: str, *, wait_s: float = DRAIN_S, tell: Tell | None = None) -> Outcome:
        """Empty a node so that it can be removed: its engines first move elsewhere, its stores' blocks too.

        Without a Controller (`raykv up`) only the stores are drained. Raises RayKVError if that takes longer than
        `wait_s`; it goes on then, and the same call waits again.
        """
        limit, found = seconds(wait_s, "wait_s"), self.node(node)

        def heard(where: str, said: str) -> None:
            if tell is not None:
                tell(Progress("drain node", where, detail=said))

        said = self._world.drain(found.id, limit, heard)
        return Outcome("drain node", said, parts=(Part(found.short, said),))

    @operation
    def undrain_node(self, node: str) -> Outcome:
        """Use a node again."""
        found = self.node(node)
        said = self._world.undrain(found.id, max(self._timeout, 60.0))
        return Outcome("undrain node", said, parts=(Part(found.short, said),))

    # -- events -----------------------------------------------------------------------------------------------------

    @operation
    def watch(
        self, every_s: float = 1.0, for_s: float | None = None, *, stop: threading.Event | None = None
    ) -> Iterator[Event]:
        """What changes, as it is seen: nodes, engines, children, stores, tiers, operations and pins that come, go or
        change their state. A look every `every_s`; ends after `for_s`, or when `stop` is set. What came and went
        between two looks is not seen. While nothing can be seen (a head that is away) it waits and looks again."""
        pause = seconds(every_s, "every_s", 3600.0)
        deadline = None if for_s is None else time.monotonic() + seconds(for_s, "for_s")
        ended = stop or threading.Event()
        return self._changes(pause, deadline, ended)

    def _changes(self, pause: float, deadline: float | None, ended: threading.Event) -> Iterator[Event]:
        before: Snapshot | None = None
        last: dict[str, int] = {}
        problem = ""
        while not ended.is_set():
            try:
                after = self.snapshot()
            except RayKVError as error:
                if problem != str(error):
                    problem = str(error)
                    yield Event(time.time(), "cluster", "silent", self.address, said=problem)
            else:
                if problem:
                    problem = ""
                    yield Event(after.at, "cluster", "back", self.address, said="The cluster is seen again.")
                if before is not None:
                    yield from watching.changes(before, after)
                yield from self._orders(after, last)
                before = after
            left = pause if deadline is None else min(pause, deadline - time.monotonic())
            if left <= 0 or ended.wait(left):
                return

    def _orders(self, seen: Snapshot, last: dict[str, int]) -> Iterator[Event]:
        """What became of the orders at desks since the look before. `last`: by desk, its last event that was seen."""
        desks = {engine.desk: engine for engine in seen.engines}
        callers = self._world.desks()
        known = [desk for desk in desks if desk in callers]
        found, _ = at_all(lambda desk: Desk(callers[desk]).events(last.get(desk, -1), self._timeout), known)
        for desk, events in found.items():
            for one in events if desk in last else ():
                if one.what == "order":
                    yield watching.order_event(one, desks[desk])
            last[desk] = max((one.number for one in events), default=last.get(desk, -1))

    # -- parts ------------------------------------------------------------------------------------------------------

    def _desks_by_id(self, engines: list[Engine]) -> dict[str, Desk]:
        callers = self._world.desks()
        return {engine.id: Desk(callers[engine.desk]) for engine in engines if engine.desk in callers}

    def _stories(self, request: str, engines: list[Engine]) -> list[tuple[Engine, Story]]:
        """The request in each engine that knows it. Raises NotFoundError."""
        desks = self._desks_by_id(engines)
        if isinstance(request, str) and request:
            stories, errors = at_all(lambda one: desks[one].story(request, self._timeout), desks)
        else:
            stories, errors = {}, {}
        found = [(engine, stories[engine.id]) for engine in engines if stories.get(engine.id) is not None]
        if found:
            return found
        lists, silent = at_all(lambda one: desks[one].requests(self._timeout), desks)
        known = [one for ids in lists.values() for one in reversed(ids)]
        missing = {**errors, **silent}
        if missing:
            raise NotFoundError(
                f"No engine that answers knows the request {request!r:.100}, and {', '.join(missing)} "
                f"{'does' if len(missing) == 1 else 'do'} not answer ({next(iter(missing.values()))})."
            )
        if len(known) > 20:
            kept = f" {count(len(known), 'request')} are kept; the last ones: {', '.join(known[:5])}."
            nearest = str(unknown("request", request, known[:1000])).partition(" Valid:")[0]
            raise NotFoundError(f"{nearest}{kept}")
        raise unknown("request", request, known)


def _with_others(first: Explanation, rest: tuple[Explanation, ...]) -> Explanation:
    from dataclasses import replace

    return replace(first, others=rest) if rest else first


def connect(address: str | None = None, namespace: str = "raykv", timeout_s: float = TIMEOUT_S) -> Cluster:
    """Join the Ray cluster that RayKV runs in. Blocks for a second or two; starts nothing.

    `address`: host:port of the head; None: RAY_ADDRESS, else a cluster on this machine. A token is taken from where Ray
    takes it (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token). `timeout_s`: for one question to one actor.
    Raises ClusterError with the fix.
    """
    from raykv.api.ray_world import RayWorld

    limit = seconds(timeout_s, "timeout_s", 3600.0)
    return Cluster(RayWorld(address, namespace, limit), limit)
