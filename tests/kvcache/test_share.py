import os
import pickle
import shutil
import stat
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raykv.errors import KVCacheExportError, KVCacheOpenError
from raykv.kvcache.share import export_kv_caches, open_kv_caches

pytestmark = pytest.mark.process


def vllm_like():
    """Views as vLLM hands them over: one storage for two layers, interleaved layers, mamba's list."""
    both = torch.zeros(2, 16, 2, 8, 32, dtype=torch.bfloat16)
    interleaved = torch.zeros(16, 2, 8, 2, 32).permute(1, 0, 3, 2, 4)  # [layers, blocks, heads, tokens, ...]
    state = torch.zeros(16 * 100, dtype=torch.int8)
    mamba = [state.as_strided((16, 60), (100, 1)), state.as_strided((16, 40), (100, 1), 60)]
    return {"a": both[0], "b": both[1], "c": interleaved[0], "d": interleaved[1], "mamba": mamba}


def flat(kv_caches):
    return [t for v in kv_caches.values() for t in (v if isinstance(v, list) else [v])]


def test_another_process_sees_the_same_memory_both_ways(start):
    kv_caches = vllm_like()
    own_view = kv_caches["a"][3]  # as vLLM's own layers hold views that nobody registered
    with export_kv_caches(kv_caches) as shared:
        kv_caches["a"][3] = 1
        kv_caches["mamba"][1][2, 5] = 7
        other = start("map", shared.handle)
        assert other.first == "ready"
        assert float(other.ask("sum")) == own_view.numel() + 7
        assert other.ask("fill 2") == "filled"
        assert all(bool((t == 2).all()) for t in flat(kv_caches))
        assert bool((own_view == 2).all())
        own_view.fill_(0)
        expected = 2 * sum(t.numel() for t in flat(kv_caches)) - 2 * own_view.numel()
        assert float(other.ask("sum")) == expected
        assert other.end() == 0


def test_shapes_strides_and_shared_storages_arrive(start):
    kv_caches = vllm_like()
    with export_kv_caches(kv_caches) as shared:
        assert len(shared.handle.storages) == 3
        assert shared.handle.device == "cpu"
        assert shared.handle.nbytes == 2 * 16 * 2 * 8 * 32 * 2 + 16 * 2 * 8 * 2 * 32 * 4 + 1600
        expected = [
            (n, [(list(t.shape), t.stride(), str(t.dtype)) for t in flat({n: v})]) for n, v in kv_caches.items()
        ]
        assert start("map", shared.handle).ask("describe") == str(expected)
        with open_kv_caches(shared.handle) as mapped:
            assert isinstance(mapped.kv_caches["mamba"], list)
            a, b = mapped.kv_caches["a"], mapped.kv_caches["b"]
            assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_content_survives_the_move_and_the_memory_is_private_and_of_fixed_size():
    kv_caches = {"a": torch.arange(1000, dtype=torch.float64)}
    with export_kv_caches(kv_caches) as shared:
        assert torch.equal(kv_caches["a"], torch.arange(1000, dtype=torch.float64))
        fd = shared.handle.storages[0].fd
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
        assert not os.get_inheritable(fd)
        with pytest.raises(OSError):
            os.ftruncate(fd, 8)


def test_the_handle_of_80_layers_is_small():
    kv_caches = {f"model.layers.{i}.self_attn.attn": torch.zeros(8, 2, 4, 32) for i in range(80)}
    with export_kv_caches(kv_caches) as shared:
        assert len(pickle.dumps(shared.handle)) < 20_000


def test_exporting_again_moves_nothing_and_each_export_closes_alone(start):
    kv_caches = {"a": torch.zeros(16, 64)}
    first = export_kv_caches(kv_caches)
    address = kv_caches["a"].data_ptr()
    second = export_kv_caches(kv_caches)
    assert kv_caches["a"].data_ptr() == address
    first.close()
    first.close()
    with pytest.raises(KVCacheOpenError, match="closed its export"):
        open_kv_caches(first.handle)
    assert start("map", second.handle).ask("fill 5") == "filled"
    assert bool((kv_caches["a"] == 5).all())
    second.close()
    kv_caches["a"].fill_(1)  # the engine goes on with its tensors


def test_close_drops_the_tensors_but_not_a_view_that_is_held():
    with export_kv_caches({"a": torch.ones(8)}) as shared:
        mapped = open_kv_caches(shared.handle)
        held = mapped.kv_caches["a"]
        mapped.close()
        mapped.close()
        assert mapped.kv_caches == {}
        assert bool((held == 1).all())


