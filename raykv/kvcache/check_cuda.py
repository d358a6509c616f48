"""Check on a GPU machine that another process can share CUDA memory: `python -m raykv.kvcache.check_cuda`.

Needs this package and torch, nothing else; takes about a minute and 3 GiB of GPU memory. Prints a table
and, as the last line, one JSON object. Exit code: 0 all checks passed, 1 one failed, 2 no GPU. `--device
cpu` runs the checks that mean something on a CPU, to try the script itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from raykv.errors import KVCacheOpenError
from raykv.kvcache.blocks import LayerLayout, read_blocks
from raykv.kvcache.check_tools import environment, expect, expect_error, process, receive
from raykv.kvcache.cuda_ipc import device_uuid, exportable_pool_context
from raykv.kvcache.fence import FenceHandle, new_fence, open_fence
from raykv.kvcache.share import KVCacheHandle, export_kv_caches, open_kv_caches

BLOCKS, BLOCK_ELEMENTS = 512, 512 * 1024  # bfloat16: 1 MiB a block, 0.5 GiB a layer


@dataclass
class Check:
    """One line of the report."""

    name: str
    ok: bool
    seconds: float
    detail: str


def make_caches(device: torch.device, blocks: int) -> dict[str, Any]:
    """Two layers in one storage, and one layer of two tensors."""
    both = torch.zeros((2, blocks, BLOCK_ELEMENTS), dtype=torch.bfloat16, device=device)
    state = [torch.zeros((blocks, 64), device=device), torch.zeros((blocks, 32), device=device)]
    return {"layer.0": both[0], "layer.1": both[1], "layer.2": state}


# --- the other process ---


def mapper(conn: Connection, handle: KVCacheHandle, fence_handle: FenceHandle) -> None:
    """Map the caches, report their content, write into them, read behind the fence, measure."""
    with open_kv_caches(handle) as mapped:
        caches, fence = mapped.kv_caches, open_fence(fence_handle)
        layer = caches["layer.1"]
        assert isinstance(layer, torch.Tensor)
        conn.send([float(t[3].float().mean()) for t in (caches["layer.0"], layer, *caches["layer.2"])])
        layer[5] = 55
        synchronize(layer.device)
        conn.send("written")
        conn.recv()  # the exporter has launched a slow forward and recorded the fence
        fence.wait()
        conn.send(float(layer[7].clone().float().mean()))
        conn.recv()
        conn.send(bandwidths(layer))
        conn.recv()


def opener(conn: Connection, handle: KVCacheHandle) -> None:
    """Only open."""
    with open_kv_caches(handle) as mapped:
        conn.send(sorted(mapped.kv_caches))


def expandable_exporter(conn: Connection, in_pool: bool) -> None:
    """Export memory allocated under expandable segments, in RayKV's pool or not; stay until told."""
    device = torch.device("cuda", 0)
    pool = exportable_pool_context() if in_pool else None
    if in_pool and pool is None:
        raise RuntimeError("exportable_pool_context() gave no pool although expandable segments are on")
    if pool is None:
        caches = make_caches(device, 8)
    else:
        with pool:
            caches = make_caches(device, 8)
    caches["layer.0"].fill_(3)
    with export_kv_caches(caches) as shared:
        conn.send(shared.handle)
        conn.recv()


# --- the checks ---


def check_sharing(device: torch.device) -> Iterator[tuple[str, str]]:
    """Content both ways, order behind a slow forward, and speed, against one mapper."""
    caches = make_caches(device, BLOCKS if device.type == "cuda" else 32)
    caches["layer.0"][3], caches["layer.1"][3] = 10, 11
    caches["layer.2"][0][3], caches["layer.2"][1][3] = 12, 13
    fence = new_fence(device)
    with export_kv_caches(caches) as shared, process(mapper, shared.handle, fence.handle) as (conn, _):
        expect(receive(conn), [10.0, 11.0, 12.0, 13.0])
        yield "the other process reads what the engine wrote", f"{shared.handle.nbytes / 2**30:.2f} GiB"
        expect(receive(conn), "written")
        expect(float(caches["layer.1"][5].float().mean()), 55.0)
        yield "the engine reads what the other process wrote", ""
        started = time.perf_counter()
        if device.type == "cuda":
            torch.cuda._sleep(2_000_000_000)  # cycles: about a second
        caches["layer.1"][7] = 77
        fence.record()
        conn.send("recorded")
        launched = time.perf_counter() - started
        expect(receive(conn), 77.0)
        answered = time.perf_counter() - started
        yield (
            "a read waits for the forward it was fenced behind",
            f"launched {launched:.3f} s, read {answered:.3f} s",
        )
        conn.send("measure")
        speeds = receive(conn)
        yield "speed, GB/s", ", ".join(f"{name} {value:.1f}" for name, value in speeds.items())
        conn.send("done")


