"""What crosses to the other process: frozen, picklable descriptions of memory. No torch here, and no
memory.

A handle owns nothing. It is good for as long as the exporter keeps its `SharedKVCache` open; after that,
opening it fails with a clear error and never maps anything else.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from raykv.kvcache.fence import FenceHandle


@dataclass(frozen=True)
class Origin:
    """The process that exports, with what tells another process why it can't reach it."""

    pid: int
    boot_id: str  # one per machine and boot; empty where /proc hides it
    pid_namespace: str
    ipc_namespace: str

    @classmethod
    def here(cls) -> Origin:
        """Describe the calling process."""
        return cls(
            pid=os.getpid(),
            boot_id=_read("/proc/sys/kernel/random/boot_id"),
            pid_namespace=_link("/proc/self/ns/pid"),
            ipc_namespace=_link("/proc/self/ns/ipc"),
        )

    def is_alive(self) -> bool:
        """Whether a process of that pid is there. Only meaningful in the same PID namespace."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        return state not in "ZX"


@dataclass(frozen=True)
class ShmStorageHandle:
    """Anonymous shared memory (a memfd), reached through the exporter's open file descriptor."""

    kind: ClassVar[str] = "shm"
    fd: int
    device: int  # st_dev and st_ino: they catch a pid or a descriptor that was reused
    inode: int
    size: int


@dataclass(frozen=True)
class CudaStorageHandle:
    """A part of a CUDA allocation, as torch's own CUDA IPC describes it."""

    kind: ClassVar[str] = "cuda_ipc"
    device_uuid: str  # never an index: the other process may number its devices differently
    memory: bytes
    size: int
    offset: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    event_sync_required: bool


StorageHandle = ShmStorageHandle | CudaStorageHandle


@dataclass(frozen=True)
class TensorHandle:
    """One tensor: a view into a storage, in elements of its dtype."""

    storage: int  # index into KVCacheHandle.storages
    dtype: str  # "bfloat16", as in torch.bfloat16
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int


@dataclass(frozen=True)
class KVCacheHandle:
    """All KV memory of one worker rank. A few hundred bytes a layer, so it travels inside an actor call.

    `layers` keeps the order of registration. A layer that has several tensors (mamba: convolution and
    state) is a tuple here and a list again on the other side.
    """

    origin: Origin
    device: str  # for people: "cpu", or the GPU's name and UUID
    storages: tuple[StorageHandle, ...]
    layers: dict[str, TensorHandle | tuple[TensorHandle, ...]]

    @property
    def nbytes(self) -> int:
        """Bytes of memory behind the handle; each storage counts once however many layers share it."""
        return sum(storage.size for storage in self.storages)


@dataclass(frozen=True)
class CacheHandles:
    """The engine's KV cache and the fence behind its forward passes."""

    caches: KVCacheHandle
    fence: FenceHandle


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