def test_no_descriptor_is_left():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        kv_caches = vllm_like()
        with export_kv_caches(kv_caches) as shared, open_kv_caches(shared.handle):
            pass
        del kv_caches, shared
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_failed_export_leaves_nothing_open():
    before = len(os.listdir("/proc/self/fd"))
    kv_caches = {"good": torch.zeros(8), "bad": torch.zeros(8, device="meta")}
    with pytest.raises(KVCacheExportError, match=r"'bad'.*'meta' device"):
        export_kv_caches(kv_caches)
    del kv_caches
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kv_caches", [{}, {"a": torch.zeros(0, 4)}])
def test_nothing_to_export_is_an_error(kv_caches):
    with pytest.raises(KVCacheExportError):
        export_kv_caches(kv_caches)


def test_too_large_for_the_machine_is_an_error_with_a_fix(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(KVCacheExportError, match="VLLM_CPU_KVCACHE_SPACE"):
        export_kv_caches({"a": torch.zeros(8)})


def test_killed_engine_leaves_nothing_and_the_mapper_keeps_its_memory(start):
    engine = start("export")
    handle = pickle.loads(engine.path.read_bytes())
    mapper = start("map", handle)
    assert mapper.ask("fill 3") == "filled"
    engine.kill()
    assert float(mapper.ask("sum")) == 3 * 4 * 16 * 2 * 8 * 32
    with pytest.raises(KVCacheOpenError, match=r"has ended.*Start the engine again"):
        open_kv_caches(handle)
    mapper.kill()


def test_killed_mapper_leaves_the_engine_alone(start):
    engine = start("export")
    mapper = start("map", pickle.loads(engine.path.read_bytes()))
    mapper.ask("fill 1")
    mapper.kill()
    assert float(engine.ask("sum")) == 4 * 16 * 2 * 8 * 32
    assert engine.end() == 0


def test_shared_memory_is_freed_when_both_are_killed(start):
    def shared_kib():
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:"))

    kv_caches = {"a": torch.zeros(256 << 20, dtype=torch.uint8)}
    before = shared_kib()
    with export_kv_caches(kv_caches) as shared:
        assert shared_kib() - before > 200 << 10
        mapper = start("map", shared.handle)
        mapper.kill()
    del kv_caches
    deadline = time.monotonic() + 10
    while shared_kib() - before > 100 << 10 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert shared_kib() - before < 100 << 10


def test_a_descriptor_that_became_something_else_is_never_mapped(tmp_path):
    with export_kv_caches({"a": torch.zeros(8)}) as shared:
        storage = shared.handle.storages[0]
        wrong = replace(shared.handle, storages=(replace(storage, inode=storage.inode + 1),))
        with pytest.raises(KVCacheOpenError, match="export again"):
            open_kv_caches(wrong)
        with open(tmp_path / "file", "w") as file:
            wrong = replace(shared.handle, storages=(replace(storage, fd=file.fileno()),))
            with pytest.raises(KVCacheOpenError, match="export again"):
                open_kv_caches(wrong)


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"boot_id": "another"}, "another machine.*engine's node"),
        ({"pid_namespace": "pid:[1]"}, "PID namespace.*shareProcessNamespace"),
        ({"pid": 2**22 + 1}, "has ended"),
    ],
)
def test_an_origin_out_of_reach_names_the_cause_and_the_fix(changes, fix):
    with export_kv_caches({"a": torch.zeros(8)}) as shared:
        handle = replace(shared.handle, origin=replace(shared.handle.origin, **changes))
        with pytest.raises(KVCacheOpenError, match=fix):
            open_kv_caches(handle)


def test_an_unknown_dtype_names_the_torch_versions():
    with export_kv_caches({"a": torch.zeros(8)}) as shared:
        layers = {"a": replace(shared.handle.layers["a"], dtype="float3")}
        with pytest.raises(KVCacheOpenError, match=r"float3.*engine's torch"):
            open_kv_caches(replace(shared.handle, layers=layers))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_another_user_is_refused(tmp_path):
    # In a bare child: another user can't be expected to read this checkout or its environment.
    with export_kv_caches({"a": torch.zeros(8)}) as shared:
        handle = shared.handle
        child = os.fork()
        if child == 0:
            try:
                os.setgid(65534)
                os.setuid(65534)
                open_kv_caches(handle)
            except KVCacheOpenError as error:
                os._exit(0 if "same user" in str(error) else 1)
            except BaseException:
                os._exit(2)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_another_pid_namespace_is_refused_with_the_fix(start):
    prefix = ["unshare", "--pid", "--fork", "--mount-proc"]
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("can't make a PID namespace here")
    with export_kv_caches({"a": torch.zeros(8)}) as shared:
        other = start("map", shared.handle, prefix=prefix)
        assert "KVCacheOpenError" in other.first and "shareProcessNamespace" in other.first
        assert other.end() == 1
