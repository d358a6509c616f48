"""Brings a hosted child's scheduler half back after its hosts were lost, also while the engine is idle.

The links of the workers restart their hosts by themselves. This thread, in EngineCore, looks at the hosts
from outside (by name, through Ray), and once every rank has a registered host of one new incarnation it
builds a new scheduler half around their handshake metadata and offers it. A rank that is behind is told to
start again, since all ranks of a child live and die together.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from raykv.connector.metadata import load
from raykv.connector.scheduler_child import ChildState, SchedulerChild
from raykv.core.chain import Place
from raykv.errors import HostTimeout
from raykv.messages import HostStatus
from raykv.types import Incarnation, Rank

logger = logging.getLogger("raykv")

LOOK_EVERY_S = 0.5
LOOK_AT_LIVING_EVERY_S = 2.0
REBUILD_PAUSE_S = 5.0


class HostWatch(Protocol):
    """How the supervisor sees hosts; `actors.host_watch` over Ray, a fake in tests."""

    def connect(self) -> None:
        """Join the cluster. Raises ClusterError."""

    def statuses(self, child: str, rank: Rank) -> list[HostStatus]:
        """The living hosts of a child's rank. Raises RayKVError when the cluster can't be asked, HostTimeout when
        a host that was in use does not answer."""

    def retire(self, child: str, rank: Rank, incarnation: Incarnation) -> None:
        """Have that host end."""


Rebuild = Callable[[SchedulerChild, Incarnation, Mapping[Rank, Any]], Any]
"""Makes a child's new scheduler half from its ranks' handshake metadata; may take seconds, may raise."""


class Supervisor:
    """One thread per engine, for all its hosted children, also those that are added later."""

    def __init__(self, children: Iterable[SchedulerChild], num_ranks: int, watch: HostWatch, rebuild: Rebuild) -> None:
        """`children` may be another chain each time it is iterated (`roster.Roster`)."""
        self._children = children
        self._ranks = [Rank(r) for r in range(num_ranks)]
        self._watch = watch
        self._rebuild = rebuild
        self._stop = threading.Event()
        self._looked: dict[int, float] = {}
        self._not_before: dict[int, float] = {}
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="raykv-supervisor", daemon=True)

    def start(self) -> None:
        """Look from now on, if there is a hosted child. Once there is one, call it again."""
        if self._thread.ident is None and any(child.hosted for child in self._children):
            self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            try:
                self._watch.connect()
                for child in [one for one in self._children if one.hosted]:
                    with contextlib.suppress(HostTimeout):  # slow or hung: its link judges, look again later
                        self.look(child, time.monotonic())
                self._complained = False
            except Exception as error:
                if not self._complained:
                    logger.warning(
                        "RayKV can't look at its hosts (%s). Running children go on; one that is lost stays away "
                        "until Ray's head answers again.",
                        error,
                    )
                    self._complained = True

    def look(self, child: SchedulerChild, now: float) -> None:
        """One look at one child; the thread's step, public for tests."""
        if child.has_offer or not child.place.stays:
            return
        living = child.state is ChildState.UP
        if living and now - self._looked.get(child.index, 0.0) < LOOK_AT_LIVING_EVERY_S:
            return
        self._looked[child.index] = now
        hosts = {rank: self._watch.statuses(child.name, rank) for rank in self._ranks}
        if living:
            if all(
                any(s.incarnation == child.incarnations[rank] for s in statuses) for rank, statuses in hosts.items()
            ):
                return
            child.mark_down()
        self._bring_together(child, hosts, now)

    def _bring_together(self, child: SchedulerChild, hosts: Mapping[Rank, list[HostStatus]], now: float) -> None:
        newest = {
            rank: max((s for s in statuses if s.registered), key=lambda s: s.incarnation, default=None)
            for rank, statuses in hosts.items()
        }
        oldest = max(child.incarnations)
        target = max((s.incarnation for s in newest.values() if s is not None), default=oldest)
        target = Incarnation(max(target, oldest + 1))
        for rank, status in newest.items():
            if status is not None and status.incarnation < target:
                self._watch.retire(child.name, rank, status.incarnation)
        if any(status is None or status.incarnation != target for status in newest.values()):
            return
        if now < self._not_before.get(child.index, 0.0):
            return
        old = child.detach()
        if old is not None:
            try:
                old.shutdown()
            except Exception as error:
                logger.warning("child %s: its old scheduler half raised in shutdown: %s", child.name, error)
        handshakes = {
            rank: load(status.handshake)
            for rank, status in newest.items()
            if status is not None and status.handshake is not None
        }
        try:
            connector = self._rebuild(child, target, handshakes)
        except Exception as error:
            if child.place is Place.STARTING:
                child.start_error = f"{type(error).__name__}: {error}"
                return
            self._not_before[child.index] = now + REBUILD_PAUSE_S
            logger.warning("child %s: its scheduler half could not be rebuilt yet: %s", child.name, error)
            return
        child.offer(connector, (target,) * len(self._ranks))
