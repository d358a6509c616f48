"""Reads between two processes by real NIXL, over shared memory and sockets, of peers that stop, die and come back; by
agents with a progress thread of their own and without."""

from __future__ import annotations

import builtins
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from raykv.storage.nixl_transport import NixlTransport, Transfer, TransferState, TransportError
from tests.support.waiting import eventually

pytestmark = pytest.mark.process

ROW, ROWS = 64 << 10, 256
PATIENCE = 30.0
SHM, TCP = "shm,tcp,self", "tcp,self"


def rows(seed: int) -> torch.Tensor:
    return torch.randint(0, 255, (ROWS, ROW), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def lender(connection: Connection, name: str, seed: int) -> None:
    """A process with memory to be read. It does nothing for it."""
    memory = rows(seed)
    transport = NixlTransport(name, [memory], loopback=True)
    connection.send((transport.metadata, memory.data_ptr()))
    connection.recv()


class Lender:
    def __init__(self, name: str = "a", seed: int = 1) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=lender, args=(other, name, seed))
        self.process.start()
        other.close()
        assert self.pipe.poll(PATIENCE)
        self.metadata, self.base = self.pipe.recv()
        self.memory = rows(seed)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)


class World:
    """The borrower is this process."""

    def __init__(self, progress: bool) -> None:
        self.lenders: list[Lender] = []
        self.memory = torch.zeros((ROWS, ROW), dtype=torch.uint8)
        name = f"borrower {os.getpid()} {time.monotonic_ns()}"
        self.transport = NixlTransport(name, [self.memory], loopback=True, progress=progress)

    def lender(self, **options: Any) -> Lender:
        self.lenders.append(Lender(**options))
        return self.lenders[-1]

    def read(self, lender: Lender, peer: str, numbers: range = range(ROWS)) -> Transfer:
        """Row i of the lender into row i here, from the last one on."""
        base = self.memory.data_ptr()
        pairs = [(lender.base + i * ROW, base + i * ROW, ROW) for i in reversed(numbers)]
        return self.transport.read(peer, pairs)

    def close(self) -> None:
        self.transport.close()
        for one in self.lenders:
            one.close()


@pytest.fixture(params=[False, True], ids=["polled", "with a thread"])
def progress(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(params=[SHM, TCP])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, progress: bool) -> Iterator[World]:
    yield from a_world(request.param, monkeypatch, progress)


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch, progress: bool) -> Iterator[World]:
    yield from a_world(TCP, monkeypatch, progress)


def a_world(tls: str, monkeypatch: pytest.MonkeyPatch, progress: bool) -> Iterator[World]:
    monkeypatch.setenv("UCX_TLS", tls)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    made = World(progress)
    try:
        yield made
    finally:
        made.close()


def ended(transfer: Transfer) -> TransferState:
    eventually(lambda: transfer.poll() is not TransferState.RUNNING)
    return transfer.poll()


def test_it_reads_what_is_there_and_nothing_else(world: World) -> None:
    a = world.lender()
    world.transport.know("a", a.metadata)
    assert ended(world.read(a, "a", range(0, 100))) is TransferState.DONE
    assert torch.equal(world.memory[:100], a.memory[:100])
    assert not world.memory[100:].any()


def test_several_reads_at_once(world: World) -> None:
    a, b = world.lender(), world.lender(name="b", seed=2)
    world.transport.know("a", a.metadata)
    world.transport.know("b", b.metadata)
    reads = [world.read((a, b)[i % 2], "ab"[i % 2], range(8 * i, 8 * i + 8)) for i in range(16)]
    assert {ended(one) for one in reads} == {TransferState.DONE}
    for i in range(16):
        assert torch.equal(world.memory[8 * i : 8 * i + 8], (a, b)[i % 2].memory[8 * i : 8 * i + 8])


