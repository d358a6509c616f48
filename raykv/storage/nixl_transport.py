"""Reads of other processes' memory by NIXL, over UCX: what of nixl's API is used here, and nothing else of it.

What was found out about nixl 1.5 (CPU memory, two processes on one machine), and is kept here:

- A transfer that was released, or whose agent was told to forget the peer, still writes into its target when a
  stopped peer goes on. So a transfer is over only when NIXL itself says that it ended, well or with an error; until
  then its target belongs to it. Nothing here ends one earlier, and `close` ends the agent with all that it has.
- To forget a peer that has transfers under way takes the process down. A peer is forgotten behind its last one.
- Without a progress thread at the source, reads over TCP never end, and no first connection is made. With one and no
  delay a core is taken, idle or not. With `PROGRESS_US` between its rounds it takes 1 % of a core while idle, and
  reads are as fast: the reader makes its own progress when it asks for the state.
- The reader needs no such thread, and is better without: over shared memory the call that begins a read is the copy,
  and a progress thread that wakes up meanwhile spins on UCX's lock until it is done; over TCP it does again
  what polls do. So who lends and reads has an agent for each.
- All calls give up the GIL.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from raykv.errors import StorageError

logger = logging.getLogger("raykv")

PROGRESS_US = 1000
MISSING = (
    "The peer tier needs NIXL, and it can't be used here ({why}). Install it beside raykv on every node (pip install "
    '\'raykv[nixl]\'), or take the entry {{"medium": "peer"}} out of `tiers`.'
)


class TransportError(StorageError):
    """A peer can't be reached, or not by this transport."""


