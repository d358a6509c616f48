"""The Directory of a cluster: which node's store is believed to hold which block. Never the authority.

A plain class; `directory_handle` makes it a named Ray actor. It keeps everything in memory, starts empty, and has all
again soon after: its answer to a store that it does not know asks for all that the store holds. Who it names may be
gone or hold nothing; who asks finds out from the store itself. Without it, each node serves its own tiers.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raykv.actors.host_base import be_as_nice_as_others, own_info
from raykv.core.directory_book import DirectoryBook
from raykv.directory_messages import DirectoryStatus, Locate, Located, Publish, PublishReply
from raykv.types import StoreLife

logger = logging.getLogger("raykv")

SILENT_S = 30.0
"""A store publishes every few seconds, be it nothing: one that is silent for so long is gone, or cut off."""
LOOK_AROUND_S = 1.0
SWEEP_S = 0.01
SWEEP_SHARDS = 1
"""About 2 ms of work at 10^7 blocks, with look-ups in between; all of the table in 3 s."""
SWITCH_S = 0.0005
"""How long a look-up waits for the thread that takes a batch. Python's own 5 ms would be most of its time."""

Nodes = Callable[[], Sequence[Mapping[str, Any]]]
"""The cluster's nodes, as `cluster.nodes` has them: `node_id` and `alive`. May block while the head is away."""


class Directory:
    """One per cluster and namespace. Every method may be called from any thread; `locate` waits for no other."""

    def __init__(self, nodes: Nodes | None = None, *, own_process: bool = False, silent_s: float = SILENT_S) -> None:
        """`nodes` None: only silence tells that a node is gone. `own_process`: nothing else runs here."""
        if own_process:
            sys.setswitchinterval(SWITCH_S)
            be_as_nice_as_others()
        self.life = f"{os.getpid()}.{secrets.token_hex(6)}"
        self._book = DirectoryBook()
        self._lock = threading.Lock()  # around all that changes the book
        self._nodes, self._silent_s = nodes, silent_s
        self._swept = threading.Event()
        self._stop = threading.Event()
        loops = [("raykv-directory-watch", self._watch), ("raykv-directory-sweep", self._sweep)]
        if nodes is not None:
            loops.append(("raykv-directory-nodes", self._watch_nodes))
        for name, loop in loops:
            threading.Thread(target=loop, name=name, daemon=True).start()

    def __repr__(self) -> str:
        return "Directory()"

    # -- look-ups, in their own thread ----------------------------------------------------------------------

    def locate(self, wanted: Locate) -> Located:
        """Who is believed to hold a prefix of these blocks, the longest first. Raises ValueError for a bad question."""
        return Located(self._book.locate(wanted))

    # -- publishing, in its own thread ----------------------------------------------------------------------

    def publish(self, batch: Publish) -> PublishReply:
        """Take what a store says that it holds. Raises ValueError for a batch that can't be read."""
        with self._lock:
            again = self._book.publish(batch, time.monotonic())
        if not batch.number:
            self._swept.set()  # it may have replaced an older stream
        return PublishReply(again)

    # -- control --------------------------------------------------------------------------------------------

    def leave(self, node: str, store: str, life: StoreLife) -> bool:
        """A store ends in order; whether it was known."""
        with self._lock:
            known = self._book.leave(node, store, life)
        self._swept.set()
        return known

    def forget_node(self, node: str) -> int:
        """A node is gone, or is not to be asked any more; how many stores that were. One that lives publishes again."""
        with self._lock:
            ended = self._book.forget_nodes([node])
        self._swept.set()
        return ended

    def look_at_nodes(self) -> int:
        """Forget what is on dead nodes, now and not within a second; how many stores that were."""
        dead = [str(node["node_id"]) for node in self._nodes() if not node["alive"]] if self._nodes else []
        with self._lock:
            ended = self._book.forget_nodes(dead)
        if ended:
            logger.info("%d stores are forgotten: their nodes are dead", ended)
            self._swept.set()
        return ended

    def info(self) -> dict[str, Any]:
        """HostInfo as plain values: who asks may run another RayKV."""
        return {**own_info(), "directory": self.life}

    def status(self) -> DirectoryStatus:
        """Figures of this moment."""
        book = self._book
        with self._lock:
            holders = book.holders(time.monotonic())
            keys, nbytes = book.keys, book.nbytes
        counts = {name: book.counts[name] for name in _COUNTS}
        nodes = len({holder.node for holder in holders})
        return DirectoryStatus(self.life, os.getpid(), keys, nbytes, nodes, holders, **counts)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the book agrees with itself. Nothing is published meanwhile."""
        with self._lock:
            self._book.check_integrity()

    def close(self) -> None:
        """End the threads."""
        self._stop.set()
        self._swept.set()

    # -- its own threads ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_AROUND_S):
            with self._lock:
                ended = self._book.forget_silent(time.monotonic() - self._silent_s)
            if ended:
                logger.warning("%d stores did not publish for %.0f s and are forgotten", ended, self._silent_s)
                self._swept.set()

    def _watch_nodes(self) -> None:
        while not self._stop.wait(LOOK_AROUND_S):
            try:
                self.look_at_nodes()
            except Exception as error:  # Ray's head is away: silence still tells
                logger.debug("the cluster's nodes can't be read now: %s", error)

    def _sweep(self) -> None:
        while not self._stop.is_set():
            self._swept.wait()
            self._swept.clear()
            more = True
            while more and not self._stop.wait(SWEEP_S):
                with self._lock:
                    more = self._book.sweep(SWEEP_SHARDS)


_COUNTS = ("published", "refused", "added", "removed", "forgotten", "located", "located_blocks", "hits")
