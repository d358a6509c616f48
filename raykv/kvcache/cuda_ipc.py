"""CUDA memory: export a storage by CUDA IPC and open it in another process, through torch's own machinery.

torch keeps one small reference-counter file per exporting process in /dev/shm (torch_<pid>_...) and removes
it at a clean exit. After a kill -9 of the exporter it would stay: the mapper removes it then
(`sweep_after_death`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import torch

from raykv.errors import KVCacheExportError, KVCacheOpenError
from raykv.kvcache.handles import CudaStorageHandle, Origin

_EXPANDABLE = "expandable_segments"
# torch's handle is: version byte, type byte ('c' cudaMalloc, 'e' expandable segment), then the driver's bytes
# (SHAREABLE_HANDLE_VERSION in its CUDACachingAllocator.cpp).
_TYPE_EXPANDABLE = b"e"

_FIX_EXPANDABLE = (
    "The KV cache lies in torch's expandable segments, whose pages can be remapped under another process. "
    "Take `expandable_segments:True` out of PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF, or let RayKV "
    "choose the KV cache's memory pool (it does so where vLLM asks the connector for one)."
)


def export_cuda(storage: torch.UntypedStorage) -> CudaStorageHandle:
    """Describe `storage` for another process. The caller keeps the storage alive while anyone may map it."""
    try:
        _, memory, size, offset, counter, counter_offset, event, sync = storage._share_cuda_()
    except RuntimeError as error:
        raise KVCacheExportError(_why_not_exported(error)) from error
    if memory is None:
        raise KVCacheExportError("A KV cache tensor has no memory yet: export it after the engine allocated it.")
    if memory[1:2] == _TYPE_EXPANDABLE:
        raise KVCacheExportError(_FIX_EXPANDABLE)
    return CudaStorageHandle(
        device_uuid=device_uuid(storage.device),
        memory=memory,
        size=size,
        offset=offset,
        ref_counter=counter,
        ref_counter_offset=counter_offset,
        event=event,
        event_sync_required=sync,
    )


def open_cuda(handle: CudaStorageHandle, origin: Origin) -> torch.UntypedStorage:
    """Map the memory behind `handle` on whatever index this process sees the exporter's GPU under."""
    if origin.pid == os.getpid() and origin.pid_namespace == Origin.here().pid_namespace:
        raise KVCacheOpenError("CUDA IPC can't open memory in the process that exports it: use the tensors you have.")
    index = local_device_index(handle.device_uuid)
    try:
        torch.cuda.init()
        return torch.UntypedStorage._new_shared_cuda(
            index,
            handle.memory,
            handle.size,
            handle.offset,
            handle.ref_counter,
            handle.ref_counter_offset,
            handle.event,
            handle.event_sync_required,
        )
    except RuntimeError as error:
        raise KVCacheOpenError(_why_not_opened(error, origin)) from error


def device_uuid(device: torch.device | int) -> str:
    """The UUID of a GPU (or MIG slice), without the driver's "GPU-" in front."""
    return str(torch.cuda.get_device_properties(device).uuid)


def describe_device(device: torch.device) -> str:
    """A GPU for people: its name and UUID."""
    return f"{torch.cuda.get_device_name(device)} (GPU-{device_uuid(device)})"


def local_device_index(uuid: str) -> int:
    """The index under which this process sees the GPU; `KVCacheOpenError` if it doesn't."""
    if not torch.cuda.is_available():
        raise KVCacheOpenError(
            f"The KV cache is on GPU-{uuid}, but torch {torch.__version__} sees no GPU here "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '<unset>')!r}). Start this "
            f"process with a CUDA build of torch and CUDA_VISIBLE_DEVICES=GPU-{uuid}."
        )
    visible = [device_uuid(index) for index in range(torch.cuda.device_count())]
    if uuid in visible:
        return visible.index(uuid)
    raise KVCacheOpenError(
        f"The KV cache is on GPU-{uuid}, which this process doesn't see: CUDA_VISIBLE_DEVICES is "
        f"{os.environ.get('CUDA_VISIBLE_DEVICES', '<unset>')!r}, visible are {', '.join(visible) or 'none'}. "
        f"Start it on the engine's node with CUDA_VISIBLE_DEVICES=GPU-{uuid}. A MIG slice opens only "
        "inside the same slice."
    )


