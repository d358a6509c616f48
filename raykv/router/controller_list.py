"""The list of engines as the Controller gives it. A part of RayKV's edge to Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray

from raykv.cluster_messages import CONTROLLER, EngineInfo
from raykv.errors import ClusterError


class ControllerEngines:
    """An EngineSource: asks the Controller, wherever it runs now. One event loop."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._actor: Any = None
        self._finding: asyncio.Future[Any] | None = None

    async def engines(self) -> Sequence[EngineInfo]:
        """Raises ClusterError while there is no Controller, or it does not answer in its way."""
        try:
            if self._actor is None:
                self._actor = await self._found()
            return tuple(await self._actor.engines.remote())
        except ray.exceptions.RayError as error:
            self._actor = None
            raise ClusterError(f"the Controller ({CONTROLLER}) does not answer: {type(error).__name__}") from error
        except ValueError as error:
            raise ClusterError(f"no Controller ({CONTROLLER}) runs in namespace {self._namespace!r}") from error

    async def _found(self) -> Any:
        """The actor. Ray waits for the head while it is away: in one thread, however often it is asked meanwhile."""
        if self._finding is None:
            self._finding = asyncio.ensure_future(asyncio.to_thread(ray.get_actor, CONTROLLER, self._namespace))
        try:
            return await asyncio.shield(self._finding)
        finally:
            if self._finding.done():
                self._finding = None
