"""The same operations for asyncio: each runs in a thread, so that the loop goes on while Ray is asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raykv.api.cluster import Cluster
    from raykv.api.watching import Event


class AsyncCluster:
    """`kv.aio`: what `kv` has, to be awaited. `await kv.aio.pin(...)`, `await kv.aio.nodes()` (the properties are
    methods here), `async for event in kv.aio.watch()`.

    A call that is cancelled goes on in its thread until it ends by itself or by its own time limit: what was ordered
    stays ordered. A `tell` of progress is called in that thread.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kind = getattr(type(self._cluster), name, None) if not name.startswith("_") else None
        if isinstance(kind, property):
            return self._awaited(lambda: getattr(self._cluster, name), name, kind.__doc__)
        if not callable(kind):
            raise AttributeError(f"there is no operation {name!r}: see help(raykv.api.Cluster)")
        return self._awaited(getattr(self._cluster, name), name, kind.__doc__)

    def __dir__(self) -> list[str]:
        return [name for name in dir(self._cluster) if not name.startswith("_")]

    @staticmethod
    def _awaited(call: Callable[..., Any], name: str, doc: str | None) -> Callable[..., Any]:
        async def run(*args: Any, **options: Any) -> Any:
            return await asyncio.to_thread(call, *args, **options)

        run.__name__, run.__doc__ = name, doc
        return run

    async def watch(self, every_s: float = 1.0, for_s: float | None = None) -> AsyncIterator[Event]:
        """`Cluster.watch` for `async for`; leaving the loop ends it."""
        stop = threading.Event()
        events = self._cluster.watch(every_s, for_s, stop=stop)
        try:
            while True:
                event = await asyncio.to_thread(next, events, None)
                if event is None:
                    return
                yield event
        finally:
            stop.set()

    async def __aenter__(self) -> AsyncCluster:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self._cluster.close)