def test_a_dead_peer_fails_and_is_forgotten(world: World) -> None:
    a = world.lender()
    world.transport.know("a", a.metadata)
    assert ended(world.read(a, "a", range(1))) is TransferState.DONE
    a.close()
    try:
        transfer = world.read(a, "a")
        assert ended(transfer) is TransferState.FAILED and transfer.error
    except TransportError:
        pass  # it was noticed before
    assert not world.transport.knows("a")
    with pytest.raises(TransportError, match="not known"):
        world.read(a, "a")
    again = world.lender(name="a again", seed=3)
    world.transport.know("a", again.metadata)
    assert ended(world.read(again, "a")) is TransferState.DONE
    assert torch.equal(world.memory, again.memory)


def test_a_stopped_peer_keeps_a_read_under_way_until_it_goes_on(over_tcp: World) -> None:
    """It writes when the peer goes on, so to give its memory away before would have been wrong."""
    world = over_tcp
    a = world.lender()
    world.transport.know("a", a.metadata)
    assert ended(world.read(a, "a", range(1))) is TransferState.DONE
    a.signal(signal.SIGSTOP)
    transfer = world.read(a, "a")
    for _ in range(100):
        assert transfer.poll() is TransferState.RUNNING
        time.sleep(0.001)
    world.transport.forget("a")
    with pytest.raises(TransportError):
        world.read(a, "a")
    with pytest.raises(TransportError, match="not ended"):
        world.transport.know("a", a.metadata)
    a.signal(signal.SIGCONT)
    assert ended(transfer) is TransferState.DONE
    assert torch.equal(world.memory, a.memory)
    world.transport.know("a", a.metadata)


def test_a_stopped_peer_that_is_killed_ends_it(over_tcp: World) -> None:
    world = over_tcp
    a = world.lender()
    world.transport.know("a", a.metadata)
    assert ended(world.read(a, "a", range(1))) is TransferState.DONE
    a.signal(signal.SIGSTOP)
    transfer = world.read(a, "a")
    assert transfer.poll() is TransferState.RUNNING
    a.close()
    assert ended(transfer) is TransferState.FAILED
    before = world.memory.clone()
    time.sleep(0.05)
    assert torch.equal(world.memory, before)


def test_it_closes_with_a_read_under_way(over_tcp: World) -> None:
    world = over_tcp
    a = world.lender()
    world.transport.know("a", a.metadata)
    assert ended(world.read(a, "a", range(1))) is TransferState.DONE
    a.signal(signal.SIGSTOP)
    transfer = world.read(a, "a")
    assert transfer.poll() is TransferState.RUNNING
    world.transport.close()
    assert transfer.poll() is TransferState.FAILED
    world.memory.zero_()
    a.signal(signal.SIGCONT)
    time.sleep(0.2)
    assert not world.memory.any(), "nobody writes any more"


def test_what_is_no_peer_is_refused(world: World) -> None:
    with pytest.raises(TransportError):
        world.transport.know("a", b"something else")
    a = world.lender()
    a.close()
    with pytest.raises(TransportError):
        world.transport.know("a", a.metadata)
        assert ended(world.read(a, "a")) is TransferState.FAILED
        world.read(a, "a")


def test_it_listens_on_loopback_only(world: World) -> None:
    """Nobody but this machine reaches it."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as file:
            fields = [line.split() for line in file][1:]
        listening += [one[1] for one in fields if one[3] == "0A" and one[9] in inodes]
    assert listening
    assert all(address.startswith("0100007F:") for address in listening)


def test_an_agent_that_is_polled_has_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would spin on UCX's lock while a read begins, which over shared memory is the copy."""
    monkeypatch.setenv("UCX_TLS", SHM)
    first = NixlTransport("first", [], loopback=True)  # with UCX's own thread, one a process
    before = len(os.listdir("/proc/self/task"))
    polled = NixlTransport("polled", [], loopback=True, progress=False)
    assert len(os.listdir("/proc/self/task")) == before
    other = NixlTransport("with a thread", [], loopback=True)
    assert len(os.listdir("/proc/self/task")) > before
    for one in (first, polled, other):
        one.close()


def test_without_nixl_the_error_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **options: Any) -> Any:
        if name == "nixl":
            raise ModuleNotFoundError("No module named 'nixl'")
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    monkeypatch.delitem(sys.modules, "nixl", raising=False)
    with pytest.raises(TransportError, match=r"raykv\[nixl\]"):
        NixlTransport("x", [], loopback=True)