def sweep_after_death(handles: Iterable[CudaStorageHandle], origin: Origin) -> None:
    """Remove the reference-counter files of an exporter that was killed; does nothing while its pid is
    alive.
    """
    if origin.pid_namespace != Origin.here().pid_namespace or origin.is_alive():
        return
    for name in {os.path.basename(os.fsdecode(handle.ref_counter)) for handle in handles}:
        if name.startswith(f"torch_{origin.pid}_"):
            with suppress(OSError):
                os.unlink(f"/dev/shm/{name}")


def expandable_segments_on() -> bool:
    """Whether new allocations would land in expandable segments, from the live setting or the environment."""
    return any(field.replace(" ", "").lower() == f"{_EXPANDABLE}:true" for field in _allocator_conf().split(","))


def exportable_pool_context(*, force: bool = False) -> AbstractContextManager[None] | None:
    """A context in which KV cache allocations can be exported, or None where the usual pool does.

    For vLLM's `get_mem_pool_context`. None on the CPU, and on CUDA without expandable segments. `force`
    asks for it on CUDA in any case: for an engine whose usual pool can't be exported (sleep mode; its KV
    cache then doesn't sleep). The pool lives as long as the process.
    """
    if not torch.cuda.is_available() or not (force or expandable_segments_on()):
        return None
    return _private_pool()


_pools: list[torch.cuda.MemPool] = []  # a pool must outlive its tensors


@contextmanager
def _private_pool() -> Iterator[None]:
    before, expandable = _allocator_conf(), expandable_segments_on()
    if expandable:
        _set_allocator_conf(_without_expandable(before))
    try:
        _pools.append(torch.cuda.MemPool())
        with torch.cuda.use_mem_pool(_pools[-1]):
            yield
    finally:
        if expandable:
            _set_allocator_conf(before)


def _allocator_conf() -> str:
    get = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    live = get() if get is not None else ""
    return live or os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def _without_expandable(conf: str) -> str:
    """The whole string again: torch resets every option that is absent from the one it gets."""
    fields = [field.strip() for field in conf.split(",") if field.strip()]
    return ",".join([*(f for f in fields if f.partition(":")[0].strip() != _EXPANDABLE), f"{_EXPANDABLE}:False"])


def _set_allocator_conf(conf: str) -> None:
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    setter(conf)


def _why_not_exported(error: RuntimeError) -> str:
    first = str(error).partition("\n")[0]
    if "received from another process" in first:
        return "This memory was itself opened by CUDA IPC: export it from the process that allocated it."
    if expandable_segments_on():
        return f"{_FIX_EXPANDABLE} (torch: {first})"
    return (
        f"CUDA can't export this memory ({first}). Sleep mode allocates the KV cache in a pool that can't be "
        "shared: start vLLM without --enable-sleep-mode. Otherwise the GPU or the "
        "container has no CUDA IPC (WSL, some vGPUs)."
    )


def _why_not_opened(error: RuntimeError, origin: Origin) -> str:
    first = str(error).partition("\n")[0]
    here = Origin.here()
    what = f"Can't map the engine's GPU memory from process {origin.pid} ({first}): "
    if origin.boot_id and here.boot_id and origin.boot_id != here.boot_id:
        return what + "it runs on another machine. Place this process on the engine's node."
    if origin.ipc_namespace != here.ipc_namespace:
        return what + (
            "it is in another IPC namespace. Give both containers one: `--ipc=host` (or "
            "`--ipc=container:<name>`) with Docker, one pod with Kubernetes; or run both in one container."
        )
    if origin.pid_namespace == here.pid_namespace and not origin.is_alive():
        return what + "it has ended. Start the engine again; its worker exports the KV cache anew."
    return what + (
        "check that both run on the same driver and device (a MIG slice opens only inside the same slice), "
        "and that the engine still holds its export."
    )
