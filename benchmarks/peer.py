"""How fast a store reads blocks out of another node's host tier, beside NIXL alone, between two processes.

    python -m benchmarks.peer [--json] [--mib N] [--rounds N] [--tls LIST]

Each round reads the same number of bytes in blocks of the same size: by NIXL alone (one transfer, memory to memory,
unchecked), as nixl's own `nixl_agent` comes and with progress threads that pause as RayKV's do, and by a store's load:
read, check, copy into the engine's KV cache. Figures are medians; a ratio is that of a round, of a load to NIXL alone.
nixl's own progress threads take a core each, which a machine of two has not: so there are two ratios.
`--tls` is UCX's list of transports: with "tcp" both go through sockets, as between two machines without RDMA.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
BLOCKS = (128 * KIB, 512 * KIB, 2 * MIB)


@dataclass(frozen=True)
class Line:
    """One size of blocks. Speeds in 10^9 bytes a second, medians; `ratios` of load to NIXL, one for each round."""

    block_nbytes: int
    blocks: int
    nixl_gbs: float
    paced_gbs: float
    load_gbs: float
    look_up_ms: float
    ratios: tuple[float, ...]
    paced_ratios: tuple[float, ...]


def width(block_nbytes: int) -> int:
    """Of a KVRank whose blocks have so many bytes: 2 layers x 4 heads x 8 tokens x width floats."""
    return block_nbytes // (2 * 4 * 8 * 4)


def raw_agent(name: str, buffer: Any) -> Any:
    from nixl import nixl_agent

    agent = nixl_agent(name)
    agent.register_memory(buffer)
    return agent


def source(connection: Connection, folder: str, block_nbytes: int, count: int) -> None:
    """The other node: a store that has the blocks, and a plain agent with as much memory."""
    import torch

    from raykv.storage.nixl_transport import NixlTransport
    from raykv.store_messages import Medium, Settle, StoreSpec, TierSpec
    from raykv.types import EngineId
    from tests.support.kv_rank import KVRank, save_job
    from tests.support.peer_stores import Nodes

    torch.set_num_threads(1)
    nodes = Nodes(Path(folder))
    spec = StoreSpec("bench", (TierSpec(Medium.HOST, 2 * (count + 8) * block_nbytes),))
    store = nodes.add("a", spec)
    rank = KVRank(EngineId("a"), blocks=count, width=width(block_nbytes))
    store.attach(rank.attach)
    store.save(store.life, rank.attach.engine, rank.attach.rank, [save_job(1, "p", range(count))])
    store.settle(rank.attach.engine, Settle(commits=(save_job(1, "p", []).job,)))
    buffer = torch.randint(0, 255, (count, block_nbytes), dtype=torch.uint8)
    plain = None
    connection.send("ready")
    while True:
        method, args = connection.recv()
        if method == "close":
            break
        if method == "raw on":  # its progress thread takes a core, so it runs only while it is measured
            plain = raw_agent("raw a", buffer)
            connection.send((plain.get_agent_metadata(), buffer.data_ptr()))
        elif method == "paced on":
            plain = NixlTransport("paced a", [buffer], loopback=True)
            connection.send((plain.metadata, buffer.data_ptr()))
        elif method == "raw off":
            del plain
            plain = None
            connection.send(None)
        else:
            connection.send(getattr(store, method)(*args))
    store.shutdown(remove_host=True)
    rank.close()
    connection.send(None)


class Remote:
    """The other store as a StoreCaller: calls go through a pipe."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def ask(self, method: str, *args: Any) -> Any:
        self.connection.send((method, args))
        return self.connection.recv()

    def submit(self, method: str, *args: Any, done: Any) -> None:
        done(self.ask(method, *args), None)


def raw_read(remote: Remote, block_nbytes: int, count: int, order: list[int], rounds: int) -> list[float]:
    """Seconds for one transfer of all blocks."""
    import torch

    metadata, base = remote.ask("raw on")
    buffer = torch.zeros((count, block_nbytes), dtype=torch.uint8)
    agent = raw_agent("raw b", buffer)
    peer = agent.add_remote_agent(metadata)
    here = agent.get_xfer_descs([(buffer.data_ptr() + i * block_nbytes, block_nbytes, 0) for i in range(count)], "DRAM")
    there = agent.get_xfer_descs([(base + i * block_nbytes, block_nbytes, 0) for i in order], "DRAM")
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        handle = agent.initialize_xfer("READ", here, there, peer)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        taken.append(time.perf_counter() - started)
        assert state == "DONE", state
        agent.release_xfer_handle(handle)
    agent.remove_remote_agent(peer)
    del agent
    remote.ask("raw off")
    return taken


