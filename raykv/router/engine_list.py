"""Where the list of engines comes from, and its refreshing in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Protocol

from raykv.cluster_messages import EngineInfo
from raykv.core.routing import RoutingTable

logger = logging.getLogger("raykv")

ANSWER_TIMEOUT_S = 5.0


class EngineSource(Protocol):
    """Knows the engines. `engines` may raise anything, and may never answer: the list before stands then."""

    async def engines(self) -> Sequence[EngineInfo]:
        """All engines, ready or not."""
        ...


class StaticEngines:
    """A list that was given. An engine that is down is found by its failures."""

    def __init__(self, engines: Sequence[EngineInfo]) -> None:
        self._engines = tuple(engines)

    async def engines(self) -> Sequence[EngineInfo]:
        return self._engines


class Refresher:
    """Keeps a table's engines current, from `start` to `stop`. One event loop."""

    def __init__(self, source: EngineSource, table: RoutingTable, every_s: float) -> None:
        self._source = source
        self._table = table
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None
        self._looking: asyncio.Future[None] | None = None
        self.problem = ""
        """Why the last look gave nothing; empty: it did."""

    async def start(self) -> None:
        """Look once, and go on looking. Takes ANSWER_TIMEOUT_S at most."""
        await self.look()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End the task, and a look that is under way."""
        for task in (self._task, self._looking):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def look(self) -> None:
        """Ask once, for all who want it meanwhile. An error is kept as `problem`, and logged when it is a new one."""
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())
            self._looking.add_done_callback(self._looked)
        await asyncio.shield(self._looking)

    def _looked(self, _: asyncio.Future[None]) -> None:
        self._looking = None

    async def _look(self) -> None:
        problem = ""
        try:
            engines = await asyncio.wait_for(self._source.engines(), ANSWER_TIMEOUT_S)
            self._table.replace(engines)
        except TimeoutError:
            problem = f"the list of engines did not come within {ANSWER_TIMEOUT_S:g} s"
        except Exception as error:  # whatever it is: the router goes on with the engines that it knows
            problem = f"the list of engines can't be had: {error}"
        if problem != self.problem:
            logger.warning("router: %s", problem or "the list of engines comes again")
        self.problem = problem

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self.look()