def check_errors(device: torch.device) -> Iterator[tuple[str, str]]:
    """What can't work says so, with the fix."""
    with export_kv_caches(make_caches(device, 8)) as shared:
        uuid = device_uuid(device)
        with environment(CUDA_VISIBLE_DEVICES=f"GPU-{uuid}"), process(opener, shared.handle) as (conn, _):
            expect(receive(conn), ["layer.0", "layer.1", "layer.2"])
        yield "open in a process that sees the GPU by UUID alone", uuid
        with environment(CUDA_VISIBLE_DEVICES=""), process(opener, shared.handle) as (conn, _):
            yield (
                "no GPU visible: a clear error",
                expect_error(conn, "KVCacheOpenError", "CUDA_VISIBLE_DEVICES"),
            )
        try:
            open_kv_caches(shared.handle)
        except KVCacheOpenError as error:
            yield "open in the same process: a clear error", str(error)
        else:
            raise AssertionError("CUDA IPC opened memory in its own process")


def check_expandable(_: torch.device) -> Iterator[tuple[str, str]]:
    """Expandable segments: refused with the fix, and shared when RayKV chooses the pool; then kill the
    exporter.
    """
    before = set(os.listdir("/dev/shm"))
    conf = "expandable_segments:True"
    with environment(PYTORCH_CUDA_ALLOC_CONF=conf, PYTORCH_ALLOC_CONF=conf):
        with process(expandable_exporter, False) as (conn, _):
            error = expect_error(conn, "KVCacheExportError", "expandable_segments:True")
            yield "expandable segments: a clear error", error
        with process(expandable_exporter, True) as (conn, exporter):
            handle = receive(conn)
            with open_kv_caches(handle) as mapped:
                expect(float(mapped.kv_caches["layer.0"].float().mean()), 3.0)  # type: ignore[union-attr]
                yield "expandable segments with RayKV's pool: shared", ""
                os.kill(exporter.pid or 0, signal.SIGKILL)
                exporter.join()
    expect(sorted(set(os.listdir("/dev/shm")) - before), [])
    yield "exporter killed: nothing left in /dev/shm", ""
    try:
        open_kv_caches(handle)
    except KVCacheOpenError as error:
        yield "exporter killed: opening is a clear error", str(error)
    else:
        raise AssertionError("opened the memory of a dead process")


def bandwidths(mapped: torch.Tensor) -> dict[str, float]:
    """Copies out of mapped memory beside the same copies out of this process's own."""
    own, target = mapped.clone(), torch.empty_like(mapped)
    host = torch.empty(mapped.shape, dtype=mapped.dtype, pin_memory=mapped.is_cuda)
    ids = torch.randperm(len(mapped), device=mapped.device)
    planes, gathered = LayerLayout.of(mapped, len(mapped)).planes, target.view(torch.uint8)
    return {
        "own to device": speed(lambda: target.copy_(own), own),
        "mapped to device": speed(lambda: target.copy_(mapped), own),
        "own to host": speed(lambda: host.copy_(own, non_blocking=True), own),
        "mapped to host": speed(lambda: host.copy_(mapped, non_blocking=True), own),
        "mapped, shuffled blocks": speed(lambda: read_blocks(planes, ids, gathered), own),
    }


def speed(action: Callable[[], object], moved: torch.Tensor, rounds: int = 5) -> float:
    """GB/s of the best round, after one that warms up."""
    times = []
    for _ in range(rounds + 1):
        synchronize(moved.device)
        started = time.perf_counter()
        action()
        synchronize(moved.device)
        times.append(time.perf_counter() - started)
    return moved.nbytes / min(times[1:]) / 1e9


def synchronize(device: torch.device) -> None:
    """Wait for the device; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run(checks: list[Callable[[torch.device], Iterator[tuple[str, str]]]], device: torch.device) -> list[Check]:
    """Run each group to its end or first failure."""
    results: list[Check] = []
    for group in checks:
        started = time.perf_counter()
        try:
            for name, detail in group(device):
                results.append(Check(name, True, round(time.perf_counter() - started, 3), detail))
                print(f"  ok      {name}  {detail}", flush=True)
                started = time.perf_counter()
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
            results.append(Check(group.__name__, False, round(time.perf_counter() - started, 3), detail))
            print(f"  FAILED  {group.__name__}  {detail}", flush=True)
    return results


def main() -> int:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(prog="python -m raykv.kvcache.check_cuda", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    device = torch.device(parser.parse_args().device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            print(f"No CUDA GPU here that torch {torch.__version__} can use: nothing was checked.")
            return 2
        device = torch.device("cuda", 0)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"Sharing KV memory on {name}, torch {torch.__version__}", flush=True)
    results = run([check_sharing] if device.type == "cpu" else [check_sharing, check_errors, check_expandable], device)
    ok = all(check.ok for check in results)
    print(f"{sum(check.ok for check in results)} of {len(results)} passed")
    report = {"ok": ok, "device": name, "torch": torch.__version__, "cuda": torch.version.cuda}
    print(json.dumps({**report, "checks": [asdict(check) for check in results]}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
