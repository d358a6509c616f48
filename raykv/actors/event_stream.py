"""The merged stream of KV events: what all stores hold, told to whoever listens, in vLLM's own format.

A plain class; `event_handle` makes it a named Ray actor. Stores tell it what changed (`event_feed`), as they tell the
Directory; readers subscribe and ask for what they missed as they would with vLLM's own publisher. It keeps all in
memory, starts empty, and has everything again soon after.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raykv.actors.event_sockets import EventSockets
from raykv.actors.event_source import EventSource
from raykv.actors.host_base import be_as_nice_as_others, own_info
from raykv.directory_messages import PublishReply
from raykv.event_messages import EventsOptions, EventsStatus, Tell
from raykv.types import StoreLife

logger = logging.getLogger("raykv")

SILENT_S = 30.0
"""As in `directory`: a store tells something every few seconds."""
LOOK_AROUND_S = 1.0
SIGN_OF_LIFE_S = 1.0

Nodes = Callable[[], Sequence[Mapping[str, Any]]]
"""As in `directory`."""


class EventStream:
    """One per cluster and namespace. Every method may be called from any thread."""

    def __init__(
        self,
        options: EventsOptions,
        nodes: Nodes | None = None,
        *,
        own_process: bool = False,
        silent_s: float = SILENT_S,
        sign_of_life_s: float = SIGN_OF_LIFE_S,
    ) -> None:
        """`nodes` None: only silence tells that a node is gone. A port that is taken is tried again; see `status`."""
        if own_process:
            be_as_nice_as_others()
        self.life = f"{os.getpid()}.{secrets.token_hex(6)}"
        self.options = options
        self.source = EventSource(options.int_hashes)
        self._nodes, self._silent_s = nodes, silent_s
        self._stop = threading.Event()
        self.sockets = EventSockets(options, self.source, sign_of_life_s)
        threading.Thread(target=self._watch, name="raykv-events-watch", daemon=True).start()

    def __repr__(self) -> str:
        return "EventStream()"

    def publish(self, batch: Tell) -> PublishReply:
        """Take what a store says that it holds. Raises ValueError for a batch that can't be read."""
        return PublishReply(self.source.publish(batch))

    def leave(self, node: str, store: str, life: StoreLife) -> None:
        """A store ends in order."""
        self.source.leave(node, store, life)

    def look_at_nodes(self) -> None:
        """Forget stores on dead nodes. May block while the head is away."""
        self.source.forget_nodes(str(node["node_id"]) for node in (self._nodes or tuple)() if not node["alive"])

    def info(self) -> dict[str, Any]:
        """HostInfo as plain values, and what it was set up with: who asks may run another RayKV."""
        options = self.options
        return {**own_info(), "events": self.life, "options": [options.host, options.port, options.int_hashes]}

    def status(self) -> EventsStatus:
        """Figures of this moment."""
        counts, sockets = self.source.counts, self.sockets
        last, stores, blocks, unnamed, kept = self.source.figures()
        return EventsStatus(
            life=self.life,
            pid=os.getpid(),
            address=sockets.addresses[0],
            replay_address=sockets.addresses[1],
            sequence=last,
            stores=stores,
            blocks=blocks,
            unnamed=unnamed,
            kept=kept,
            messages=counts["messages"],
            replays=counts["replays"],
            snapshots=counts["snapshots"],
            problem=sockets.problem,
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the book agrees with itself."""
        self.source.check_integrity()

    def close(self) -> None:
        """End the threads and give the ports back."""
        self._stop.set()
        self.sockets.close()

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_AROUND_S):
            self.source.forget_silent(time.monotonic() - self._silent_s)
            try:
                self.look_at_nodes()
            except Exception as error:  # Ray's head is away: silence still tells
                logger.debug("the cluster's nodes can't be read now: %s", error)
