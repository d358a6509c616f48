"""What the learner asks of the cluster, over Ray's handles: desks of engines, and the Directory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence

from raykv.actors import desk_handle, directory_handle
from raykv.actors.desk_handle import DeskHandle
from raykv.actors.locator import Locator
from raykv.directory_messages import Locate, Located
from raykv.engine_messages import EngineView, Hashed, HashOrder
from raykv.errors import RayKVError
from raykv.types import EngineId

logger = logging.getLogger("raykv")

VIEW_S = 2.0
HASH_S = 10.0


class RayResidency:
    """Implements `learner.Cluster`. Made in an event loop; ends with its process."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._locator = Locator(directory_handle.finder(namespace))
        self._desks: dict[str, DeskHandle] = {}

    async def views(self) -> Sequence[EngineView]:
        """In a thread: Ray waits for the head while it is away."""
        return await asyncio.to_thread(self._read_views)

    def _read_views(self) -> list[EngineView]:
        found = []
        names = desk_handle.desks(self._namespace)
        self._desks = {name: desk for name, desk in self._desks.items() if name in names}
        for name in names:
            try:
                if name not in self._desks:
                    self._desks[name] = desk_handle.find_desk(name, self._namespace)
                view = self._desks[name].call("view", timeout=VIEW_S)
            except RayKVError as error:  # its engine has just ended
                logger.debug("router: %s says nothing: %s", name, error)
                self._desks.pop(name, None)
                continue
            if view is not None:
                found.append(view)
        return found

    async def hash(self, view: EngineView, order: HashOrder) -> Hashed | None:
        """Raises HostError, or KeyError for an engine whose desk is gone."""
        desk = self._desks[desk_handle.desk_name(EngineId(view.engine))]
        return await asyncio.to_thread(desk.call, "hash", order, timeout=HASH_S)

    async def located(self, wanted: Locate, timeout: float) -> Mapping[str, int]:
        """Never raises: without a Directory nobody holds anything."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Located] = loop.create_future()

        def take(located: Located) -> None:
            if not answer.done():
                answer.set_result(located)

        def done(located: Located) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(take, located)

        self._locator.locate(wanted, timeout, done)
        held: dict[str, int] = {}
        for holder in (await answer).holders:
            held[holder.node] = max(held.get(holder.node, 0), holder.blocks)
        return held