class TransferState(enum.Enum):
    """RUNNING: it writes into its target. DONE: all bytes are there. FAILED: it has ended, with some or no bytes."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


Pair = tuple[int, int, int]
"""An address at the peer, one in a region of this process, and how many bytes."""


class Transfer:
    """One read. Any thread, one at a time."""

    def __init__(self, transport: NixlTransport, handle: int, ended: Callable[[bool], None]) -> None:
        self._transport, self._handle, self._ended = transport, handle, ended
        self._state = TransferState.RUNNING
        self.error = ""

    def begin(self) -> None:
        """Small ones, and those over shared memory, have ended when this returns."""
        self._take(lambda agent: agent.postXferReq(self._handle, b""))

    def poll(self) -> TransferState:
        """Make progress, and say what is known. Microseconds."""
        if self._state is TransferState.RUNNING:
            self._take(lambda agent: agent.getXferStatus(self._handle))
        return self._state

    def _take(self, ask: Callable[[Any], Any]) -> None:
        agent, nixl = self._transport.agent, self._transport.nixl
        if agent is None:
            self._state, self.error = TransferState.FAILED, "the transport was closed"
            return
        try:
            status = ask(agent)
        except Exception as error:  # NIXL has one class for each status that is an error
            self.error = str(error)
            self._end(agent, TransferState.FAILED)
            return
        if status == nixl.NIXL_SUCCESS:
            self._end(agent, TransferState.DONE)
        elif status != nixl.NIXL_IN_PROG:
            self.error = str(status)
            self._end(agent, TransferState.FAILED)

    def _end(self, agent: Any, state: TransferState) -> None:
        self._state = state
        try:
            agent.releaseXferReq(self._handle)
        except Exception as error:
            logger.warning("NIXL does not let go of a transfer that has ended: %s", error)
        self._ended(state is TransferState.DONE)


class _Peer:
    """A remote agent as NIXL knows it. `flying`: transfers that have not ended. `over`: forget it behind them."""

    def __init__(self, agent: str, metadata: bytes) -> None:
        self.agent, self.metadata, self.flying, self.over = agent, metadata, 0, False


class NixlTransport:
    """One agent. Its `regions` (uint8 tensors in CPU memory) are what it reads into, and what peers may read.

    Any thread. Whoever ends a region closes the transport first.
    """

    def __init__(self, name: str, regions: Sequence[torch.Tensor], loopback: bool, progress: bool = True) -> None:
        """`name` is unique in the cluster. `loopback`: listen on 127.0.0.1 only. `progress`: with a progress thread,
        which peers need to read here; without one a transfer goes on while one is polled. Raises TransportError with
        the fix."""
        if loopback:
            # Read when the agent is made. Who has chosen a device himself keeps it.
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        self.progress = progress
        self.nixl = _import_nixl()
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        try:
            self.agent: Any = self.nixl.nixlAgent(name, self._config())
            self.agent.createBackend("UCX", {})
            if regions:  # NIXL takes an empty list for an error
                self.agent.registerMem(self._described([(one.data_ptr(), one.nbytes) for one in regions]), [])
            self.metadata = bytes(self.agent.getLocalMD())
        except Exception as error:
            raise TransportError(MISSING.format(why=f"{type(error).__name__}: {error}")) from error

    def _config(self) -> Any:
        config = self.nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = self.progress, PROGRESS_US
        config.useListenThread = config.captureTelemetry = False
        config.syncMode = self.nixl.NIXL_THREAD_SYNC_STRICT
        return config

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        """More memory (addresses, bytes) that is read into, and that peers may read. `metadata` is another then. Raises
        TransportError, and none of it is registered."""
        try:
            self.agent.registerMem(self._described(regions), [])
            self.metadata = bytes(self.agent.getLocalMD())
        except Exception as error:
            raise TransportError(f"NIXL can't register more memory: {error}") from error

    def unregister(self, regions: Sequence[tuple[int, int]]) -> None:
        """These, as they were registered, are no region any more. No transfer of this process may go there; a peer
        that reads there gets an error, or bytes that are not what they were said to be."""
        for region in regions:
            try:
                self.agent.deregisterMem(self._described([region]), [])
            except Exception as error:
                raise TransportError(f"NIXL does not let go of memory: {error}") from error
        self.metadata = bytes(self.agent.getLocalMD())

    def _described(self, regions: Sequence[tuple[int, int]]) -> Any:
        return self.nixl.nixlRegDList(self.nixl.DRAM_SEG, [(address, nbytes, 0, "") for address, nbytes in regions])

    def know(self, peer: str, metadata: bytes) -> None:
        """Make a peer's agent known, under a name of the caller's; again, if its memory has changed since. Raises
        TransportError if it can't be reached."""
        with self._lock:
            known = self._peers.get(peer)
            if known is not None and not known.over:
                if known.metadata != metadata:
                    try:
                        self.agent.loadRemoteMD(metadata)
                    except Exception as error:
                        raise TransportError(f"The memory of {peer} has changed, and NIXL fails: {error}") from error
                    known.metadata = metadata
                return
            if known is not None and known.flying:
                raise TransportError(f"Reads from {peer} that failed have not ended yet.")
            try:
                name = self.agent.loadRemoteMD(metadata)
            except Exception as error:
                raise TransportError(f"{peer} can't be reached by NIXL: {error}") from error
            self._peers[peer] = _Peer(name.decode() if isinstance(name, bytes) else str(name), metadata)

    def knows(self, peer: str) -> bool:
        with self._lock:
            known = self._peers.get(peer)
            return known is not None and not known.over

    def forget(self, peer: str) -> None:
        """It is read no more. What is under way goes on."""
        with self._lock:
            known = self._peers.get(peer)
            if known is not None:
                known.over = True
                self._drop(peer, known)

    def _drop(self, peer: str, known: _Peer) -> None:
        if known.over and not known.flying and self._peers.get(peer) is known:
            del self._peers[peer]
            try:
                self.agent.invalidateRemoteMD(known.agent)
            except Exception as error:
                logger.debug("NIXL does not forget %s: %s", peer, error)

    def read(self, peer: str, pairs: Sequence[Pair]) -> Transfer:
        """Begin to read. Raises TransportError where nothing has begun. A peer that fails once is forgotten."""
        nixl, segment = self.nixl, self.nixl.DRAM_SEG
        with self._lock:
            known = self._peers.get(peer)
            if known is None or known.over:
                raise TransportError(f"{peer} is not known to NIXL here.")
            known.flying += 1

        def ended(well: bool) -> None:
            with self._lock:
                known.flying -= 1
                known.over |= not well
                self._drop(peer, known)

        try:
            here = nixl.nixlXferDList(segment, [(local, nbytes, 0) for _, local, nbytes in pairs])
            there = nixl.nixlXferDList(segment, [(remote, nbytes, 0) for remote, _, nbytes in pairs])
            handle = self.agent.createXferReq(nixl.NIXL_READ, here, there, known.agent, b"", [])
        except Exception as error:
            ended(False)
            raise TransportError(f"A read from {peer} can't begin: {error}") from error
        transfer = Transfer(self, handle, ended)
        transfer.begin()
        return transfer

    def close(self) -> None:
        """End the agent, whatever is under way: after this nothing is written, nor read by anybody. No call may run."""
        with self._lock:
            self._peers.clear()
            self.agent = None


def _import_nixl() -> Any:
    try:
        import nixl

        return nixl if hasattr(nixl, "nixlAgent") else nixl._bindings
    except Exception as error:  # a missing package, or a library of it
        raise TransportError(MISSING.format(why=str(error))) from error
