"""Looking at hosts from a process that did not launch them."""

from __future__ import annotations

import contextlib

from raykv.actors import cluster, handles, ray_calls
from raykv.actors.hosted_process import actor_prefix
from raykv.errors import HostTimeout, RayKVError
from raykv.messages import HostStatus
from raykv.types import Incarnation, Rank

STATUS_TIMEOUT_S = 2.0


class RayHostWatch:
    """Implements the supervisor's `HostWatch` over Ray. One thread."""

    def __init__(self, address: str | None, namespace: str, engine_id: str) -> None:
        self._address, self._namespace, self._engine_id = address, namespace, engine_id
        self._known: dict[str, handles.RemoteHost] = {}
        self._names: dict[tuple[str, Rank, Incarnation], str] = {}
        self._seen_registered: set[str] = set()

    def connect(self) -> None:
        cluster.connect(self._address, namespace=self._namespace)

    def statuses(self, child: str, rank: Rank) -> list[HostStatus]:
        """Of hosts that were seen before the answer needs no head; new ones are found through it.

        Raises HostTimeout if one that was in use does not answer in time.
        """
        prefix = actor_prefix(self._engine_id, child, rank)
        found = self._ask([name for name in self._known if name.startswith(prefix)])
        if not any(status.registered for status in found.values()):
            found |= self._ask([name for name in ray_calls.names(self._namespace) if name.startswith(prefix)])
        for name, status in found.items():
            self._names[(child, rank, status.incarnation)] = name
        return list(found.values())

    def _ask(self, names: list[str]) -> dict[str, HostStatus]:
        answers = {}
        for name in names:
            host = self._known.get(name) or handles.find(name, self._namespace)
            if host is None:
                continue
            self._known[name] = host
            try:
                answers[name] = host.call("status", timeout=STATUS_TIMEOUT_S)
            except HostTimeout:
                if name in self._seen_registered:
                    raise  # slow or hung, which is its link's to judge; not gone
            except RayKVError:
                self._known.pop(name, None)
                self._seen_registered.discard(name)
            else:
                if answers[name].registered:
                    self._seen_registered.add(name)
        return answers

    def retire(self, child: str, rank: Rank, incarnation: Incarnation) -> None:
        name = self._names.get((child, rank, incarnation))
        host = self._known.get(name) if name else None
        if host is not None:
            with contextlib.suppress(RayKVError):
                host.call("retire", timeout=STATUS_TIMEOUT_S)