def paced_read(remote: Remote, block_nbytes: int, count: int, order: list[int], rounds: int) -> list[float]:
    """The same by agents whose progress threads pause."""
    import torch

    from raykv.storage.nixl_transport import NixlTransport, TransferState

    metadata, base = remote.ask("paced on")
    buffer = torch.zeros((count, block_nbytes), dtype=torch.uint8)
    transport = NixlTransport("paced b", [buffer], loopback=True)
    transport.know("a", metadata)
    pairs = [(base + j * block_nbytes, buffer.data_ptr() + i * block_nbytes, block_nbytes) for i, j in enumerate(order)]
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        transfer = transport.read("a", pairs)
        while transfer.poll() is TransferState.RUNNING:
            pass
        taken.append(time.perf_counter() - started)
        assert transfer.poll() is TransferState.DONE, transfer.error
    transport.close()
    remote.ask("raw off")
    return taken


def measure(block_nbytes: int, nbytes: int, rounds: int) -> Line:
    import random

    import torch

    from raykv.store_messages import Medium, Settle, StoreSpec, TierSpec
    from tests.support.kv_rank import E, KVRank, load_job, look_up
    from tests.support.peer_stores import Nodes, find

    torch.set_num_threads(1)
    count = nbytes // block_nbytes
    context = multiprocessing.get_context("spawn")
    mine, others = context.Pipe()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        process = context.Process(target=source, args=(others, folder, block_nbytes, count))
        process.start()
        assert mine.recv() == "ready"
        remote = Remote(mine)
        nodes = Nodes(Path(folder))
        store = nodes.add("b", StoreSpec("bench", (TierSpec(Medium.HOST, 2 * (count + 8) * block_nbytes),)))
        nodes.callers["a"] = remote  # type: ignore[assignment]
        rank = KVRank(E, blocks=count, width=width(block_nbytes))
        store.attach(rank.attach)
        order = random.Random(0).sample(range(count), count)
        raws, paced, loads, looks = [], [], [], []
        for round_ in range(rounds + 1):
            raw = min(raw_read(remote, block_nbytes, count, order, 3))
            slow = min(paced_read(remote, block_nbytes, count, order, 3))
            times = []
            for _ in range(3):
                started = time.perf_counter()
                found = find(store, E, look_up("p", count))
                looked = time.perf_counter() - started
                assert found.media == (Medium.PEER,) * count, found.media[:3]
                _, (done,) = store.load(store.life, E, rank.attach.rank, [load_job(round_, found.lease, order)])
                assert done.ok, done.error
                times.append(done.seconds)
                store.settle(E, Settle(releases=(found.lease,) if found.lease is not None else ()))
                store.clear()
            if round_:  # the first one is for page faults and connections
                raws.append(raw)
                paced.append(slow)
                loads.append(min(times))
                looks.append(looked)
        store.shutdown(remove_host=True)
        rank.close()
        remote.ask("close")
        process.join()
    total = count * block_nbytes / 1e9
    return Line(
        block_nbytes,
        count,
        total / median(raws),
        total / median(paced),
        total / median(loads),
        1e3 * median(looks),
        tuple(one / load for one, load in zip(raws, loads, strict=True)),
        tuple(one / load for one, load in zip(paced, loads, strict=True)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mib", type=int, default=128, help="bytes of a read, in MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tls", help="UCX_TLS for both processes")
    parser.add_argument("--kib", type=int, nargs="*", help="sizes of blocks in KiB")
    options = parser.parse_args()
    os.environ["UCX_NET_DEVICES"] = "lo"
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    if options.tls:
        os.environ["UCX_TLS"] = options.tls
    sizes = [kib * KIB for kib in options.kib] if options.kib else BLOCKS
    lines = [measure(size, options.mib * MIB, options.rounds) for size in sizes]
    if options.json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
        return
    print("    block  blocks  NIXL GB/s  ratio (lowest)  paced GB/s  ratio (lowest)  load GB/s  look-up ms")
    for line in lines:
        print(
            f"{line.block_nbytes // KIB:>5} KiB  {line.blocks:>6}  {line.nixl_gbs:>9.2f}  {median(line.ratios):>5.2f} "
            f"({min(line.ratios):.2f})   {line.paced_gbs:>10.2f}  {median(line.paced_ratios):>5.2f} "
            f"({min(line.paced_ratios):.2f})   {line.load_gbs:>9.2f}  {line.look_up_ms:>10.2f}"
        )


if __name__ == "__main__":
    main()
