"""Children that come and go while the worker runs: one rank's part of a change of the chain.

A change comes with a step's metadata, so every rank applies it in the same step. What takes long runs in a thread: the
start of a host, a TierConnector that joins its store, and the end of both. A child takes part when its start was
reported, and what is ended is reported when nothing of it is left.

Other inline children are made and shut down in the worker's own thread, since vLLM's classes expect to be (their
streams and buffers belong to it): that step is longer by as much.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from raykv.actors.child_link import ChildLink
from raykv.config import ChildConfig, RunMode
from raykv.connector.inline_child import InlineChild
from raykv.connector.metadata import ChainAdd, ChainEnd, ChildStart
from raykv.connector.worker_setup import HostedChild, KVCacheExport
from raykv.errors import ConfigError
from raykv.messages import REMOVED, ChildEvent, ChildIndex, EventKind
from raykv.types import Incarnation, Rank

logger = logging.getLogger("raykv")


class Maker(Protocol):
    """Makes the worker halves of added children. Both may raise whatever the child does."""

    def hosted(self, config: ChildConfig, life: Incarnation) -> HostedChild:
        """Joins Ray if this process has not; starts a process. May block."""

    def inline(self, config: ChildConfig, life: Incarnation) -> InlineChild: ...


@dataclass(frozen=True)
class Caches:
    """The worker's KV cache, for children that come later. `export` None: it can't be shared, because of `why`."""

    tensors: Mapping[str, Any]
    export: KVCacheExport | None
    why: str = ""
    copy_blocks: Any = None


@dataclass(frozen=True)
class Joined:
    """A child whose worker half is there: a hosted one with its link, or an inline one."""

    index: ChildIndex
    hosted: HostedChild | None = None
    link: ChildLink | None = None
    inline: InlineChild | None = None
    handshake: Any = None

    @property
    def slow_to_end(self) -> bool:
        return self.hosted is not None or (self.inline is not None and self.inline.is_tier)

    def end(self) -> None:
        """Returns when nothing of it is left."""
        if self.hosted is not None:
            self.hosted.end()
        elif self.inline is not None:
            try:
                self.inline.connector.shutdown()
            except Exception:
                logger.exception("an inline child raised in shutdown")


@dataclass(frozen=True)
class _Started:
    index: ChildIndex
    joined: Joined | None
    error: str = ""


class WorkerChain:
    """One rank's. All methods: the worker's thread."""

    def __init__(self, rank: Rank, maker: Maker | None) -> None:
        self._rank, self._maker = rank, maker
        self._starting: dict[ChildIndex, Incarnation | None] = {}  # not None: it is to be ended, as this incarnation
        self._done: queue.SimpleQueue[_Started | ChildEvent] = queue.SimpleQueue()
        self._under_way = 0

    @property
    def busy(self) -> bool:
        """Whether `take` may bring something."""
        return self._under_way > 0

    # -- beginning ------------------------------------------------------------------------------------------

    def add(self, change: ChainAdd, caches: Caches) -> None:
        """Make this child; `take` brings it."""
        config = change.config
        self._starting[change.index] = None
        slow = config.options.run is RunMode.ACTOR or config.is_tier
        self._run(lambda: self._start(change, caches), slow, f"raykv-add-{config.name}")

    def end(self, change: ChainEnd, child: Joined | None) -> None:
        """Shut this child down; `child` None: it has not joined, or never will."""
        incarnation = change.incarnations[self._rank]
        if change.index in self._starting:
            self._starting[change.index] = incarnation  # when its start has ended, one way or the other
        elif child is None:
            self._run(lambda: self._ended(change.index, incarnation), False, "")
        else:
            self._end(child, incarnation)

    def _end(self, child: Joined, incarnation: Incarnation) -> None:
        def work() -> ChildEvent:
            child.end()
            return self._ended(child.index, incarnation)

        self._run(work, child.slow_to_end, f"raykv-end-{child.index}")

    def _ended(self, index: ChildIndex, incarnation: Incarnation) -> ChildEvent:
        return ChildEvent(EventKind.DOWN, index, self._rank, incarnation, detail=REMOVED)

    def _run(self, work: Callable[[], _Started | ChildEvent], in_thread: bool, name: str) -> None:
        self._under_way += 1
        if in_thread:
            threading.Thread(target=lambda: self._done.put(work()), name=name, daemon=True).start()
        else:
            self._done.put(work())

    # -- a start, mostly in its thread ----------------------------------------------------------------------

    def _start(self, change: ChainAdd, caches: Caches) -> _Started:
        config = change.config
        try:
            if caches.export is not None and caches.export.device.type == "cuda":
                torch.cuda.set_device(caches.export.device)  # threads begin on the first one
            hosted = config.options.run is RunMode.ACTOR
            joined = self._hosted(change, caches) if hosted else self._inline(change, caches)
        except Exception as error:
            logger.warning("child %s could not be added on rank %d: %s", config.name, self._rank, error)
            known = isinstance(error, ConfigError)
            return _Started(change.index, None, str(error) if known else f"{type(error).__name__}: {error}")
        logger.info("child %s was added (rank %d)", config.name, self._rank)
        return _Started(change.index, joined)

    def _hosted(self, change: ChainAdd, caches: Caches) -> Joined:
        assert self._maker is not None
        if caches.export is None:
            raise ConfigError(_not_shared(change.config, caches.why))
        child = self._maker.hosted(change.config, change.life)
        try:
            link = child.connect(caches.export)
        except BaseException:
            child.close()
            raise
        return Joined(change.index, hosted=child, link=link)

    def _inline(self, change: ChainAdd, caches: Caches) -> Joined:
        assert self._maker is not None
        config = change.config
        if config.is_tier and caches.export is None:
            raise ConfigError(_not_shared(config, caches.why))
        child = self._maker.inline(config, change.life)
        connector = child.connector
        try:
            if not config.is_tier and connector.get_mem_pool_context() is not None:
                raise ConfigError(
                    f"Child {config.name} ({config.connector}) wants a memory pool of its own for the KV cache, which "
                    "was allocated when the engine started. Start the engine with the child in its config."
                )
            connector.register_kv_caches(dict(caches.tensors))
            if caches.copy_blocks is not None:
                connector.set_host_xfer_buffer_ops(caches.copy_blocks)
            return Joined(change.index, inline=child, handshake=connector.get_handshake_metadata())
        except BaseException:
            connector.shutdown()
            raise

    # -- what has ended -------------------------------------------------------------------------------------

    def take(self) -> Iterable[Joined | ChildEvent | tuple[ChildIndex, ChildStart]]:
        """What has happened since the last call: children that join from now on, starts to be reported, and ends to be
        reported."""
        while self._under_way:
            try:
                found = self._done.get_nowait()
            except queue.Empty:
                return
            self._under_way -= 1
            if isinstance(found, ChildEvent):
                yield found
                continue
            unwanted = self._starting.pop(found.index)
            if unwanted is None:
                if found.joined is not None:
                    yield found.joined
                yield found.index, ChildStart(found.error, found.joined.handshake if found.joined is not None else None)
            elif found.joined is not None:
                self._end(found.joined, unwanted)
            else:
                yield self._ended(found.index, unwanted)

    def close(self) -> None:
        """The engine ends: what starts now must not stay. Does not wait for it."""
        for index in self._starting:
            self._starting[index] = Incarnation(0)
        left = self._under_way

        def sweep() -> None:
            for _ in range(left):
                found = self._done.get()
                if isinstance(found, _Started) and found.joined is not None:
                    found.joined.end()

        if left:
            threading.Thread(target=sweep, name="raykv-chain-close", daemon=True).start()


def _not_shared(config: ChildConfig, why: str) -> str:
    return (
        f"Child {config.name} ({config.connector}) works in another process, with which this engine's KV cache can't "
        f"be shared: {why} Start the engine with the child in its config."
    )
