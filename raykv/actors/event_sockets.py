"""The sockets of the event stream, and the one thread that has them: PUB for what happens, ROUTER for what was missed.

Bounded: a reader who is too slow loses messages, sees it by their numbers, and asks; one who takes nothing of what he
asked for is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from raykv.actors import event_wire
from raykv.actors.event_source import EventSource
from raykv.core.event_log import Numbered
from raykv.event_messages import EventsOptions

logger = logging.getLogger("raykv")

BIND_AGAIN_S = 1.0
QUEUED = 10_000
"""Messages that wait for a reader who is slower than they come; what is more he loses."""
REPLAY_QUEUED = 100
AT_ONCE = 50
"""Messages of one replay before the next one has its turn."""
READERS = 16
"""Replays at once; who comes then gets the end at once, and asks again."""
STALLED_S = 20.0
"""A reader who takes nothing of his replay for so long is gone."""
WAIT_S = 0.02
"""Until what found no room is tried again."""
_NUMBER_NBYTES = 8


@dataclass(slots=True)
class _Replay:
    """What one reader is being sent; `ready` was to be sent and found no room."""

    messages: Iterator[Numbered]
    moved: float
    ready: Numbered | None = None


class EventSockets:
    """Open from its making to `close`. A port that is taken is tried again; `problem` says so meanwhile."""

    def __init__(self, options: EventsOptions, source: EventSource, sign_of_life_s: float) -> None:
        self._options, self._source, self._sign_of_life_s = options, source, sign_of_life_s
        self.problem = "it does not listen yet"
        self.addresses = ("", "")
        self.listening = threading.Event()
        self._replays: dict[bytes, _Replay] = {}
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waking = threading.Lock()
        self._stop = threading.Event()
        source.wake = self._wake
        self._thread = threading.Thread(target=self._serve, name="raykv-events-sockets", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the ports back."""
        self._stop.set()
        self._wake()
        self._thread.join(5.0)

    def _wake(self) -> None:
        with self._waking:  # the number of a file that is closed may be another's
            if self._waker >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_write(self._waker, 1)

    def _serve(self) -> None:
        context = zmq.Context()
        try:
            while not self._stop.is_set():
                with context.socket(zmq.PUB) as pub, context.socket(zmq.ROUTER) as router:
                    if self._bind(pub, router):
                        self._run(pub, router)
                    else:
                        self._stop.wait(BIND_AGAIN_S)
        except Exception as error:
            logger.exception("the event stream has ended")
            self.problem = f"it has ended by {type(error).__name__}: {error}"
        finally:
            context.destroy(linger=0)
            with self._waking:
                os.close(self._waker)
                self._waker = -1

    def _bind(self, pub: zmq.Socket[bytes], router: zmq.Socket[bytes]) -> bool:
        host, port = self._options.host, self._options.port
        for socket in (pub, router):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, int(":" in host))
        pub.set_hwm(QUEUED)
        router.set_hwm(REPLAY_QUEUED)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else what finds no room is dropped without a word
        address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        try:
            pub.bind(f"{address}:{port}")
            router.bind(f"{address}:{port + 1 if port else 0}")
        except zmq.ZMQError as error:
            self.problem = f"ports {port} and {port + 1} of {host} can't be had: {error}"
            return False
        self.addresses = (pub.getsockopt_string(zmq.LAST_ENDPOINT), router.getsockopt_string(zmq.LAST_ENDPOINT))
        self.problem = ""
        self.listening.set()
        return True

    def _run(self, pub: zmq.Socket[bytes], router: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(self._waker, zmq.POLLIN)
        sent = self._source.last
        while not self._stop.is_set():
            while (message := self._source.after(sent)) is not None:
                sent = message.number
                pub.send_multipart((message.topic, _number(message), message.payload))
            ready = dict(poller.poll((WAIT_S if self._replays else self._sign_of_life_s) * 1000))
            if self._waker in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._waker)
            if router in ready:
                self._asked(router)
            for reader in list(self._replays):
                self._send(router, reader)
            self._source.sign_of_life(self._sign_of_life_s)

    def _asked(self, router: zmq.Socket[bytes]) -> None:
        """Readers want all from a number on."""
        while True:
            try:
                frames = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or len(frames[2]) != _NUMBER_NBYTES:
                logger.debug("the event stream was asked for something that is no number of 8 bytes")
                continue
            room = len(self._replays) < READERS
            messages = self._source.replay(int.from_bytes(frames[2], "big")) if room else iter(())
            self._replays[frames[0]] = _Replay(messages, time.monotonic())

    def _send(self, router: zmq.Socket[bytes], reader: bytes) -> None:
        """As much of a replay as the reader takes, or AT_ONCE."""
        replay = self._replays[reader]
        now = time.monotonic()
        for _ in range(AT_ONCE):
            message = replay.ready or next(replay.messages, None)
            try:
                if message is None:
                    router.send_multipart((reader, b"", b"", event_wire.END, b""), zmq.NOBLOCK)
                    del self._replays[reader]
                    return
                router.send_multipart((reader, b"", message.topic, _number(message), message.payload), zmq.NOBLOCK)
            except zmq.Again:
                replay.ready = message
                if now - replay.moved > STALLED_S:
                    del self._replays[reader]
                return
            except zmq.ZMQError:  # the reader is gone
                del self._replays[reader]
                return
            replay.ready, replay.moved = None, now


def _number(message: Numbered) -> bytes:
    return message.number.to_bytes(_NUMBER_NBYTES, "big")
