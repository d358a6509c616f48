"""What of the CUDA half can be checked without a GPU. With one, the check script is the test."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raykv.errors import KVCacheExportError, KVCacheOpenError
from raykv.kvcache import cuda_ipc
from raykv.kvcache.fence import CpuFence, FenceHandle, new_fence, open_fence
from raykv.kvcache.handles import CudaStorageHandle, Origin

pytestmark = pytest.mark.process

HAS_GPU = torch.cuda.is_available()
HANDLE = CudaStorageHandle("1234-uuid", b"\2c" + bytes(64), 8, 0, b"/torch_1_2_3", 0, bytes(64), True)


def check(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "raykv.kvcache.check_cuda", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_the_check_passes_on_this_gpu_or_says_in_one_line_that_there_is_none():
    result = check()
    if HAS_GPU:
        assert result.returncode == 0, result.stdout + result.stderr
        return
    assert result.returncode == 2
    assert result.stdout.startswith("No CUDA GPU here") and result.stdout.count("\n") == 1
    assert result.stderr == ""


def test_the_check_itself_runs_on_a_cpu():
    result = check("--device", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["ok"] and len(report["checks"]) == 4


def test_fences_on_a_cpu_do_nothing_and_travel():
    fence = new_fence(torch.device("cpu"))
    fence.record()
    mapped = open_fence(pickle.loads(pickle.dumps(fence.handle)))
    assert isinstance(mapped, CpuFence)
    mapped.wait()
    mapped.synchronize()


def test_opening_gpu_memory_or_fences_without_a_gpu_says_how_to_see_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elsewhere = replace(Origin.here(), pid=1)
    for attempt in (
        lambda: cuda_ipc.open_cuda(HANDLE, elsewhere),
        lambda: open_fence(FenceHandle("1234-uuid", b"x")),
    ):
        with pytest.raises(KVCacheOpenError, match="CUDA_VISIBLE_DEVICES=GPU-1234-uuid"):
            attempt()


def test_opening_in_the_exporting_process_is_an_error():
    with pytest.raises(KVCacheOpenError, match="process that exports"):
        cuda_ipc.open_cuda(HANDLE, Origin.here())


def test_a_gpu_under_another_index_is_found_by_uuid(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(cuda_ipc, "device_uuid", lambda index: f"uuid-{index}")
    assert cuda_ipc.local_device_index("uuid-2") == 2
    with pytest.raises(KVCacheOpenError, match=r"GPU-uuid-9.*visible are uuid-0, uuid-1, uuid-2.*MIG"):
        cuda_ipc.local_device_index("uuid-9")


class FakeStorage:
    device = None

    def __init__(self, outcome):
        self.outcome = outcome

    def _share_cuda_(self):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


SHARED = (0, b"\2c" + bytes(64), 8, 0, b"/torch_1_2_3", 0, bytes(64), True)


@pytest.mark.parametrize(
    ("outcome", "conf", "fix"),
    [
        (
            RuntimeError("CUDA error: invalid argument\nmore"),
            "",
            r"\(CUDA error: invalid argument\).*sleep-mode",
        ),
        (RuntimeError("invalid"), "a:1,expandable_segments:True", "Take `expandable_segments:True` out"),
        ((0, b"\2e" + bytes(9), *SHARED[2:]), "", "Take `expandable_segments:True` out"),
        (RuntimeError("tensor received from another process"), "", "process that allocated it"),
        ((0, None, *SHARED[2:]), "", "no memory yet"),
    ],
)
def test_memory_that_cannot_be_exported_names_the_fix(monkeypatch, outcome, conf, fix):
    monkeypatch.setattr(cuda_ipc, "_allocator_conf", lambda: conf)
    monkeypatch.setattr(cuda_ipc, "device_uuid", lambda _: "uuid")
    with pytest.raises(KVCacheExportError, match=fix):
        cuda_ipc.export_cuda(FakeStorage(outcome))


def test_an_export_carries_all_that_torch_gave(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "device_uuid", lambda _: "1234-uuid")
    assert cuda_ipc.export_cuda(FakeStorage(SHARED)) == HANDLE


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"boot_id": "x"}, "another machine"),
        ({"ipc_namespace": "x"}, "--ipc=host"),
        ({"pid": 2**22 + 1}, "has ended"),
        ({}, "same driver"),
    ],
)
def test_memory_that_cannot_be_opened_names_the_fix(changes, fix):
    origin = replace(Origin.here(), **changes)
    assert fix in cuda_ipc._why_not_opened(RuntimeError("CUDA error"), origin)


def test_no_pool_is_needed_on_a_cpu():
    if not HAS_GPU:
        assert cuda_ipc.exportable_pool_context(force=True) is None


def test_switching_expandable_segments_off_keeps_every_other_option(monkeypatch):
    conf = "max_split_size_mb:64, expandable_segments:True,garbage_collection_threshold:0.8"
    assert (
        cuda_ipc._without_expandable(conf)
        == "max_split_size_mb:64,garbage_collection_threshold:0.8,expandable_segments:False"
    )
    monkeypatch.setattr(cuda_ipc, "_allocator_conf", lambda: conf)
    assert cuda_ipc.expandable_segments_on()
    monkeypatch.setattr(cuda_ipc, "_allocator_conf", lambda: "expandable_segments:False")
    assert not cuda_ipc.expandable_segments_on()


def test_counter_files_of_a_killed_engine_are_swept_and_nobody_elses():
    dead = subprocess.Popen(["true"])
    dead.wait()
    files = {pid: Path(f"/dev/shm/torch_{pid}_raykvtest_0") for pid in (dead.pid, os.getpid())}
    for pid, file in files.items():
        file.touch()
        cuda_ipc.sweep_after_death(
            [replace(HANDLE, ref_counter=f"/{file.name}".encode())], replace(Origin.here(), pid=pid)
        )
    left = {pid for pid, file in files.items() if file.exists()}
    files[os.getpid()].unlink()
    assert left == {os.getpid()}
