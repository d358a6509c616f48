"""Share the KV cache of an engine's worker with other processes of its node.

The worker calls `export_kv_caches` on what vLLM registered and sends `.handle` over; the other process
calls `open_kv_caches` and gets tensors with the same names, shapes and strides over the same memory. CPU
memory goes by anonymous shared memory, GPU memory by CUDA IPC.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType

import torch

from raykv.errors import KVCacheExportError, KVCacheOpenError
from raykv.kvcache import cuda_ipc, shm
from raykv.kvcache.handles import (
    CudaStorageHandle,
    KVCacheHandle,
    Origin,
    ShmStorageHandle,
    StorageHandle,
    TensorHandle,
)

KVCaches = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]

__all__ = [
    "CudaStorageHandle",
    "KVCacheHandle",
    "MappedKVCache",
    "Origin",
    "SharedKVCache",
    "ShmStorageHandle",
    "StorageHandle",
    "TensorHandle",
    "export_kv_caches",
    "open_kv_caches",
]


class SharedKVCache:
    """The exporting side. Owns what keeps the handle good; made by `export_kv_caches`, one owner, any
    thread.

    While it is open any process of the same user on the node may open the handle. `close` ends that and
    nothing else: mappings that exist stay valid, and a CPU engine's tensors stay in shared memory. On CUDA
    it also drops the references that keep the memory allocated, so there close it only when no mapper is
    left: a mapper of freed GPU memory reads whatever comes next. A process that ends needs no `close`.
    """

    def __init__(self, handle: KVCacheHandle, resources: ExitStack) -> None:
        self.handle = handle
        self._resources = resources

    def close(self) -> None:
        """Withdraw the export. Idempotent."""
        self._resources.close()

    def __enter__(self) -> SharedKVCache:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


class MappedKVCache:
    """The importing side. `kv_caches` maps layer to tensor (or list of tensors) over the exporter's memory.

    One owner, any thread. Nothing here orders accesses: the owner reads a block only when its bytes are
    final (on CUDA after a `ForwardFence`) and writes one only while it is pinned for that. When the
    exporter dies, CPU memory stays until it is unmapped here; GPU memory must not be touched any more.
    """

    def __init__(self, kv_caches: dict[str, torch.Tensor | list[torch.Tensor]], on_close: ExitStack) -> None:
        self.kv_caches = kv_caches
        self._on_close = on_close

    def close(self) -> None:
        """Drop the tensors. Idempotent. A view that somebody else still holds keeps its memory mapped."""
        self.kv_caches.clear()
        self._on_close.close()

    def __enter__(self) -> MappedKVCache:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def export_kv_caches(kv_caches: KVCaches) -> SharedKVCache:
    """Make the memory of these tensors open to other processes of the same user on this node.

    Blocks while CPU memory is copied (0.5 to 2 s a GiB, once), so call it while no forward runs: CPU
    storages move, under every view of them, and addresses taken before are void. Call it where vLLM
    registers the caches, before anything else registers their addresses. Exporting the same tensors again
    is cheap and gives a handle of its own. Raises `KVCacheExportError` with the fix in the message; then
    nothing stays exported.
    """
    if not kv_caches:
        raise KVCacheExportError("The engine registered no KV caches, so there is nothing to share.")
    storages: list[StorageHandle] = []
    index_of: dict[int, int] = {}  # address of the C++ storage, which outlives the move
    devices: set[torch.device] = set()

    def describe(name: str, tensor: torch.Tensor, resources: ExitStack) -> TensorHandle:
        storage = tensor.untyped_storage()
        if storage._cdata not in index_of:
            try:
                storages.append(_export_storage(storage, resources))
            except KVCacheExportError as error:
                raise KVCacheExportError(f"KV cache of layer {name!r}: {error}") from error
            index_of[storage._cdata] = len(storages) - 1
            devices.add(tensor.device)
        return TensorHandle(
            storage=index_of[storage._cdata],
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            storage_offset=tensor.storage_offset(),
        )

    with ExitStack() as resources:
        layers: dict[str, TensorHandle | tuple[TensorHandle, ...]] = {}
        for name, value in kv_caches.items():
            if isinstance(value, torch.Tensor):
                layers[name] = describe(name, value, resources)
            else:
                layers[name] = tuple(describe(name, tensor, resources) for tensor in value)
        device = ", ".join(sorted({_device_name(device) for device in devices}))
        return SharedKVCache(KVCacheHandle(Origin.here(), device, tuple(storages), layers), resources.pop_all())
    raise AssertionError("unreachable")  # an ExitStack may swallow errors, says its type


def open_kv_caches(handle: KVCacheHandle) -> MappedKVCache:
    """Map the memory behind `handle`; all of it or, with `KVCacheOpenError` and the fix in its message,
    nothing.

    On the CPU any process of the same user and PID namespace may open, the exporter too. On CUDA it must be
    another process that sees the exporter's GPU.
    """
    storages = [_open_storage(storage, handle.origin) for storage in handle.storages]
    kv_caches: dict[str, torch.Tensor | list[torch.Tensor]] = {}
    for name, layer in handle.layers.items():
        if isinstance(layer, TensorHandle):
            kv_caches[name] = _tensor(layer, storages)
        else:
            kv_caches[name] = [_tensor(part, storages) for part in layer]
    on_close = ExitStack()
    cuda = [storage for storage in handle.storages if isinstance(storage, CudaStorageHandle)]
    if cuda:
        on_close.callback(cuda_ipc.sweep_after_death, cuda, handle.origin)
    return MappedKVCache(kv_caches, on_close)


def _export_storage(storage: torch.UntypedStorage, resources: ExitStack) -> StorageHandle:
    kind = storage.device.type
    if kind == "cpu":
        handle, fd = shm.move_to_shm(storage)
        resources.callback(os.close, fd)
        return handle
    if kind == "cuda":
        resources.callback(_let_go, storage)
        return cuda_ipc.export_cuda(storage)
    raise KVCacheExportError(f"RayKV can't share memory on a {kind!r} device: only cpu and cuda. Use `run: inline`.")


def _let_go(storage: torch.UntypedStorage) -> None:
    """The callback that holds a GPU storage until the export is closed."""


def _open_storage(handle: StorageHandle, origin: Origin) -> torch.UntypedStorage:
    if isinstance(handle, ShmStorageHandle):
        return shm.open_shm(handle, origin)
    return cuda_ipc.open_cuda(handle, origin)


def _tensor(handle: TensorHandle, storages: Sequence[torch.UntypedStorage]) -> torch.Tensor:
    dtype = getattr(torch, handle.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise KVCacheOpenError(
            f"The KV cache is {handle.dtype}, which torch {torch.__version__} here doesn't know. "
            "Use the engine's torch."
        )
    storage = storages[handle.storage]
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, handle.storage_offset, handle.shape, handle.stride)


def _device_name(device: torch.device) -> str:
    return cuda_ipc.describe_device(device) if device.type == "cuda" else str(device)
