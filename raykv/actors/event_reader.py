"""How to read the event stream: all of it, in order, whatever is lost on the way. For tests, tools and as an example.

Subscribe first, then ask for a replay from 0, which is a snapshot. Of what was published, go on with the number behind
the last one; drop what is older; where one is missing ask for a replay from there. A replay is taken as it comes: if it
is no longer kept, it is a snapshot again, which begins by clearing everything.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import zmq

from raykv.actors.event_wire import END, TOPIC
from raykv.errors import RayKVError

ANSWER_S = 5.0


class EventsSilent(RayKVError):
    """Nothing came in time."""


class Told(NamedTuple):
    """A message: `payload` is vLLM's KVEventBatch in msgpack."""

    number: int
    topic: str
    payload: bytes


class EventReader:
    """One thread. Use as a context manager."""

    def __init__(self, address: str, replay_address: str) -> None:
        self._context = zmq.Context()
        self._replay_address = replay_address
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        self._sub.connect(address)
        self._replay: zmq.Socket[bytes] | None = None
        self._held: Told | None = None  # published, with one missing before it
        self.last = -1
        """The number of the last message; -1: none yet."""
        self.replays = 0
        self._asked_at = 0.0
        self._ask()

    def __enter__(self) -> EventReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def next(self, timeout: float) -> Told:
        """The next message. Raises EventsSilent after `timeout` seconds without one."""
        deadline = time.monotonic() + timeout
        while True:
            told = self._replayed(deadline) if self._replay is not None else self._published(deadline)
            if told is not None:
                self.last = told.number
                return told
            if time.monotonic() >= deadline:
                raise EventsSilent(f"nothing was published for {timeout:g} s behind number {self.last}")

    def _ask(self) -> None:
        """With a socket of its own, so that nothing of an earlier answer gets in between."""
        if self._replay is not None:
            self._replay.close(linger=0)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(self._replay_address)
        self._replay.send_multipart((b"", (self.last + 1).to_bytes(8, "big")))
        self._asked_at = time.monotonic()
        self.replays += 1

    def _replayed(self, deadline: float) -> Told | None:
        assert self._replay is not None
        if not self._replay.poll(_ms(min(deadline, self._asked_at + ANSWER_S))):
            if time.monotonic() > self._asked_at + ANSWER_S:
                self._ask()
            return None
        _, topic, number, payload = self._replay.recv_multipart()
        self._asked_at = time.monotonic()
        if number != END:
            return Told(int.from_bytes(number, "big"), topic.decode(), payload)
        self._replay.close(linger=0)
        self._replay = None
        if self.last < 0:  # it was too busy
            self._ask()
        return None

    def _published(self, deadline: float) -> Told | None:
        told, self._held = self._held, None
        if told is None:
            if not self._sub.poll(_ms(deadline)):
                return None
            topic, number, payload = self._sub.recv_multipart()
            told = Told(int.from_bytes(number, "big"), topic.decode(), payload)
        if told.number <= self.last:
            return None
        if told.number == self.last + 1:
            return told
        self._held = told
        self._ask()
        return None


def _ms(deadline: float) -> int:
    return max(0, int((deadline - time.monotonic()) * 1000) + 1)
